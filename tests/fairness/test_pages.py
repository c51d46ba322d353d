"""Pages are self-contained, legible on a telephone, and take every name as text."""

from __future__ import annotations

import math
import re
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from matplotlib.figure import Figure

from fastclip.errors import ArgumentError
from fastclip.fairness import Page
from fastclip.fairness.report import NOTES, Line, dots, lines
from tests.fairness.reading import CHROMIUM, Reader, check_page, widths

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a' onmouseover='alert(1)",
    "one | two",
    "first\nsecond\r\n\r\n# third",
    "[x](http://y)",
    "![x](http://y)",
    "`a` *b* _c_ ~~d~~ \\",
    "&lt;b&gt;",
    "{picture} {0} %s",
    "$x^2$ $",
    "_hidden",
    "</style></title><h1>",
]


def picture(name: str = "a") -> Figure:
    return lines({name: {name: Line([1, 2], [0.5, 1.0])}}, name, name)


def write(page: Page, folder: Path, name: str = "page.html") -> tuple[Reader, str, list[Path]]:
    """The HTML as it is read, the Markdown, and the files."""
    files = page.write(folder / name)
    assert all(file.stat().st_size for file in files)
    path, *_, twin = files
    assert path == folder / name
    assert twin == path.with_suffix(".md")
    return check_page(path.read_text(encoding="utf-8")), twin.read_text(encoding="utf-8"), files


def full(name: str) -> Page:
    """Everything that a page may hold, of one name."""
    page = Page(name)
    page.heading(name)
    page.text(name)
    page.items([name, name])
    page.note(name, "caution")
    page.table(pd.DataFrame({name: [name, "b"], "value": [1.0, math.nan]}), name)
    page.figure(picture(name), name, name)
    return page


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(name: str, tmp_path: Path) -> None:
    found, markdown, _ = write(full(name), tmp_path)
    harmless, *_ = write(full("harmless"), tmp_path, "other.html")
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in harmless.elements]
    said = name[:1].upper() + name[1:]  # a note is a sentence
    expected = harmless.text.replace("harmless", name).replace("Harmless", said)
    assert found.text.split() == expected.split()
    assert [image["alt"].split() for image in found.of("img")] == [name.split()]
    # Markdown, without what is escaped: no HTML, one target, and what lines begin with
    bare = re.sub(r"\\.", "", markdown)
    assert not re.search(r"<\w", bare)
    assert re.findall(r"\]\(([^)]*)\)", bare) == ["page-pictures/5.png"]
    twin = (tmp_path / "other.md").read_text()
    begins = re.compile(r"#+ |> |- |\| |\d+[.)] |!\[|[-=]{3}|")
    for ours, theirs in zip(bare.splitlines(), twin.splitlines(), strict=True):
        assert begins.match(ours)[0] == begins.match(theirs)[0], ours
        assert ours.count("|") == theirs.count("|") or not theirs.startswith("|"), ours


@pytest.mark.parametrize("text", ["# a", "- a", "+ a", "1. a", "23) a", "--- a", "=== a"])
def test_a_paragraph_is_no_list_and_no_heading(text: str, tmp_path: Path) -> None:
    page = Page("t")
    page.text(text)
    _, markdown, _ = write(page, tmp_path)
    paragraph = markdown.split("\n\n")[1].strip()
    assert re.match(r"\\|\d+\\", paragraph)
    assert paragraph.replace("\\", "") == text


@pytest.mark.parametrize("text", ["1.5 of them", "a - b", "2020 was"])
def test_other_paragraphs_stay(text: str, tmp_path: Path) -> None:
    page = Page("t")
    page.text(text)
    assert write(page, tmp_path)[1] == f"# t\n\n{text}\n"


@pytest.mark.parametrize("name", ["page.html", "two words (1).htm", "é#%.html"])
def test_markdown_pictures_are_files(name: str, tmp_path: Path) -> None:
    page = full("a")
    page.figure(picture(), "b", "of {picture} and [brackets]")
    _, markdown, files = write(page, tmp_path / "new" / "folder", name)
    targets = re.findall(r"\]\(([^)\s]*)\)", re.sub(r"\\.", "", markdown))
    assert len(targets) == 2
    named = [tmp_path / "new" / "folder" / unquote(target) for target in targets]
    assert named == files[1:-1]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in named)


