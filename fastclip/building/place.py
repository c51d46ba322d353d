"""Where a module that was compiled for this torch is kept, which nobody else may write to.

A library that is loaded runs as the user. So it is loaded only where its folder and its file are the
user's or root's, and nobody else may write to them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from fastclip.cache import cache_folder
from fastclip.sources import mark_of


class Place(NamedTuple):
    """Of one module, of these sources, for this torch and this Python."""

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
        """Of a build that has failed. Its first line tells what was tried."""
        return self.folder / f"{self.name}-{self.mark}.log"

    @property
    def lock(self) -> Path:
        """Held while anything is compiled for this torch."""
        return self.folder / "lock"


def place_of(name: str, part: str) -> Place:
    """The place of a module; nothing need be there.

    Raises:
        OSError: its sources are not there, or the user has no cache.
    """
    return Place(name, part, mark_of(part), cache_folder() / "compiled" / _fits())


def _fits() -> str:
    """What a library is compiled for."""
    python = EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "libc").replace(" ", "-")
    git = hashlib.sha256(str(torch.version.git_version).encode()).hexdigest()[:8]
    return f"{python}-{libc}-torch-{torch.__version__}-{git}".replace(os.sep, "-")


def make_folder(place: Place) -> None:
    """Make it, for the user alone.

    Raises:
        OSError: it cannot be made or written to, or others can.
    """
    for folder in (*reversed(place.folder.parents), place.folder):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster
    check_folder(place)


def check_folder(place: Place) -> None:
    """Refuse a folder in which this user cannot keep anything, or others can; it need not be there.

    Raises:
        OSError: saying so.
    """
    for folder in (place.folder.parent, place.folder):
        if os.path.lexists(folder):
            check_own(folder)
    there = next(path for path in (place.folder, *place.folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} cannot be written to")


def check_own(path: Path) -> None:
    """Refuse a file or folder that somebody else may have written.

    Raises:
        PermissionError: it is a link, another user's, or others may write to it.
        OSError: it is not there.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} is a link or belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {path}")


def load(place: Place) -> ModuleType:
    """Import the library as fastclip.`name`.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: somebody else may have written it.
        ImportError: it does not fit.
    """
    for path in (place.folder.parent, place.folder, place.library):
        check_own(path)
    # pybind11 keeps modules by their names, and the package's may be another torch's.
    spec = importlib.util.spec_from_file_location(f"{__package__}.{place.name}", place.library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place.library} is no module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[f"fastclip.{place.name}"] = module
    setattr(sys.modules["fastclip"], place.name, module)
    return module


def is_locked(place: Place) -> bool:
    """Whether somebody compiles for this torch now."""
    import fcntl  # of systems on which anything is compiled

    try:
        with open(place.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
