"""The page on errors has a heading for every anchor that an error may name, and no others."""

from __future__ import annotations

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
