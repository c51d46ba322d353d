"""Modules that fit one torch alone are compiled in the background: once, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest

import fastclip
from fastclip.core import building
from fastclip.core.build_recipe import CSRC
from fastclip.core.building import MISSING, Missing, Place, is_off, load, place_of, state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="modules are built on Linux")

COMPILER = """#!/bin/sh
echo $PPID $$ "$@" >> '{calls}'
{does}
while [ $# -gt 0 ]; do [ "$1" = -o ] && made=$2; shift; done
echo made > $made
"""
TRIAL = building._TRIAL
UNITS = len(list((CSRC / "path").glob("*.cpp")))


class Compiler:
    """A script in a compiler's place, and the calls of it."""

    def __init__(self, folder: Path) -> None:
        self.path, self._calls = folder / "cxx", folder / "calls"
        os.mkfifo(folder / "gate")
        self._gate = folder / "gate"
        self._calls.touch()
        self.does(":")

    def does(self, first: str) -> None:
        """From now on it does this first."""
        fresh = self.path.with_suffix(".new")  # one that runs is read as it goes
        fresh.write_text(COMPILER.format(calls=self._calls, does=first))
        fresh.chmod(0o755)
        fresh.replace(self.path)

    def waits(self) -> None:
        """From now on it waits to be let go."""
        self.does(f"cat '{self._gate}'")

    def let_go(self) -> None:
        """The one that waits; none that comes later waits."""
        self.does(":")
        self._gate.write_text("go\n")

    def calls(self) -> list[list[str]]:
        """Each begins with its worker's number and its own."""
        return [line.split() for line in self._calls.read_text().splitlines()]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """It compiles `_path`, which is nowhere yet. What it makes need not be a library."""
    made = Compiler(tmp_path)
    monkeypatch.setenv("FASTCLIP_BUILD", "")
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(made.path))
    for name in list(MISSING):
        monkeypatch.delitem(MISSING, name)
    monkeypatch.setitem(MISSING, "_path", Missing("path", ""))
    monkeypatch.setattr(building, "_TRIAL", "")
    monkeypatch.setattr(building, "_jobs", lambda: 1)
    monkeypatch.setattr(building, "_begun", False)
    return made


def start() -> bool:
    """What the first make_private of a process does; whether it says that it compiles."""
    building._begun = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        building.compile_missing()
        building.compile_missing()  # the second one of this process
    assert len(said) <= 1
    return any("uses them from the next start on" in str(one.message) for one in said)


def place() -> Place:
    return place_of("_path", "path")


