"""Compiled modules of csrc/: their cache, whether they fit, and compiling in the background."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fastclip.core import build_recipe, build_worker
from fastclip.core.build_recipe import CSRC, NotBuilt, is_current, mark_of
from fastclip.errors import say

# -------------------------------------------------------------------------------------------------
# The folder for measurements and compiled modules of this machine.


def cache_folder() -> Path:
    """Returns $FASTCLIP_CACHE, else `fastclip` below $XDG_CACHE_HOME or ~/.cache. It may not exist.

    Raises:
        OSError: the user's home folder is unknown.
    """
    named = os.environ.get("FASTCLIP_CACHE")
    if named:
        return Path(named).absolute()
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise OSError(f"{error}. Set FASTCLIP_CACHE to a folder.") from error
    return root.absolute() / "fastclip"


# -------------------------------------------------------------------------------------------------
# The place of a module compiled for this torch, which nobody else may write to.
#
# A loaded library runs as the user. It is loaded only if its folder and file belong to the user or
# root, and nobody else may write to them.


class Place(NamedTuple):
    """The place of one module, for these sources, this torch and this Python."""

    name: str
    """fastclip.`name`."""
    part: str
    """The folder of csrc/ that becomes it."""
    mark: str
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / f"{self.name}-{self.mark}.so"

    @property
    def log(self) -> Path:
        """The log of a failed build. Its first line says what was tried."""
        return self.folder / f"{self.name}-{self.mark}.log"

    @property
    def lock(self) -> Path:
        """The lock, held while anything is compiled for this torch."""
        return self.folder / "lock"


def place_of(name: str, part: str) -> Place:
    """Returns the place of a module, which may not exist yet.

    Raises:
        OSError: its sources are missing, or the user has no cache.
    """
    return Place(name, part, mark_of(part), cache_folder() / "compiled" / _fits())


def _fits() -> str:
    """Returns the environment that a library is compiled for."""
    python = EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "libc").replace(" ", "-")
    git = hashlib.sha256(str(torch.version.git_version).encode()).hexdigest()[:8]
    return f"{python}-{libc}-torch-{torch.__version__}-{git}".replace(os.sep, "-")


def make_folder(place: Place) -> None:
    """Makes the folder, for the user alone.

    Raises:
        OSError: it cannot be made or written to, or others can write to it.
    """
    for folder in (*reversed(place.folder.parents), place.folder):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster
    check_folder(place)


def check_folder(place: Place) -> None:
    """Checks that this user can write to the folder and others cannot. It may not exist yet.

    Raises:
        OSError: with the reason.
    """
    for folder in (place.folder.parent, place.folder):
        if os.path.lexists(folder):
            check_own(folder)
    there = next(path for path in (place.folder, *place.folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} is not writable")


def check_own(path: Path) -> None:
    """Checks that nobody else can have written a file or folder.

    Raises:
        PermissionError: it is a link, another user's, or others may write to it.
        OSError: it does not exist.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} is a link or belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {path}")


def load(place: Place) -> ModuleType:
    """Imports the library as fastclip.`name`.

    Raises:
        FileNotFoundError: it does not exist.
        PermissionError: somebody else may have written it.
        ImportError: it does not fit.
    """
    for path in (place.folder.parent, place.folder, place.library):
        check_own(path)
    # pybind11 keeps modules by their names, and the package's may be another torch's.
    spec = importlib.util.spec_from_file_location(f"{__package__}.{place.name}", place.library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place.library} is not a module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[f"fastclip.{place.name}"] = module
    setattr(sys.modules["fastclip"], place.name, module)
    return module


