"""Compiles what is missing while Python serves in its place: one process does it for all."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fastclip.building import recipe, worker
from fastclip.building.missing import MISSING, is_off
from fastclip.building.place import Place, make_folder, place_of
from fastclip.errors import say
from fastclip.sources import CSRC

_TRIAL = """
import importlib.util, json, sys
name, library, path = sys.argv[1:]
sys.path[:] = json.loads(path)
import torch
spec = importlib.util.spec_from_file_location(name, library)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""What a library must stand in a process of its own before it gets its name."""
_begun = False


def compile_missing() -> None:
    """Start compiling, once a process, unless another one does; say so. It waits for nothing.

    Nothing is raised where it cannot be done: `python -m fastclip.doctor` says why.
    """
    global _begun
    if _begun or not MISSING or is_off():
        return
    _begun = True
    try:
        begun = _begin([place_of(name, missing.part) for name, missing in MISSING.items()])
    except (recipe.NotBuilt, OSError, subprocess.SubprocessError):
        return
    if begun:
        say(
            f"fastclip compiles its C++ parts for torch {torch.__version__} in the background, which "
            "takes a few minutes. They serve from the next start on, and Python until then; "
            "FASTCLIP_BUILD=0 turns this off"
        )


def _begin(places: list[Place]) -> bool:
    """Whether a build was started now."""
    import fcntl  # of systems on which anything is compiled

    plans = [plan_of(place) for place in places]
    make_folder(places[0])
    with open(os.open(places[0].lock, os.O_CREAT | os.O_WRONLY, 0o600), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        due = [plan for plan in plans if not os.path.lexists(plan["library"])]
        due = [plan for plan in due if not was_tried(plan)]
        if not due:
            return False
        for left in places[0].folder.glob("build-*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=places[0].folder))
        (folder / "plan.json").write_text(json.dumps({"modules": due, "jobs": _jobs()}))
        os.utime(lock.fileno())  # when it began
        # The lock is held as long as anyone writes there: by the worker and by its compilers.
        subprocess.run(
            [sys.executable, "-I", "-S", worker.__file__, str(folder / "plan.json"), str(lock.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[lock.fileno()], start_new_session=True, check=True,
        )  # fmt: skip
    return True


def _jobs() -> int:
    """Compilers at once: each wants a gigabyte."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def plan_of(place: Place) -> dict[str, Any]:
    """What the worker is to do for one module.

    Raises:
        NotBuilt: there is nothing to compile it with.
    """
    recipe.check_system()
    compiler = shlex.split(recipe.find_cxx())
    flags = [*recipe.plain_flags(CSRC, recipe.torch_headers()[0]), *recipe.torch_flags()]
    units, objects = [], []
    for unit in recipe.units_of(CSRC / place.part):
        objects.append(f"{place.name}-{unit.name}.o")
        own = [*flags, *recipe.mark_flag(unit, place.mark)]
        units.append(recipe.compiling(compiler, own, str(unit), objects[-1]))
    made = f"{place.name}.so"
    link = recipe.linking(compiler, objects, recipe.torch_libraries(), made)
    trial = [sys.executable, "-I", "-c", _TRIAL, place.name, made, json.dumps(sys.path)]
    return {
        "units": units, "whole": [link, trial], "made": made, "library": str(place.library),
        "log": str(place.log), "tried": _mark_of([*units, link], compiler[0]),
    }  # fmt: skip


def _mark_of(commands: list[list[str]], compiler: str) -> str:
    """What changes with the commands, and with the compiler that runs them."""
    program = os.stat(compiler)
    known = commands, os.path.realpath(compiler), program.st_size, program.st_mtime_ns
    return f"tried {hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]} with {compiler}"


def was_tried(plan: dict[str, Any]) -> bool:
    """Whether exactly this has failed before."""
    try:
        with open(plan["log"], errors="replace") as log:
            return log.readline().rstrip("\n") == plan["tried"]
    except OSError:
        return False