def wait() -> None:
    """Until nobody compiles."""
    with open(place().lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def kept() -> set[str]:
    """What is there but the lock."""
    return {path.name for path in place().folder.iterdir()} - {"lock"}


def test_no_test_compiles_by_accident() -> None:
    assert is_off()


def test_it_is_compiled_once_and_said_once(compiler: Compiler) -> None:
    assert state_of("_path").kind == "due"
    assert start()
    wait()
    assert kept() == {place().library.name}
    assert place().library.read_text() == "made\n"
    assert len(compiler.calls()) == UNITS + 1
    assert state_of("_path").kind == "compiled"
    assert not start()
    assert len(compiler.calls()) == UNITS + 1


def test_it_is_told_what_setup_py_tells(compiler: Compiler) -> None:
    """Headers of torch, which has pybind11's; the mark; torch's libraries."""
    assert start()
    wait()
    *units, link = (" ".join(call) for call in compiler.calls())
    assert all("torch/include" in unit and "-fvisibility=hidden" in unit for unit in units)
    assert sum(f'-DFASTCLIP_SOURCES="{place().mark}"' in unit for unit in units) == 1
    assert "-ltorch_cpu" in link


def test_one_of_many_compiles(compiler: Compiler) -> None:
    compiler.waits()
    assert start()
    assert not start()
    assert not start()
    assert state_of("_path").kind == "compiling"
    assert not place().library.exists()
    while not compiler.calls():  # it has come to the gate, or will
        os.sched_yield()
    compiler.let_go()
    wait()
    assert len(compiler.calls()) == UNITS + 1
    assert state_of("_path").kind == "compiled"


def test_a_killed_build_leaves_nothing_that_would_be_loaded(compiler: Compiler) -> None:
    """Its compiler goes on, and holds the lock."""
    compiler.waits()
    assert start()
    while not compiler.calls():
        os.sched_yield()
    worker = int(compiler.calls()[0][0])
    os.kill(worker, signal.SIGKILL)
    assert not start()
    compiler.let_go()
    wait()
    (left,) = kept()
    assert left.startswith("build-")
    assert state_of("_path").kind == "due"
    assert start()
    wait()
    assert kept() == {place().library.name}


def test_a_failure_is_remembered(compiler: Compiler) -> None:
    compiler.does("echo too old for this; exit 1")
    assert start()
    wait()
    assert kept() == {place().log.name}
    tried, *_, said, status = place().log.read_text().splitlines()
    assert tried.endswith(f"with {compiler.path}")
    assert (said, status) == ("too old for this", "exit status 1")
    kind, told = state_of("_path")
    assert kind == "failed"
    assert str(place().log) in told
    before = len(compiler.calls())
    assert not start()
    assert len(compiler.calls()) == before


@pytest.mark.parametrize("change", ["compiler", "flags", "log"])
def test_a_failure_is_forgotten_with_what_has_failed(
    compiler: Compiler, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.does("exit 1")
    assert start()
    wait()
    assert not start()
    if change == "compiler":
        compiler.does("echo another")
    elif change == "flags":
        monkeypatch.setenv("CXX", f"{compiler.path} -O1")
    else:
        place().log.unlink()
    assert start()
    wait()
    assert kept() == {(place().log if change != "compiler" else place().library).name}


def test_what_is_left_of_the_log(compiler: Compiler) -> None:
    """The last lines, however many a compiler says."""
    compiler.does("seq 100000; exit 1")
    assert start()
    wait()
    lines = place().log.read_text().splitlines()
    assert lines[-2] == "100000"
    assert len(lines) < 110


def test_it_may_be_turned_off(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCLIP_BUILD", "0")
    assert not start()
    assert not place().folder.exists()
    kind, told = state_of("_path")
    assert kind == "off"
    assert "Unset it" in told


def test_nothing_is_missing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MISSING, "_path")
    assert not start()
    assert not place().folder.exists()
    assert state_of("_path").kind == "package"


def test_without_a_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    assert not start()
    kind, told = state_of("_path")
    assert kind == "impossible"
    assert told.endswith("No C++ compiler is installed. Install g++, or set CXX to a compiler.")


@pytest.mark.parametrize("what", ["Python.h", "pybind11.h"])
def test_without_headers(compiler: Compiler, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != what and is_file(path))
    assert not start()
    kind, told = state_of("_path")
    assert kind == "impossible"
    assert what in told
    assert ". Install " in told


def test_a_folder_that_cannot_be_made(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTCLIP_CACHE", str(tmp_path / "file"))
    assert not start()
    kind, told = state_of("_path")
    assert kind == "impossible"
    assert told.endswith("Set FASTCLIP_CACHE to a folder of your own.")
    assert not compiler.calls()


@pytest.mark.slow
def test_what_cannot_be_imported_gets_no_name(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_TRIAL", TRIAL)
    assert start()
    wait()
    assert kept() == {place().log.name}
    assert "ImportError" in place().log.read_text()


@pytest.mark.slow
def test_a_real_one(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's compiler makes of it can be imported, and fits."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    monkeypatch.setattr(building, "_TRIAL", TRIAL)
    monkeypatch.delenv("CXX")
    assert start()
    wait()
    assert kept() == {place().library.name}
    monkeypatch.setitem(
        sys.modules, "fastclip._path", None
    )  # what is loaded stays in no other test
    monkeypatch.setattr(fastclip, "_path", None, raising=False)
    module = load(place())
    assert module.versions()["sources"] == place().mark
    module.Recording().start([])
