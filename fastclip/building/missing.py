"""What fits one torch alone: of the user's cache where the package has none, or noted as missing.

Which one serves is decided when it is imported, for the whole process.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import NamedTuple

from fastclip.building.place import Place, load, place_of


class Missing(NamedTuple):
    """A module that neither the package nor the cache had."""

    part: str
    """The folder of csrc/ that becomes it."""
    refused: str
    """Why the one in the cache does not serve, if there is one."""


MISSING: dict[str, Missing] = {}
"""By name: what `compile_missing` compiles."""
CACHED: dict[str, Place] = {}
"""By name: what has come from the cache."""


def is_off() -> bool:
    """Whether the user wants what is installed and nothing else, or the system has nothing else."""
    return os.environ.get("FASTCLIP_BUILD") == "0" or sys.platform != "linux"


def find(name: str, part: str) -> ModuleType:
    """A module from the cache.

    Args:
        name: in fastclip. part: the folder of csrc/ that becomes it.

    Raises:
        ImportError: there is none that may be loaded.
    """
    MISSING[name] = Missing(part, "")
    if is_off():
        raise ImportError("nothing is compiled where it runs")
    try:
        place = place_of(name, part)
        module = load(place)
        check_mark(module, place)
    except FileNotFoundError as error:
        raise ImportError(f"no fastclip.{name} is in the cache yet") from error
    except (OSError, ImportError) as error:
        MISSING[name] = Missing(part, str(error))
        raise ImportError(str(error)) from error
    del MISSING[name]
    CACHED[name] = place
    return module


def check_mark(module: ModuleType, place: Place) -> None:
    """Refuse a library that is not what its name says."""
    found = module.versions().get("sources")
    if found != place.mark:
        raise ImportError(f"{place.library} was built from other sources ({found})")
