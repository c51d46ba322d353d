"""Files that are there whole, whatever ends the process or the machine."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastclip.errors import ArgumentError


def write_whole(path: Any, write: Callable[[Any], None]) -> None:
    """`write(file)`, so that `path` holds the old file or the new one, whenever process or machine end.

    Whoever else writes it at the same time, in this process or another, does the same: the last one
    stays. Symbolic links are followed and stay; a file that is replaced keeps who may read it, a new one
    has what the process's umask leaves.

    Args:
        path: of a file; or an open file, which is written to as it is.

    Raises:
        ArgumentError: something that is no regular file has this name.
        OSError: it cannot be written; an old file stays.
    """
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, (str, os.PathLike)):
        write(path)
        return
    final = Path(path).resolve()
    old = final.stat() if final.exists() else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise ArgumentError(
            f"a file expects a name that is free, or a regular file's, got {path}, which is "
            f"{_kind(old.st_mode)}; name another one"
        )
    part = _new_part(final.parent, 0o666 if old is None else 0o600)
    try:
        write(part)
        if old is not None:
            _share_as(part, old)
        with part.open("rb+") as file:  # a name may reach the disk before what it names
            os.fsync(file.fileno())
        part.replace(final)
        keep_names(final.parent)
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


def _new_part(folder: Path, mode: int) -> Path:
    """An empty file of a name that nobody else has, short: that of the whole file may be the longest."""
    while True:
        part = folder / f"{secrets.token_hex(8)}.part"
        try:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        except FileExistsError:
            continue
        return part


def _share_as(part: Path, old: os.stat_result) -> None:
    """Nobody may read or write the new file who might not the old one."""
    mode = stat.S_IMODE(old.st_mode)
    now = part.stat()
    if os.name == "posix" and (now.st_uid, now.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(part, old.st_uid, old.st_gid)
        except PermissionError:
            if now.st_gid != old.st_gid:  # others than those of the old group
                mode &= 0o700
    part.chmod(mode)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
