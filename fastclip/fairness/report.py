"""HTML report of a run, with pictures: the effect of clipping on each group."""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from fastclip.accounting import TunedEpsilon
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness.recorder import ALL, CLASS, COLUMNS, LAYER, TRAINING, FairnessRecorder
from fastclip.fairness.statistics import gap, privacy_impact

# -------------------------------------------------------------------------------------------------
# Reports as one HTML file without network access or scripts, with a Markdown copy.


NOTES = {
    "private": "May be published: covered by epsilon",
    "held out": "Not covered by epsilon: measured on held-out samples without noise",
    "not private": "Not private: raw training samples, do not publish",
    "caution": "Caution",
    "synthetic": "Synthetic data",
}
"""Kinds of notes, and their titles."""

WORDS = ' class="text"'
"""Attribute of cells in columns of words, which may wrap."""

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
    """A piece of a page in HTML and Markdown. For a picture, `markdown` ends before its path."""

    html: str
    markdown: str
    png: bytes | None = None
    after: str = ""
    """Markdown after the path of the picture."""


class Page:
    """A report that grows from top to bottom.

    Args:
        title: title of the page.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[Part] = []
        self._headings: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._headings.append(text)
        place = f"part{len(self._headings)}"
        self._add(f'<h2 id="{place}">{_escaped(text)}</h2>', f"## {_plain(text)}")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._add(f"<p>{_escaped(text)}</p>", _line(text))

    def items(self, texts: Sequence[str]) -> None:
        """Add a list."""
        listed = "".join(f"<li>{_escaped(text)}</li>" for text in texts)
        self._add(f"<ul>{listed}</ul>", "\n".join(f"- {_line(text)}" for text in texts))

    def note(self, text: str, kind: str) -> None:
        """Add a box that says whether the following may be published. `kind` is one of `NOTES`."""
        if kind not in NOTES:
            raise ArgumentError(f"kind expects one of {tuple(NOTES)}, got {kind!r}.")
        title, text = NOTES[kind], text[:1].upper() + text[1:]
        self._add(
            f'<p class="note {kind.replace(" ", "-")}"><strong>{title}.</strong> {_escaped(text)}</p>',
            f"> **{title}.** {_plain(text)}",
        )

    def table(self, table: pd.DataFrame, caption: str) -> None:
        """Add a table. Floats get four significant digits, and NaN a dash."""
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
        """Add a picture.

        Args:
            figure: the matplotlib figure.
            caption: caption of the picture.
            alt: description for readers who cannot see the picture.
        """
        if not alt.strip():
            raise ArgumentError(
                "alt expects a description for readers who cannot see the picture, got none."
            )
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
        """Write the page, its Markdown copy and the pictures of the copy.

        Args:
            path: path of the HTML file.

        Returns:
            The files written.

        Raises:
            ArgumentError: for a path that does not end in .html or .htm.
        """
        if path.suffix.lower() not in (".html", ".htm"):
            raise ArgumentError(
                f"path expects the name of an HTML file, NAME.html, got {str(path)!r}."
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
        copy = path.with_suffix(".md")
        copy.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
        return [*written, copy]

    def _add(
        self, in_html: str, markdown: str, png: bytes | None = None, after: str = ""
    ) -> None:  # fmt: skip
        self._parts.append(Part(in_html, markdown, png, after))


def _png(figure: Figure) -> bytes:
    """Return a PNG with a palette, which is a third of the size and enough for charts."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=120)
    Image.open(full).convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _plain(text: str) -> str:
    """Escape one line of text for Markdown, so it holds no HTML tags and no emphasis."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_~\[\]])", r"\\\1", text)


def _line(text: str) -> str:
    """Escape text at the beginning of a line, where it might begin a list or a heading."""
    return re.sub(r"^(\d+(?=[.)](?:\s|$))|(?=[-+#=]))", r"\1\\", _plain(text))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return str(value)


# -------------------------------------------------------------------------------------------------
# Pictures of reports: lines over steps or budgets, dots by group. Legible at a width of 100 mm.
#
# Colors are those of Okabe and Ito 2008, which people with any color vision can distinguish. Marks
# and dashes differ as well.


COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31",
    "#7f7f7f", "#5e3c99",
)  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", "-.", ":")
WIDTH = 5.2
"""Width of a panel in inches, at which 10 points become 7.6 at 100 mm."""
PICTURE_COLUMNS = 2


class Line(NamedTuple):
    """Values of y over x, optionally with intervals."""

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[tuple[float, float]] | None = None
    """Low and high end of each value's interval."""