def is_locked(place: Place) -> bool:
    """Whether a process compiles for this torch now."""
    import fcntl  # of systems on which anything is compiled

    try:
        with open(place.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


# -------------------------------------------------------------------------------------------------
# Modules that fit only one torch: from the user's cache if the package has none, or noted as missing.
#
# The first import decides which one is used, for the whole process.


class Missing(NamedTuple):
    """A module that neither the package nor the cache had."""

    part: str
    """The folder of csrc/ that becomes it."""
    reason: str
    """Why the one in the cache is not used, if there is one."""


MISSING: dict[str, Missing] = {}
"""The modules that `compile_missing` compiles, by name."""
CACHED: dict[str, Place] = {}
"""The modules loaded from the cache, by name."""


def is_off() -> bool:
    """Whether compiling is turned off by the user or unsupported by the system."""
    return os.environ.get("FASTCLIP_BUILD") == "0" or sys.platform != "linux"


def find(name: str, part: str) -> ModuleType:
    """Loads a module from the cache.

    Args:
        name: in fastclip. part: the folder of csrc/ that becomes it.

    Raises:
        ImportError: none can be loaded.
    """
    MISSING[name] = Missing(part, "")
    if is_off():
        raise ImportError("fastclip compiles nothing at run time here")
    try:
        place = place_of(name, part)
        module = load(place)
        check_mark(module, place)
    except FileNotFoundError as error:
        raise ImportError(f"The cache has no fastclip.{name} yet") from error
    except (OSError, ImportError) as error:
        MISSING[name] = Missing(part, str(error))
        raise ImportError(str(error)) from error
    del MISSING[name]
    CACHED[name] = place
    return module


def check_mark(module: ModuleType, place: Place) -> None:
    """Raises ImportError if a library was built from other sources than its name says."""
    found = module.versions().get("sources")
    if found != place.mark:
        raise ImportError(f"{place.library} was built from other sources ({found})")


# -------------------------------------------------------------------------------------------------
# Compiles missing modules while Python is used instead: one process does it for all.


_TRIAL = """
import importlib.util, json, sys
name, library, path = sys.argv[1:]
sys.path[:] = json.loads(path)
import torch
spec = importlib.util.spec_from_file_location(name, library)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""The trial of a library in a separate process, before it gets its name."""
_begun = False


def compile_missing() -> None:
    """Starts compiling, once per process, unless another process does, and warns. It does not wait.

    It raises no error if compiling is impossible: `python -m fastclip.doctor` says why.
    """
    global _begun
    if _begun or not MISSING or is_off():
        return
    _begun = True
    try:
        begun = _begin([place_of(name, missing.part) for name, missing in MISSING.items()])
    except (build_recipe.NotBuilt, OSError, subprocess.SubprocessError):
        return
    if begun:
        say(
            f"fastclip compiles its C++ parts for torch {torch.__version__} in the background (a "
            "few minutes), and uses them from the next start on. Set FASTCLIP_BUILD=0 to turn "
            "this off.",
            doc="missing-libraries",
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
        for left in places[0].folder.glob("build-*"):  # left by a killed process
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=places[0].folder))
        (folder / "plan.json").write_text(json.dumps({"modules": due, "jobs": _jobs()}))
        os.utime(lock.fileno())  # when it began
        # The worker and its compilers hold the lock while they write there.
        subprocess.run(
            [
                sys.executable, "-I", "-S", build_worker.__file__, str(folder / "plan.json"),
                str(lock.fileno()),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[lock.fileno()], start_new_session=True, check=True,
        )  # fmt: skip
    return True


def _jobs() -> int:
    """Returns the number of parallel compilers: each needs a gigabyte."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def plan_of(place: Place) -> dict[str, Any]:
    """Returns the worker's plan for one module.

    Raises:
        NotBuilt: there is no compiler for it.
    """
    build_recipe.check_system()
    compiler = shlex.split(build_recipe.find_cxx())
    flags = [
        *build_recipe.plain_flags(CSRC, build_recipe.torch_headers()[0]),
        *build_recipe.torch_flags(),
    ]
    units, objects = [], []
    for unit in build_recipe.units_of(CSRC / place.part):
        objects.append(f"{place.name}-{unit.name}.o")
        own = [*flags, *build_recipe.mark_flag(unit, place.mark)]
        units.append(build_recipe.compiling(compiler, own, str(unit), objects[-1]))
    made = f"{place.name}.so"
    link = build_recipe.linking(compiler, objects, build_recipe.torch_libraries(), made)
    trial = [sys.executable, "-I", "-c", _TRIAL, place.name, made, json.dumps(sys.path)]
    return {
        "units": units, "whole": [link, trial], "made": made, "library": str(place.library),
        "log": str(place.log), "tried": _mark_of([*units, link], compiler[0]),
    }  # fmt: skip


def _mark_of(commands: list[list[str]], compiler: str) -> str:
    """Returns a mark that changes with the commands, and with their compiler."""
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


# -------------------------------------------------------------------------------------------------
# The state of a module that fits only one torch, and what to do if it is not used yet.


class State(NamedTuple):
    """The state of one module."""

    kind: str
    """package, cache, off, compiling, compiled, refused, failed, impossible or due."""
    text: str
    """The same in words, with what to do."""


def state_of(name: str) -> State:
    """Returns the current state of fastclip.`name`, as this process uses it.

    A module that was not searched in the cache belongs to the package.
    """
    fits = f"for torch {torch.__version__}"
    if name in CACHED:
        return State("cache", f"compiled here {fits}: {CACHED[name].library}")
    if name not in MISSING:
        return State("package", f"of the package, {fits}")
    if sys.platform != "linux":
        return State("impossible", f"fastclip.{name} is built on Linux only.")
    if is_off():
        return State("off", f"FASTCLIP_BUILD=0 leaves out fastclip.{name}. Unset it.")
    named = f"fastclip.{name} {fits}"
    try:
        return _missing(place_of(name, MISSING[name].part), MISSING[name].reason, named)
    except NotBuilt as reason:
        return State("impossible", f"{named} cannot be compiled. {reason}")
    except OSError as reason:
        text = f"{named} cannot be stored ({reason}). Set FASTCLIP_CACHE to a folder of your own."
        return State("impossible", text)


def _missing(place: Place, reason: str, named: str) -> State:
    """Returns the state of a module that this process does not use."""
    check_folder(place)
    if is_locked(place):
        seconds = time.time() - place.lock.stat().st_mtime
        text = f"{named} has been compiling for {seconds:.0f} s. Start again when it is done."
        return State("compiling", text)
    if place.library.exists():
        if reason:
            return State("refused", f"{named} is not loaded ({reason}). Delete {place.library}.")
        return State("compiled", f"{named} was compiled after this process began. Start again.")
    if was_tried(plan_of(place)):
        text = f"{named} did not compile, see {place.log}. Fix the cause, and delete this file."
        return State("failed", text)
    return State("due", f"The next make_private compiles {named} in the background.")


# -------------------------------------------------------------------------------------------------
# The modules of csrc/, loaded if they were built from the present sources.


class _OtherSources(ImportError):
    """The module exists, but its sources have changed since."""


def check_built(name: str, folder: str, compiler: str) -> None:
    """Checks that a module exists and was built from the present sources, for this torch.

    An older module would misread the arguments of present launchers. This case also gives a warning.

    Args:
        name: of the module in fastclip. folder: of csrc/, which becomes it. compiler: builds it.

    Raises:
        ImportError: with the reason and a suggested fix.
    """
    try:
        _of_the_package(name, folder, compiler)
    except _OtherSources as error:
        say(str(error), doc="missing-libraries")
        raise


def of_this_torch(name: str, folder: str) -> ModuleType:
    """Loads a module compiled against torch, from the package or else from the user's cache.

    Args:
        name: of the module in fastclip. folder: of csrc/, which becomes it.

    Raises:
        ImportError: neither has one that fits. The text is about the package's.
    """
    try:
        return _of_the_package(name, folder, "a C++ compiler")
    except ImportError as error:
        try:
            return find(name, folder)
        except ImportError:
            if isinstance(error, _OtherSources):
                say(str(error), doc="missing-libraries")
        raise


def _of_the_package(name: str, folder: str, compiler: str) -> ModuleType:
    try:
        module = importlib.import_module(f"fastclip.{name}")
    except ImportError as error:
        text = f"fastclip.{name} is not built ({error}). {how_to_build(compiler)}"
        raise ImportError(text) from error
    versions: dict[str, str] = getattr(module, "versions", dict)()
    torch = importlib.import_module("torch") if "torch" in versions else None
    if torch is not None and versions["torch"] != torch.__version__.partition("+")[0]:
        raise ImportError(f"fastclip.{name} was compiled against another torch.")
    if not is_current(folder, versions.get("sources", "")):
        raise _OtherSources(
            f"fastclip.{name} was built from other sources than csrc/{folder} has now, so it is "
            f"not used. {how_to_build(compiler)}"
        )
    return module


def how_to_build(compiler: str, package: Path = Path(__file__).parents[1]) -> str:
    """Returns what to do if a module of csrc/ is missing, in a checkout or after a wheel."""
    if (package.parent / "csrc").is_dir():
        return f"Run `make build` with {compiler} on PATH."
    return (
        f"Reinstall fastclip from its source distribution with {compiler} on PATH: pip install "
        "--force-reinstall --no-deps fastclip-VERSION.tar.gz."
    )
