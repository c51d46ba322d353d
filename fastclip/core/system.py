"""The process and its machine: files that survive it, forks, addresses of tensors, a progress line."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from fastclip.core.torch_names import is_functorch_wrapped
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
            f"A file expects a name that is free, or a regular file's, got {path}, which is "
            f"{_kind(old.st_mode)}. Choose another name."
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


# -------------------------------------------------------------------------------------------------
# Which process this is: a fork has all that its parent had in memory, and is another one.


_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


def this_process() -> tuple[int, int]:
    """Equal in one process, and in no two of which one is a fork of the other.

    Returns:
        The process' number, which systems give away again, and the forks on the way to it.
    """
    return os.getpid(), _forks


# -------------------------------------------------------------------------------------------------
# Where tensors lie, as C++ takes it: addresses, device and stream as integers; threads; and no
# room.


def place(device: torch.device) -> dict[str, int]:
    """Where kernels run: device and its current stream; for CPU tensors the host."""
    if device.type != "cuda":
        return {"device": -1, "stream": 0}
    stream = torch.cuda.current_stream(device)
    return {"device": stream.device_index, "stream": stream.cuda_stream}


def is_plain(x: Tensor) -> bool:
    """Whether its memory is what `data_ptr` says, on a device that kernels run on: no DTensor, no
    fake tensor, no other GPU than NVIDIA's."""
    return (
        x.device.type in ("cpu", "cuda")
        and not torch.version.hip
        and x.layout == torch.strided
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def lies_on_host(x: Tensor) -> bool:
    """Whether a loop on the host may read it from `data_ptr`: no subclass, nothing that is wrapped."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not is_functorch_wrapped(x)
        and not x.is_neg()
        and x.data_ptr() != 0
    )


def loop_threads() -> int:
    """Threads of a loop on the host: PyTorch's number, and those that it has.

    A fork has one: the library that runs them waits for ever there for those that its parent had.
    """
    return 1 if this_process()[1] else torch.get_num_threads()


def pointer(x: Tensor | None) -> int:
    """Its address; 0 for none."""
    return 0 if x is None else x.data_ptr()


def no_memory(error: BaseException) -> bool:
    """Whether an operation found none; the allocator of the CPU says so in words alone."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


# -------------------------------------------------------------------------------------------------
# What a first step is busy with, as a line of the terminal: nothing else tells that it has not
# hung.


_PATIENCE = 2.0
"""Seconds of work of one kind that are not worth a line."""


class Work:
    """Work of one kind that is done bit by bit, nobody knows of how many.

    After some patience each bit is shown while it lasts: on standard error where that is a terminal, by
    one process of a machine. No line stays. (No progress bar of a library: these want to know how much
    there is, and start threads and locks of several processes.)

    Args:
        what: it is, for its reader.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bits, self._seconds = 0, 0.0

    @contextmanager
    def bit(self, name: str = "") -> Iterator[None]:
        """One bit of it goes on. name: of what it is done for."""
        self._bits += 1
        begun = time.perf_counter()
        terminal = None if self._seconds < _PATIENCE else _terminal()
        if terminal is not None:
            named = f" ({name})" if name else ""
            _write(terminal, f"fastclip {self._what}: {self._bits}{named}, {self._seconds:.0f} s")
        try:
            yield
        finally:
            if terminal is not None:
                _write(terminal, "", end="\r")
            self._seconds += time.perf_counter() - begun


def _terminal() -> TextIO | None:
    """Where somebody reads."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    with suppress(Exception):  # of whatever stands in its place
        return sys.stderr if rank == "0" and sys.stderr.isatty() else None
    return None


def _write(terminal: TextIO, text: str, end: str = "") -> None:
    """Put this in the place of the terminal's last line. A terminal that has gone stops nothing."""
    with suppress(Exception):
        width = shutil.get_terminal_size().columns - 1
        terminal.write(f"\r{text[:width]:<{width}}{end}")
        terminal.flush()