def lines(
    panels: Mapping[str, Mapping[str, Line]], xlabel: str, ylabel: str, *, share: bool = False,
    log: bool = False, xlog: bool = False, columns: int = PICTURE_COLUMNS,
) -> Figure:  # fmt: skip
    """Plot a panel for each title and a line for each name, with one legend below.

    Args:
        panels: lines by name, for each title.
        xlabel: label of the x axis.
        ylabel: label of the y axis.
        share: values are shares of 1, shown in percent.
        log: logarithmic y axis.
        xlog: logarithmic x axis.
        columns: number of panels side by side. One is legible on a phone.
    """
    names = list(dict.fromkeys(name for of in panels.values() for name in of))
    figure, axes = _panels(list(panels), 3.3, len(names), columns)
    for place, (axis, of) in enumerate(zip(axes, panels.values(), strict=True)):
        for name, line in of.items():
            style = _style(names.index(name))
            many = len(line.x) > 12
            axis.plot(
                line.x, line.y, label=_text(name), markevery=max(1, len(line.x) // 8), **style
            )
            if line.error is not None and not many:
                _bars(axis, line, style["color"])
        axis.set_xlabel(_text(xlabel))
        axis.set_ylabel("" if place % columns else _text(ylabel))
        if log and any(value > 0 for line in of.values() for value in line.y):
            _logarithmic(axis, "y")
        if xlog:
            ticks = sorted({value for line in of.values() for value in line.x})
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5))
        if share:
            _percent(axis, "y")
    _legend(figure, axes, columns)
    return figure


def dots(
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float]]]], xlabel: str, *,
    share: bool = False, log: bool = False,
) -> Figure:  # fmt: skip
    """Plot a panel for each title, a row for each name, a mark for each group (value, low, high)."""
    rows = list(dict.fromkeys(row for of in panels.values() for row in of))
    groups = list(dict.fromkeys(g for of in panels.values() for row in of.values() for g in row))
    figure, axes = _panels(list(panels), 0.9 + 0.34 * len(rows), len(groups), PICTURE_COLUMNS)
    for place, (axis, of) in enumerate(zip(axes, panels.values(), strict=True)):
        for name, values in of.items():
            y = rows.index(name)
            known = [value for value, _, _ in values.values() if not math.isnan(value)]
            if known:
                axis.plot([min(known), max(known)], [y, y], color="#c4c7cc", linewidth=2, zorder=1)
            for group, (value, low, high) in values.items():
                style = _style(groups.index(group))
                if not math.isnan(low):
                    axis.plot([low, high], [y, y], color=style["color"], linewidth=1.2, zorder=2)
                axis.plot([value], [y], linestyle="none", marker=style["marker"], markersize=6,
                          color=style["color"], label=_text(group), zorder=3)  # fmt: skip
        axis.set_yticks(
            range(len(rows)),
            [""] * len(rows) if place % PICTURE_COLUMNS else [_text(row) for row in rows],
        )
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(_text(xlabel))
        if log:
            _logarithmic(axis, "x")
        if share:
            _percent(axis, "x")
    _legend(figure, axes, PICTURE_COLUMNS)
    return figure


