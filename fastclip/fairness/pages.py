"""Reports as one HTML file that needs no network and no script, with a Markdown twin."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from fastclip.errors import ArgumentError

NOTES = {
    "private": "May be published: covered by epsilon",
    "held out": "Not covered by epsilon: measured on held-out rows without noise",
    "not private": "Not private: raw training rows, do not publish",
    "caution": "Caution",
    "synthetic": "Synthetic data",
}
"""Kinds of notes, and the words in front of them."""

WORDS = ' class="text"'
"""Of cells of a column that holds words, which may wrap."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --soft: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --paper: #16191d; --line: #3a4149; --soft: #22272d; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
figure { margin: 1.2rem 0; }
figcaption, caption { text-align: left; font-size: .92rem; padding: .4rem 0; }
img { display: block; max-width: 100%; height: auto; background: #fff; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem;
  min-width: min(100%, 26rem); }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
td.text { white-space: normal; min-width: 7rem; }
thead th { background: var(--soft); vertical-align: bottom; white-space: normal; }
.note { border-left: .3rem solid #999; background: var(--soft); padding: .5rem .8rem; margin: .8rem 0; }
.note.private { border-color: #009e73; } .note.held-out { border-color: #e69f00; }
.note.not-private { border-color: #d55e00; } .note.caution, .note.synthetic { border-color: #cc79a7; }
nav ul { columns: 2; padding-left: 1.2rem; } @media (max-width: 40rem) { nav ul { columns: 1; } }
"""


class Part(NamedTuple):
    """A piece of a page, in both languages; a picture has its PNG, whose place `markdown` ends with."""

    html: str
    markdown: str
    png: bytes | None = None
    after: str = ""
    """What follows the place of the picture in Markdown."""


class Page:
    """A report that grows from top to bottom.

    Args:
        title: of the page.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[Part] = []
        self._headings: list[str] = []

    def heading(self, text: str) -> None:
        """A section begins."""
        self._headings.append(text)
        place = f"part{len(self._headings)}"
        self._add(f'<h2 id="{place}">{_escaped(text)}</h2>', f"## {_plain(text)}")

    def text(self, text: str) -> None:
        """A paragraph."""
        self._add(f"<p>{_escaped(text)}</p>", _line(text))

    def items(self, texts: Sequence[str]) -> None:
        """A list."""
        listed = "".join(f"<li>{_escaped(text)}</li>" for text in texts)
        self._add(f"<ul>{listed}</ul>", "\n".join(f"- {_line(text)}" for text in texts))

    def note(self, text: str, kind: str) -> None:
        """A box that says what may be done with what follows; `kind` is one of `NOTES`."""
        if kind not in NOTES:
            raise ArgumentError(f"kind expects one of {tuple(NOTES)}, got {kind!r}")
        title, text = NOTES[kind], text[:1].upper() + text[1:]
        self._add(
            f'<p class="note {kind.replace(" ", "-")}"><strong>{title}.</strong> {_escaped(text)}</p>',
            f"> **{title}.** {_plain(text)}",
        )

    def table(self, table: pd.DataFrame, caption: str) -> None:
        """A table; floats get four significant digits, NaN a dash."""
        texts = {name: not pd.api.types.is_numeric_dtype(table[name]) for name in table}
        worded = {
            name: texts[name] and any(re.search(r"[a-z]{2}", _cell(value)) for value in table[name])
            for name in table
        }
        head = "".join(
            f'<th scope="col"{WORDS if worded[name] else ""}>{_escaped(str(name))}</th>'
            for name in table
        )
        rows, lines = [], []
        for values in table.itertuples(index=False, name=None):
            cells = [_cell(value) for value in values]
            marked = [
                f"<td{WORDS if worded[name] else ''}>{_escaped(cell)}</td>"
                for name, cell in zip(table, cells, strict=True)
            ]
            rows.append(f"<tr>{''.join(marked)}</tr>")
            lines.append(
                "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"
            )
        names = [_plain(str(name)).replace("|", "\\|") for name in table]
        rule = ["---" if texts[name] else "---:" for name in table]
        heads = [f"| {' | '.join(names)} |", f"| {' | '.join(rule)} |"]
        self._add(
            f'<div class="wide" tabindex="0"><table><caption>{_escaped(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>",
            "\n".join([_line(caption), "", *heads, *lines]),
        )

    def figure(self, figure: Figure, caption: str, alt: str) -> None:
        """A picture.

        Args:
            caption: what it shows.
            alt: what who cannot see it needs to know.
        """
        if not alt.strip():
            raise ArgumentError("figure expects alt, a sentence for who cannot see the picture")
        png = _png(figure)
        data = base64.b64encode(png).decode()
        self._add(
            f'<figure><div class="wide" tabindex="0"><img alt="{_escaped(alt)}" '
            f'style="min-width: {4 * figure.get_figwidth():.0f}rem" '
            f'src="data:image/png;base64,{data}"></div>'
            f"<figcaption>{_escaped(caption)}</figcaption></figure>",
            f"![{_plain(alt)}](",
            png,
            f")\n\n{_line(caption)}",
        )

    def write(self, path: Path) -> list[Path]:
        """Write the page, its Markdown twin and that one's pictures.

        Args:
            path: of the HTML file.

        Returns:
            The files written.

        Raises:
            ArgumentError: for a path that does not end in .html or .htm.
        """
        if path.suffix.lower() not in (".html", ".htm"):
            raise ArgumentError(
                f"path expects the name of an HTML file, NAME.html, got {str(path)!r}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        listed = "".join(
            f'<li><a href="#part{number}">{_escaped(text)}</a></li>'
            for number, text in enumerate(self._headings, 1)
        )
        body = "\n".join(part.html for part in self._parts)
        path.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{_escaped(self.title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><main><h1>{_escaped(self.title)}</h1><nav><ul>{listed}</ul></nav>\n{body}\n"
            "</main></body></html>\n",
            encoding="utf-8",
        )
        written = [path]
        lines = [f"# {_plain(self.title)}"]
        for number, part in enumerate(self._parts):
            if part.png is None:
                lines.append(part.markdown)
                continue
            picture = path.parent / f"{path.stem}-pictures" / f"{number}.png"
            picture.parent.mkdir(exist_ok=True)
            picture.write_bytes(part.png)
            written.append(picture)
            where = quote(picture.relative_to(path.parent).as_posix())
            lines.append(part.markdown + where + part.after)
        twin = path.with_suffix(".md")
        twin.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
        return [*written, twin]

    def _add(
        self, in_html: str, markdown: str, png: bytes | None = None, after: str = ""
    ) -> None:  # fmt: skip
        self._parts.append(Part(in_html, markdown, png, after))


def _png(figure: Figure) -> bytes:
    """A third of the bytes: charts have few colours, so a palette shows them as well."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    Image.open(drawn).convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _plain(text: str) -> str:
    """As text in Markdown: no tag of HTML, no emphasis that was not meant, one line."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_~\[\]])", r"\\\1", text)


def _line(text: str) -> str:
    """The same at the beginning of a line, where it might begin a list or a heading."""
    return re.sub(r"^(\d+(?=[.)](?:\s|$))|(?=[-+#=]))", r"\1\\", _plain(text))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return str(value)
