"""Documents name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/**/*.md")])
PAGES.remove(ROOT / "CHANGELOG.md")  # which tells of the past, too


def named(text: str) -> set[str]:
    """Paths in backticks or as the targets of links, and what is left of `python -m MODULE`."""
    paths = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|md|cuh?|cpp|hpp|toml))`", text))
    paths |= {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    modules = re.findall(r"python -m ((?:fastclip|bench|tests|examples)[\w.]*\w)", text)
    return paths | {module.replace(".", "/") for module in modules}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_are_there(page: Path) -> None:
    places = (page.parent, ROOT, ROOT / "fastclip")
    missing = {
        path
        for path in named(page.read_text()) - {"examples/NAME"}
        if not any((place / f"{path}{end}").exists() for place in places for end in ("", ".py"))
    }
    assert not missing


def test_names_are_found() -> None:
    text = (
        "`a/b.py` `x.y` [z](../docs/c.md#d) [web](https://a.b/c.md) `python -m bench.gpu --only x`"
    )
    assert named(text) == {"a/b.py", "../docs/c.md", "bench/gpu"}
