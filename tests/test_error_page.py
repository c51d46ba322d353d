"""The page on errors has a heading for every anchor that an error may name, and no others."""

from __future__ import annotations

import ast
import re

import pytest

from fastclip.errors import ANCHORS
from tests.page_blocks import ROOT

TEXT = re.sub(r"```.*?```", "", (ROOT / "docs" / "errors.md").read_text(), flags=re.S)


def anchor_of(heading: str) -> str:
    """As mkdocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def headings(level: int) -> list[str]:
    """Anchors of the page's headings of a level."""
    return [anchor_of(x) for x in re.findall(rf"^{'#' * level} (.+)$", TEXT, re.M)]


def parts() -> dict[str, str]:
    """What is under each heading of an error, by its anchor."""
    found = re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S)
    return {anchor_of(heading): part for heading, part in found}


def test_headings_are_the_anchors() -> None:
    found = headings(3)
    assert len(found) == len(set(found))
    assert set(found) == ANCHORS


def test_no_other_heading_takes_an_anchor() -> None:
    """Of two headings with one anchor mkdocs numbers the second, and links lead to the first."""
    assert not ANCHORS & {*headings(1), *headings(2)}
    assert not headings(4)


@pytest.mark.parametrize("anchor", sorted(ANCHORS))
def test_an_error_is_explained_before_its_fixes(anchor: str) -> None:
    text, _, fixes = parts()[anchor].partition("\n\n- ")
    if not fixes:
        text, _, fixes = parts()[anchor].partition("\n\n| ")
    assert len(text.split()) >= 15
    assert len(re.findall(r"^(?:- |\| )", fixes, re.M)) >= 1  # after the first


def test_troubleshooting_leads_to_every_kind() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert set(re.findall(r"errors\.md#([\w-]+)", page)) == ANCHORS


def texts() -> list[str]:
    """Every text of the package except docstrings; values in f-strings are gaps."""
    found = []
    for path in (ROOT / "fastclip").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in documentation:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else " ... " for v in node.values]
                found.append("".join(map(str, parts)).lower())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.lower())
    return found


def test_troubleshooting_quotes_messages() -> None:
    """Words that the tables quote are in a message; "..." stands for anything between them."""
    page, known = (ROOT / "docs" / "troubleshooting.md").read_text(), texts()
    tables = page.partition("## Symptoms")[0]
    quoted = [
        q
        for line in re.findall(r"^\| (.+?) \|", tables, re.M)
        for q in re.findall(r'"(.+?)"', line)
    ]
    assert len(quoted) > 50
    missing = []
    for phrase in quoted:
        pattern = re.compile(
            ".*?".join(re.escape(x.strip()) for x in phrase.lower().split("...")), re.S
        )
        if not any(pattern.search(text) for text in known):
            missing.append(phrase)
    assert not missing
