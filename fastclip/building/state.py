"""How a module that fits one torch alone serves, or why it does not yet, and what to do about it."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import torch

from fastclip.building.background import plan_of, was_tried
from fastclip.building.missing import CACHED, MISSING, is_off
from fastclip.building.place import Place, check_folder, is_locked, place_of
from fastclip.building.recipe import NotBuilt


class State(NamedTuple):
    """Of one module."""

    kind: str
    """package, cache, off, compiling, compiled, refused, failed, impossible or due."""
    told: str
    """The same in words, with what to do."""


def state_of(name: str) -> State:
    """Of fastclip.`name`, as this process has found it and as things are now.

    A module that was not looked for in the cache is of the package.
    """
    fits = f"for torch {torch.__version__}"
    if name in CACHED:
        return State("cache", f"compiled here {fits}: {CACHED[name].library}")
    if name not in MISSING:
        return State("package", f"of the package, {fits}")
    if sys.platform != "linux":
        return State("impossible", f"fastclip.{name} is built on Linux only")
    if is_off():
        return State("off", f"FASTCLIP_BUILD=0 leaves out fastclip.{name}: unset it")
    named = f"fastclip.{name} {fits}"
    try:
        return _missing(place_of(name, MISSING[name].part), MISSING[name].refused, named)
    except NotBuilt as reason:
        return State("impossible", f"{named} cannot be compiled: {reason}")
    except OSError as reason:
        told = f"{named} cannot be kept ({reason}): let FASTCLIP_CACHE name a folder of your own"
        return State("impossible", told)


def _missing(place: Place, refused: str, named: str) -> State:
    """Of one that does not serve in this process."""
    check_folder(place)
    if is_locked(place):
        seconds = time.time() - place.lock.stat().st_mtime
        told = f"{named} is being compiled since {seconds:.0f} s: start again when it is done"
        return State("compiling", told)
    if place.library.exists():
        if refused:
            return State("refused", f"{named} is not loaded ({refused}): delete {place.library}")
        return State("compiled", f"{named} was compiled since this process began: start again")
    if was_tried(plan_of(place)):
        told = f"{named} did not compile, {place.log} says why: mend that, and delete this file"
        return State("failed", told)
    return State("due", f"{named} is compiled in the background by the next make_private")
