"""Files that are there whole, whatever ends the process or the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Any, write: Callable[[Any], None]) -> None:
    """`write(file)`, so that `path` holds the old file or the new one, whenever process or machine end.

    Args:
        path: of a file; or an open file, which is written to as it is.
    """
    if not isinstance(path, (str, os.PathLike)):
        write(path)
        return
    final = Path(path)
    part = final.with_name(f"{final.name}.{os.getpid()}.part")
    try:
        write(part)
        with part.open("rb+") as file:  # a name may reach the disk before what it names
            os.fsync(file.fileno())
        part.replace(final)
        keep_names(final.resolve().parent)
    finally:
        part.unlink(missing_ok=True)


def keep_names(folder: Path) -> None:
    """New names in the folder are on the disk as well."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