def _panels(
    titles: Sequence[str], height: float, names: int, columns: int
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Return a figure with axes side by side, at most `columns` in a row."""
    columns = min(columns, max(1, len(titles)))
    rows = math.ceil(len(titles) / columns)
    below = 0.25 * math.ceil(names / (3 * columns)) + 0.2
    figure = Figure(figsize=(WIDTH * columns, (height + 0.4) * rows + below), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1).tolist()
    for spare in axes[len(titles) :]:
        spare.set_visible(False)
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(_text(title), loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e8eaed")
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=10)
    return figure, axes[: len(titles)]


def _text(name: str) -> str:
    """Escape a name for matplotlib, so it is no formula and is not hidden by an underscore."""
    shown = " ".join(name.split()).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": DASHES[number // len(COLORS) % len(DASHES)],
    }


def _bars(axis: Axes, line: Line, color: str) -> None:
    for x, (low, high) in zip(line.x, line.error or (), strict=True):
        if not math.isnan(low):
            axis.plot([x, x], [low, high], color=color, linewidth=1, alpha=0.6)


def _logarithmic(axis: Axes, which: str) -> None:
    """Set a logarithmic axis with few ticks and plain numbers, also within one power of ten."""
    axis.set(**{f"{which}scale": "log"})
    of = axis.xaxis if which == "x" else axis.yaxis
    low, high = of.get_view_interval()
    subs = (1, 2, 5) if high / low < 100 else (1,)
    near = high / low < 5  # powers of ten may lie outside
    of.set_major_locator(MaxNLocator(5) if near else LogLocator(subs=subs, numticks=6))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    of.set_minor_formatter(NullFormatter())


def _percent(axis: Axes, which: str) -> None:
    """Set few ticks in percent, without rounding errors."""
    of = axis.xaxis if which == "x" else axis.yaxis
    of.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}%"))


def _legend(figure: Figure, axes: Sequence[Axes], columns: int) -> None:
    """Add one legend below all panels, with each name once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        columns = min(len(found), 3 * len(axes[:columns]))
        figure.legend(
            handles=list(found.values()), labels=list(found), loc="outside lower left",
            ncols=columns, frameon=False, fontsize=10,
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------


OVERALL = ("accuracy", "macro_accuracy", "worst_class_accuracy", "loss_mean")
TRAINED = "train"
"""Name of the part of samples that were trained on, in `FairnessRecorder.evaluate`."""
RATES = (
    "rows", "accuracy", "accuracy_low", "accuracy_high", "loss_mean", "loss_sum", "selection_rate",
    "true_positive_rate", "false_positive_rate",
)  # fmt: skip


def fairness_report(
    run: FairnessRecorder | pd.DataFrame, path: str | Path, *, title: str = "Fairness of this run",
    epsilon: float | None = None, delta: float | None = None,
    baseline: FairnessRecorder | pd.DataFrame | None = None, searched: TunedEpsilon | None = None,
    part: str = "test", publish: bool = False,
) -> list[Path]:  # fmt: skip
    """Write a page about one run.

    Args:
        run: a recorder, or its table.
        path: path of the HTML file. A Markdown copy and its pictures are written next to it.
        title: title of the page.
        epsilon: epsilon of the run, `engine.get_epsilon(delta)`.
        delta: delta of epsilon.
        baseline: recorder or table of a run without privacy, for the cost of privacy by group.
        searched: cost of the search that chose this run, from `fastclip.accounting.hpo_epsilon`.
        part: the evaluated part that the tables show.
        publish: leave out every figure that may not be published (by the column `private`).

    Returns:
        The files written.

    Raises:
        ArgumentError: for a path that is not an HTML file, or a baseline with other groups.

    Guarantee: none. Every table and picture says whether it may be published. Figures that follow from
    the private run alone are covered by its epsilon. Figures of evaluation samples without noise are not
    covered. Figures of training samples have no finite epsilon.
    """
    frame = _table("run", run, publish)
    page = Page(title)
    _budget(page, frame, epsilon, delta, searched)
    evaluated = _evaluated(frame, part)
    if evaluated.empty:
        known = sorted(set(frame["part"]) - {TRAINING})
        page.text(
            f"Nothing was evaluated under the name {part!r}. Evaluated parts: "
            f"{', '.join(known) or 'none'}."
        )
    else:
        _evaluations(page, evaluated, part)
        if baseline is not None:
            plain = _evaluated(_table("baseline", baseline, publish), part)
            if plain.empty:
                raise ArgumentError(f"baseline expects an evaluation of {part!r}, got none.")
            _impact(page, evaluated, plain, part)
    _thresholds(page, frame)
    _norms(page, frame)
    return page.write(Path(path))


def _evaluated(frame: pd.DataFrame, part: str) -> pd.DataFrame:
    """Return the measures of a part, the last ones if a step has several."""
    found = frame[(frame["part"] == part) & (frame["part"] != TRAINING)]
    return found.drop_duplicates(["step", "attribute", "group", "measure"], keep="last")


def _publishable(page: Page, frame: pd.DataFrame, part: str, what: str) -> None:
    """Add a note on whether figures of a part's samples may be published."""
    if frame["private"].all():
        page.note(
            f"figures of {part!r} follow from noisy counts, whose privacy cost is in the ledger. "
            "engine.privacy_by_data_set lists whom it protects and the epsilon.", "private",
        )  # fmt: skip
        return
    page.note(what, "not private" if part == TRAINED else "held out")


def _table(name: str, run: FairnessRecorder | pd.DataFrame, publish: bool) -> pd.DataFrame:
    frame = run.frame() if isinstance(run, FairnessRecorder) else run
    if not isinstance(frame, pd.DataFrame):
        raise ArgumentTypeError(
            f"{name} expects a FairnessRecorder or its frame(), got {type(run).__name__}."
        )
    missing = [column for column in COLUMNS if column not in frame]
    if missing:
        raise ArgumentError(
            f"{name} expects the columns of FairnessRecorder.frame(), got none of {missing}."
        )
    return frame[frame["private"].astype(bool)] if publish else frame


def _budget(
    page: Page, frame: pd.DataFrame, epsilon: float | None, delta: float | None,
    searched: TunedEpsilon | None,
) -> None:  # fmt: skip
    spent = frame["epsilon"].dropna().max() if epsilon is None else epsilon
    page.heading("Privacy cost of this page")
    at = "" if delta is None else f" at delta {delta:g}"
    known = "not recorded" if pd.isna(spent) else f"{spent:.4g}{at}"
    page.text(
        f"Epsilon spent on the training samples by this run: {known}. It covers the model, its "
        "thresholds and its noise, unless the run was chosen among others. It does not cover this page. "
        "Each part below says which data it depends on."
    )
    if searched is None:
        page.note(
            "if this run was chosen among others by figures like these, the choice is a search over raw "
            "samples, and epsilon is not that of one run. fastclip.accounting.hpo_epsilon computes the "
            "cost of a search with noisy or public scores.", "caution",
        )  # fmt: skip
    else:
        page.note(
            f"this run was chosen by a private search, so the model has epsilon "
            f"{searched.epsilon:.4g}{at} in all. One run alone has {searched.base_epsilon:.4g}.",
            "private",
        )  # fmt: skip


def _evaluations(page: Page, frame: pd.DataFrame, part: str) -> None:
    last = frame[frame["step"] == frame["step"].max()]
    page.heading("Groups at the end")
    _publishable(
        page, frame, part,
        f"these figures depend on samples of {part!r} without noise. Publishing them reveals "
        "information about each of these samples, and nothing here bounds it.",
    )  # fmt: skip
    everybody = last[(last["attribute"] == ALL) & last["measure"].isin(OVERALL)]
    page.table(everybody[["measure", "value"]], "Everybody")
    for attribute in _attributes(last):
        shown = (
            RATES[:6] if attribute == CLASS else RATES
        )  # within one class a rate repeats the accuracy
        of = last[(last["attribute"] == attribute) & last["measure"].isin(shown)]
        wide = of.pivot(index="group", columns="measure", values="value")
        wide = wide.reindex(index=list(dict.fromkeys(of["group"])), columns=_held(wide, shown))
        page.table(wide.reset_index(), f"By {attribute}")
        gaps = [
            {"measure": name, "largest difference between groups": gap(wide[name].tolist())}
            for name in wide.columns if name not in ("rows", "accuracy_low", "accuracy_high")
        ]  # fmt: skip
        page.table(pd.DataFrame(gaps), f"Differences by {attribute}")
    if frame["step"].nunique() > 1:
        page.heading("Groups over the steps")
        _publishable(page, frame, part, f"samples of {part!r} without noise, as above.")
        for attribute in _attributes(frame):
            accuracies = _over_steps(frame, attribute, "accuracy")
            if accuracies:
                page.figure(
                    lines({f"By {attribute}": accuracies}, "step", f"accuracy on {part} samples",
                          share=True),
                    f"Accuracy by {attribute}",
                    f"Lines of the accuracy of each group of {attribute} over the training steps.",
                )  # fmt: skip


def _impact(page: Page, ours: pd.DataFrame, plain: pd.DataFrame, part: str) -> None:
    page.heading("Cost of privacy by group")
    _publishable(
        page,
        plain,
        part,
        f"samples of {part!r} without noise, and the baseline is not private at all.",
    )
    both = [of[of["step"] == of["step"].max()] for of in (ours, plain)]
    for attribute in _attributes(ours):
        accuracies = []
        for of in both:
            mine = of[(of["attribute"] == attribute) & (of["measure"] == "accuracy")]
            accuracies.append(dict(zip(mine["group"], mine["value"], strict=True)))
        found = privacy_impact(*accuracies)
        rows = [
            {"group": group, "change of accuracy": value} for group, value in found.by_group.items()
        ]
        page.table(
            pd.DataFrame(rows),
            f"By {attribute}: accuracy minus that without privacy (Xu et al. 2020, Definition 6); "
            f"largest difference {found.inequality:.3g}",
        )


def _thresholds(page: Page, frame: pd.DataFrame) -> None:
    of = frame[(frame["part"] == TRAINING) & (frame["measure"] == "threshold")]
    of = of[of["attribute"] != LAYER]
    if of.empty:
        return
    page.heading("Thresholds")
    if of["private"].all():
        page.note(
            "thresholds follow from the settings and noisy counts only, once their steps are released.",
            "private",
        )
    else:
        page.note("thresholds follow from counts of training samples without noise.", "not private")
    attribute = of["attribute"].iloc[0]
    panels = {"Clipping threshold": _over_steps(of, attribute, "threshold")}
    page.figure(
        lines(panels, "step", "threshold", log=True), "Thresholds over the steps",
        "Lines of the clipping thresholds over the training steps.",
    )  # fmt: skip


def _norms(page: Page, frame: pd.DataFrame) -> None:
    of = frame[frame["part"] == TRAINING]
    attributes = _attributes(of[of["measure"] == "norm_before"])
    if not attributes:
        return
    page.heading("Gradients of each group")
    page.note(
        "norms and clipped shares are those of training samples without noise.", "not private"
    )
    for attribute in attributes:
        norms = {
            "Mean norm before clipping": _over_steps(of, attribute, "norm_before"),
            "Mean norm after clipping": _over_steps(of, attribute, "norm_after"),
        }
        page.figure(
            lines({title: line for title, line in norms.items() if line}, "step",
                  "mean norm of a sample's gradient", log=True, columns=1), f"Norms by {attribute}",
            f"Lines of mean gradient norms of each group of {attribute} over the steps.",
        )  # fmt: skip
        clipped = _over_steps(of, attribute, "clipped")
        if not clipped:  # per-layer strategies keep no norms of layers
            continue
        page.figure(
            lines({f"Samples clipped, by {attribute}": clipped}, "step", "samples above their threshold",
                  share=True),
            f"Share of samples clipped, by {attribute}",
            f"Lines of the share of each group of {attribute} that was clipped over the steps.",
        )  # fmt: skip


def _over_steps(frame: pd.DataFrame, attribute: str, measure: str) -> dict[str, Line]:
    of = frame[(frame["attribute"] == attribute) & (frame["measure"] == measure)].dropna(
        subset="value"
    )
    found = {}
    for group in dict.fromkeys(of["group"]):
        mine = of[of["group"] == group].sort_values("step")
        found[group] = Line(mine["step"].tolist(), mine["value"].tolist())
    return found


def _attributes(frame: pd.DataFrame) -> list[str]:
    """Return the user's attributes, then the classes."""
    found = [name for name in dict.fromkeys(frame["attribute"]) if name not in (ALL, CLASS, LAYER)]
    return [*found, *([CLASS] if CLASS in set(frame["attribute"]) else [])]


def _held(frame: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in frame]
