"""Which sources a module of csrc/ was built from: setup.py writes their mark into the module.

This file imports nothing of fastclip, for setup.py loads it where nothing is installed yet.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
"""Where a checkout has its sources; beside an installed package there are none."""
_KINDS = {".cpp", ".cu", ".cuh", ".hpp", ".inc"}


def mark_of(folder: str, csrc: Path = CSRC) -> str:
    """What changes with any source of csrc/`folder` and any header that the modules share."""
    digest = hashlib.sha256()
    for path in sorted([*csrc.iterdir(), *(csrc / folder).iterdir()]):
        if path.suffix in _KINDS and path.is_file():
            for part in (path.relative_to(csrc).as_posix().encode(), path.read_bytes()):
                digest.update(b"%d " % len(part) + part)
    return digest.hexdigest()[:16]


def is_current(folder: str, mark: str, csrc: Path = CSRC) -> bool:
    """A module with this mark was built from the sources that are there, if any are."""
    return not (csrc / folder).is_dir() or mark_of(folder, csrc) == mark
