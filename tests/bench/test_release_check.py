"""The release check: what it reads of the files, and what it finds wrong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bench.processes import ROOT
from bench.release_check import NotReady, check_files, programs, section, version

FILES = ("fastclip/__init__.py", "pyproject.toml", "CITATION.cff", "CHANGELOG.md")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the files that it reads."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_files_agree(root: Path) -> None:
    """While a version is made, its entries stand under Unreleased, and nothing is dated."""
    text = (ROOT / "CHANGELOG.md").read_text()
    if f"## [{version()}] - " in text and "## [Unreleased]\n" not in text:
        assert check_files(root).startswith(f"version {version()} of ")


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("fastclip/__init__.py", '__version__ = "', '__version__ = "9', "does not say version"),
        ("fastclip/__init__.py", '__version__ = "', '__version__ = "v', "no __version__ of the form"),
        ("CITATION.cff", "date-released: 2", "date-released: 1", "does not say date-released"),
        ("CHANGELOG.md", "\n## [", "\n## [Unreleased]\n- A change.\n\n## [", "unreleased entries"),
        ("CHANGELOG.md", "\n### Added\n", "\n### Added\n" + "word " * 1500, "words of 1500"),
        ("CHANGELOG.md", "] - 2026", "] - soon 2026", "no heading"),
        ("pyproject.toml", "attr = ", "other = ", "its own version"),
    ],
)  # fmt: skip
def test_what_does_not_agree(root: Path, name: str, old: str, new: str, sentence: str) -> None:
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new, 1))
    with pytest.raises(NotReady, match=sentence):
        check_files(root)


def test_a_section_ends_where_the_next_begins() -> None:
    text = "# Log\n\n## [0.2.0] - 2027-01-02\n- b\n\n## [0.1.0] - 2026-12-01\n- a\n"
    assert section(text, "0.2.0")[1] == "- b\n\n"
    assert section(text, "0.1.0")[1] == "- a\n"


def test_compilers_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("g++", "nvcc", "make"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for compiler, seen in ((True, ["g++", "make", "nvcc"]), (False, ["make", "nvcc"])):
        folder = programs(tmp_path / str(compiler), compiler)
        assert sorted(os.listdir(folder)) == seen
        assert "exit 1" in (Path(folder) / "nvcc").read_text()
