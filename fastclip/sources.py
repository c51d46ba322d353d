"""Which sources a module of csrc/ was built from: setup.py writes their mark into the module.

This file imports nothing of fastclip, for setup.py loads it where nothing is installed yet.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKED = Path(__file__).resolve().parent / "_csrc"
"""What a wheel holds of the sources: those that are compiled where fastclip runs."""
CSRC = _PACKED if _PACKED.is_dir() else _PACKED.parents[1] / "csrc"
"""Where the sources are, beside the package of a checkout or in an installed one."""
_KINDS = {".cpp", ".cu", ".cuh", ".hpp", ".inc"}


def files_of(folder: str, csrc: Path = CSRC) -> list[Path]:
    """The sources of csrc/`folder`, and any header that the modules share."""
    found = sorted([*csrc.iterdir(), *(csrc / folder).iterdir()])
    return [path for path in found if path.suffix in _KINDS and path.is_file()]


def mark_of(folder: str, csrc: Path = CSRC) -> str:
    """What changes with any of these files."""
    digest = hashlib.sha256()
    for path in files_of(folder, csrc):
        for part in (path.relative_to(csrc).as_posix().encode(), path.read_bytes()):
            digest.update(b"%d " % len(part) + part)
    return digest.hexdigest()[:16]


def is_current(folder: str, mark: str, csrc: Path = CSRC) -> bool:
    """A module with this mark was built from the sources that are there, if any are."""
    return not (csrc / folder).is_dir() or mark_of(folder, csrc) == mark
