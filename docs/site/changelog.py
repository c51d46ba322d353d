"""A hook of the site: its page "Changelog" is the CHANGELOG.md of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)(?:#[^)]*)?\)")


def on_page_read_source(page: Any, config: Any) -> str | None:
    """The source of changelog.md; None leaves other pages unchanged."""
    if page.file.src_uri != "changelog.md":
        return None
    return LINK.sub(_from_docs, (ROOT / "CHANGELOG.md").read_text())


def _from_docs(found: re.Match[str]) -> str:
    """A link from the root of the repository, written as from docs/.

    An old entry may name a page or a heading that no longer exists: headings are left out, and a
    page that is not there is its text.
    """
    text, path = found[1], found[2]
    if not (ROOT / path).is_file():
        return text
    inside = path.removeprefix("docs/")
    return f"[{text}]({inside})" if path.startswith("docs/") else f"[{text}](../{path})"
