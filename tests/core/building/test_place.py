"""Where compiled modules are kept, for whom they are, and that nobody else's are loaded."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from fastclip.core import building
from fastclip.core.building import (
    MISSING,
    Missing,
    check_own,
    find,
    load,
    make_folder,
    place_of,
    state_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="modules are built on Linux")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> building.Place:
    """The place of `_path`, at which lies what is no library."""
    monkeypatch.setenv("FASTCLIP_BUILD", "")
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "new" / "cache"))
    for known in (MISSING, building.CACHED):
        monkeypatch.setitem(known, "_path", None)  # type: ignore[attr-defined]
        monkeypatch.delitem(known, "_path")  # type: ignore[attr-defined]
    found = place_of("_path", "path")
    make_folder(found)
    found.library.touch(0o600)
    return found


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FASTCLIP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building.cache_folder() == tmp_path / "fastclip"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert building.cache_folder() == tmp_path / ".cache" / "fastclip"
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "other"))
    assert building.cache_folder() == tmp_path / "other"


def test_folders_are_the_users_alone(kept: building.Place) -> None:
    made = (kept.folder, *kept.folder.parents[:3])
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in made} == {0o700}


def test_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, another build of it, other sources, another module: another place."""
    found = {place_of("_path", "path"), place_of("_step", "step")}
    assert torch.__version__ in place_of("_path", "path").folder.name
    assert "cpython" in place_of("_path", "path").folder.name
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0+cu999")
        found.add(place_of("_path", "path"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "git_version", "another")
        found.add(place_of("_path", "path"))
    with monkeypatch.context() as patch:
        patch.setattr(building, "EXTENSION_SUFFIXES", [".cpython-399-x86_64-linux-gnu.so"])
        found.add(place_of("_path", "path"))
    with monkeypatch.context() as patch:
        patch.setattr(building, "mark_of", lambda part: "another")
        found.add(place_of("_path", "path"))
    assert len({one.library for one in found}) == 6


@pytest.mark.parametrize("what", ["library", "folder", "parent"])
@pytest.mark.parametrize("how", ["group", "others", "link", "owner"])
def test_what_others_may_have_written_is_refused(
    what: str, how: str, kept: building.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"library": kept.library, "folder": kept.folder, "parent": kept.folder.parent}
    path = paths[what]
    mode = stat.S_IMODE(path.stat().st_mode)
    if how == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "owner":
        lstat = Path.lstat
        other = os.stat_result((*lstat(path)[:4], 12345, *lstat(path)[5:]))
        monkeypatch.setattr(Path, "lstat", lambda one: other if one == path else lstat(one))
    else:
        path.chmod(mode | (stat.S_IWGRP if how == "group" else stat.S_IWOTH))
    with pytest.raises(PermissionError, match=r"another user|other users"):
        load(kept)
    with pytest.raises(ImportError, match=r"another user|other users"):
        find("_path", "path")
    assert MISSING["_path"].reason
    assert "_path" not in building.CACHED
    if what != "library":
        with pytest.raises(PermissionError):
            make_folder(kept)


def test_roots_and_ones_own_are_taken(
    kept: building.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = Path.lstat
    for owner in (0, os.getuid()):
        monkeypatch.setattr(
            Path, "lstat", lambda one, o=owner: os.stat_result((*lstat(one)[:4], o, *lstat(one)[5:]))
        )  # fmt: skip
        check_own(kept.library)


def test_what_is_no_library(kept: building.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError):
        find("_path", "path")
    kind, told = state_of("_path")
    assert kind == "refused"
    assert told.endswith(f"Delete {kept.library}.")


def test_nothing_is_there(kept: building.Place) -> None:
    kept.library.unlink()
    with pytest.raises(ImportError, match="The cache has no"):
        find("_path", "path")
    assert MISSING["_path"] == Missing("path", "")


def test_one_of_other_sources_is_refused(kept: building.Place) -> None:
    class Old:
        @staticmethod
        def versions() -> dict[str, str]:
            return {"sources": "0123456789abcdef"}

    with pytest.raises(ImportError, match="built from other sources"):
        building.check_mark(Old, kept)  # type: ignore[arg-type]


SERVED = """
import importlib, sys
import torch, fastclip
for name in ("_path", "_step"):
    if sys.argv[1] == "absent":
        sys.modules[f"fastclip.{name}"] = None
    else:
        found = importlib.import_module(f"fastclip.{name}")
        found.versions = lambda told=found.versions(): {**told, "torch": "1.13.1"}
from fastclip import doctor
from fastclip.backward import bare
from fastclip.core.building import MISSING
from fastclip.samples import runs
assert runs.FOLLOWS and not bare.WHY_NOT and not MISSING
assert bare.nodes is fastclip._step is sys.modules["fastclip._step"], bare.nodes
assert fastclip._path.__file__ == runs._path.__file__
print(bare.nodes.__file__, runs._path.__file__)
print(doctor.report(doctor.examine()))
"""


@pytest.mark.parametrize("package", ["absent", "of another torch"])
def test_the_next_process_takes_it(kept: building.Place, package: str) -> None:
    """Modules that fit lie in the cache, and in the package none."""
    wanted = []
    for name, part in (("_step", "step"), ("_path", "path")):
        pytest.importorskip(f"fastclip.{name}")
        found = place_of(name, part)
        shutil.copyfile(str(import_module(f"fastclip.{name}").__file__), found.library)
        found.library.chmod(0o600)
        wanted.append(str(found.library))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SERVED, package], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, *told = done.stdout.splitlines()
    assert first.split() == wanted
    for path in wanted:
        assert any(
            f"(compiled here for torch {torch.__version__}: {path})" in line for line in told
        )
