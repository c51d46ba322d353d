"""The site is built without network, has no dead link, and fetches nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from bench.processes import ROOT

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.extras


class Links(HTMLParser):
    """Of a page: where it leads, what it fetches, and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.fetches: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.fetches.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.fetches.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """Its pages."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]  # strict: a warning is an error
    return {path: Links(path.read_text()) for path in folder.rglob("*.html")}


def test_no_link_is_dead(site: dict[Path, Links]) -> None:
    dead = []
    for page, links in site.items():
        if page.name == "404.html":
            continue  # its links start at the root of a server
        for link in links.leads + links.fetches:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = target.exists()
            if there and parts.fragment and target in site:
                there = parts.fragment in site[target].places or parts.fragment == "__skip"
            if not there:
                dead.append((page.name, link))
    assert not dead


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Links]) -> None:
    fetched = {link for links in site.values() for link in links.fetches}
    assert not {link for link in fetched if urlsplit(link).netloc}


def test_every_page_of_docs_is_in_it(site: dict[Path, Links]) -> None:
    names = {page.name for page in site}
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.with_suffix(".html").name in names
