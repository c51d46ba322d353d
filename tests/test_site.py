"""The site is built without network, has no dead link, and fetches nothing of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from bench.processes import ROOT

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.extras

PUBLIC = (
    "fastclip", "fastclip.accounting", "fastclip.audit", "fastclip.clipping", "fastclip.counts",
    "fastclip.data", "fastclip.engine", "fastclip.errors", "fastclip.fairness", "fastclip.integrations",
    "fastclip.integrations.huggingface", "fastclip.integrations.lightning", "fastclip.integrations.trl",
    "fastclip.losses", "fastclip.monitor", "fastclip.opacus", "fastclip.plan", "fastclip.rules",
    "fastclip.testing",
)  # fmt: skip
"""Packages and modules whose public names users import."""
NOT_IN_ITSELF = {
    "fastclip.clipping": "a package: its names have a page",
    "fastclip.counts.TRAINING_SET": "a name of a data set, which the texts of counts explain",
    "fastclip.integrations.huggingface.ACCOUNTANT_NAME": "the name of a file of a checkpoint",
    **{
        f"fastclip.opacus.{name}": "Opacus' own name, which Opacus documents"
        for name in (
            "GradSampleHooks", "GradSampleModule", "PrivacyEngine", "accountants", "data_loader",
            "distributed", "grad_sample", "layers", "optimizers", "privacy_engine",
            "register_grad_sampler", "schedulers", "utils", "validators",
        )
    },
}  # fmt: skip
"""Public names that are not in the reference, and why not."""
ALSO_PUBLIC = (
    "fastclip.rules.use.register_use",
    "fastclip.rules.use.UseRule",
    "fastclip.engine.optimizer._Shared.attach_step_hook",  # of every private optimizer
)
"""Names that pages tell users to import or to call, and that no `__all__` has."""
HELPERS = {
    "fastclip.integrations.lightning": {"DPLightningDataModule", "PrivacyCallback", "make_private"},
}
"""Of a module without `__all__` that has helpers, too: what users call."""
SOUGHT = {
    "user-level": ("faq", "glossary"),
    "gradient accumulation": ("faq", "glossary"),
    "membership inference": ("threat_model", "glossary"),
    "privacy budget": ("quickstart", "glossary"),
    "Rényi": ("glossary",),
    "Renyi": ("glossary",),
    "add/remove": ("threat_model", "glossary"),
    "quickstart": ("quickstart",),
}
"""What people search for, and the pages of which at least one must treat it."""


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


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("UnsupportedLayerError", "Unsupported<wbr>Layer<wbr>Error"),
        ("poisson_sampling=False", "poisson_<wbr>sampling=<wbr>False"),
        ("python -m fastclip.accounting", "python -m fastclip.<wbr>accounting"),
        ("sample_rate=0.01, n", "sample_<wbr>rate=<wbr>0.01, n"),
        ("tests/test_units.py", "tests/<wbr>test_<wbr>units.py"),
    ],
)
def test_long_names_in_tables_break_between_words(code: str, shown: str) -> None:
    breaks = breaks_of_code()
    table = "<table><tr><td><code>{}</code></td></tr></table>"
    page = f"<code>{code}</code>{table}"
    assert breaks(page.format(code)) == f"<code>{code}</code>{table.format(shown)}"


def test_options_in_tables_keep_their_hyphens() -> None:
    table = "<table><code>--noise-multiplier</code> <code>--json</code></table>"
    assert breaks_of_code()(table) == (
        '<table><code><span class="short">--noise</span>-multiplier</code> '
        '<code class="short">--json</code></table>'
    )


def breaks_of_code() -> Callable[[str], str]:
    """The hook of mkdocs, which is no module of a package."""
    spec = spec_from_file_location("code_breaks", ROOT / "docs" / "site" / "code_breaks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.on_post_page


def test_every_page_of_docs_is_in_it(site: dict[Path, Links]) -> None:
    names = {page.name for page in site}
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.with_suffix(".html").name in names


def public_names(module: ModuleType) -> list[str]:
    """What `from MODULE import *` gives, or what it defines and does not hide."""
    if module.__name__ in HELPERS:
        return sorted(HELPERS[module.__name__])
    named = getattr(module, "__all__", None)
    if named is not None:
        return list(named)
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
    ]


def paths(module: str, name: str, value: Any) -> set[str]:
    """All the ways to say where this is."""
    home, inside = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return {f"{module}.{name}", f"{home}.{inside}"}


@pytest.fixture(scope="module")
def reference(site: dict[Path, Links]) -> set[str]:
    """Everything that the pages of the reference document, by its path."""
    _, _, _, _, packed = (folder_of(site) / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


def folder_of(site: dict[Path, Links]) -> Path:
    """Where the site lies."""
    return min(site, key=lambda page: len(page.parts)).parent


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_reference(name: str, reference: set[str]) -> None:
    if name == "fastclip.integrations.trl":
        pytest.importorskip("trl")
    module = import_module(name)
    missing = {
        f"{name}.{public}"
        for public in public_names(module)
        if not paths(name, public, getattr(module, public)) & reference
    }
    assert missing == {listed for listed in NOT_IN_ITSELF if listed.rpartition(".")[0] == name}


def test_names_that_pages_recommend_are_in_the_reference(reference: set[str]) -> None:
    assert set(ALSO_PUBLIC) <= reference


def test_its_search_finds_what_people_look_for(site: dict[Path, Links]) -> None:
    """In a page that treats it; the changelog mentions everything."""
    index = json.loads((folder_of(site) / "search" / "search_index.json").read_text())
    for sought, pages in SOUGHT.items():
        found = {
            Path(entry["location"].partition("#")[0]).stem
            for entry in index["docs"]
            if sought.lower() in f"{entry['title']} {entry['text']}".lower()
        }
        assert found & set(pages), f"{sought!r} is only in {sorted(found)}"