def test_pages_that_are_refused(tmp_path: Path) -> None:
    page = Page("t")
    for alt in ("", " \n"):
        with pytest.raises(ArgumentError, match="alt expects a description"):
            page.figure(picture(), "caption", alt)
    with pytest.raises(ArgumentError, match=r"kind expects one of .*got 'public'"):
        page.note("a", "public")
    for name in ("page.md", "page", "page.txt"):  # the twin would take the page's place
        with pytest.raises(
            ArgumentError, match=r"path expects the name of an HTML file, NAME\.html"
        ):
            page.write(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_headings_are_listed(tmp_path: Path) -> None:
    page = Page("t")
    for text in ("one", "two", "one"):
        page.heading(text)
    found, _, _ = write(page, tmp_path)
    assert [link["href"] for link in found.of("a")] == ["#part1", "#part2", "#part3"]


@pytest.mark.parametrize("kind", NOTES)
def test_notes_say_what_may_be_published(kind: str, tmp_path: Path) -> None:
    page = Page("t")
    page.note("some words.", kind)
    found, markdown, _ = write(page, tmp_path)
    assert f"{NOTES[kind]}. Some words." in found.text
    assert markdown.endswith(f"> **{NOTES[kind]}.** Some words.\n")
    (note,) = [p for p in found.of("p") if "note" in p["class"].split()]
    assert kind.replace(" ", "-") in note["class"].split()


def test_cells(tmp_path: Path) -> None:
    page = Page("t")
    page.table(
        pd.DataFrame({"n": ["a" * 30, "b"], "x": [0.123456, math.nan], "k": [7, 80000]}), "c"
    )
    found, markdown, _ = write(page, tmp_path)
    assert markdown.splitlines()[-3:] == [
        "| --- | ---: | ---: |", f"| {'a' * 30} | 0.1235 | 7 |", "| b | - | 80000 |",
    ]  # fmt: skip
    assert [cell.get("class") for cell in found.of("td")] == ["text", None, None] * 2
    assert [cell.get("class") for cell in found.of("th")] == ["text", None, None]


def test_numbers_written_as_text_stay_on_the_right(tmp_path: Path) -> None:
    page = Page("t")
    page.table(pd.DataFrame({"a": ["0.1 [0, 1e-07]", "-"], "b": ["0.2", "no rows"]}), "c")
    found, _, _ = write(page, tmp_path)
    assert [cell.get("class") for cell in found.of("td")] == [None, "text"] * 2


# Pictures


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_pictures(name: str) -> None:
    """None is read as a formula, none is left out of the legend."""
    for figure in (
        lines({name: {name: Line([1, 2], [1.0, 2.0]), "other": Line([1], [1.0])}}, name, name),
        dots({name: {name: {name: (0.5, 0.4, 0.6), "other": (0.1, math.nan, math.nan)}}}, name),
    ):
        figure.canvas.draw()
        (legend,) = figure.legends
        first, second = (text.get_text() for text in legend.get_texts())
        assert first.strip().replace("\\$", "$") == " ".join(name.split())
        assert second == "other"


@pytest.mark.parametrize("values", [[0.9, 1.8], [1e-4, 1e3], [0.0, 1.0], [0.0, 0.0], [1.0]])
def test_logarithmic_axes_have_some_ticks(values: list[float]) -> None:
    figure = lines({"a": {"b": Line(range(len(values)), values)}}, "x", "y", log=True)
    figure.canvas.draw()
    (axis,) = figure.axes
    low, high = axis.get_ylim()
    shown = [tick for tick in axis.get_yticks() if low <= tick <= high]
    assert 2 <= len(shown) <= 9


@pytest.mark.parametrize("columns", [1, 2])
def test_panels(columns: int) -> None:
    figure = lines(
        {name: {"a": Line([1], [1.0])} for name in "pqr"}, "x", "y", columns=columns, share=True
    )
    figure.canvas.draw()
    lefts = {round(axis.get_position().x0, 2) for axis in figure.axes if axis.get_visible()}
    assert len(lefts) == columns
    assert sum(axis.get_visible() for axis in figure.axes) == 3


# On a screen


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium to lay out the page")
def test_a_telephone_shows_the_page(tmp_path: Path) -> None:
    """Nothing is wider than the window: what is wide scrolls in its box."""
    page = full("a" * 80)
    page.table(pd.DataFrame({f"column {i}": [i] for i in range(30)}), "wide")
    page.figure(lines({n: {"a": Line([1], [1.0])} for n in "pq"}, "x", "y"), "c", "two panels")
    path, *_ = page.write(tmp_path / "page.html")
    whole, window, box = widths(path, 390)
    assert window == 390
    assert whole <= window < box
