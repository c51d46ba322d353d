"""The process and its machine: atomic files, forks, addresses of tensors, a progress line."""

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


def write_whole(path: Any, write: Callable[[Any], None], *, secret: bool = False) -> None:
    """Writes a file atomically: `path` holds the old file or the new one, even if the machine stops.

    If several processes or threads write it at the same time, the last one wins. Symbolic links are
    followed and kept. A replaced file keeps its permissions, a new one follows the process's umask.

    Args:
        path: of a file; or an open file, which is written to directly.
        secret: only its owner may read the file, also if it replaces one.

    Raises:
        ArgumentError: the path is not a regular file.
        OSError: it cannot be written; an old file is unchanged.
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
    part = _new_part(final.parent, 0o666 if old is None and not secret else 0o600)
    try:
        write(part)
        if old is not None and not secret:
            _share_as(part, old)
        with part.open("rb+") as file:  # a name may reach the disk before its data
            os.fsync(file.fileno())
        part.replace(final)
        keep_names(final.parent)
    finally:
        part.unlink(missing_ok=True)


def keep_names(folder: Path) -> None:
    """Writes new names in the folder to the disk."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _new_part(folder: Path, mode: int) -> Path:
    """Makes an empty file with a unique short name: the final name may have the maximal length."""
    while True:
        part = folder / f"{secrets.token_hex(8)}.part"
        try:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        except FileExistsError:
            continue
        return part


def _share_as(part: Path, old: os.stat_result) -> None:
    """Gives the new file the permissions of the old one, never more."""
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
# The identity of a process: a fork has its parent's memory, but is another process.


_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


def this_process() -> tuple[int, int]:
    """Identifies this process: never equal in a process and its fork.

    Returns:
        The process id, which systems reuse, and the number of forks that led to it.
    """
    return os.getpid(), _forks


# -------------------------------------------------------------------------------------------------
# The memory of tensors for C++: addresses, device and stream as integers; threads; no memory left.


def place(device: torch.device) -> dict[str, int]:
    """Returns where kernels run: device and its current stream; for CPU tensors the host."""
    if device.type != "cuda":
        return {"device": -1, "stream": 0}
    stream = torch.cuda.current_stream(device)
    return {"device": stream.device_index, "stream": stream.cuda_stream}


def is_plain(x: Tensor) -> bool:
    """Whether `data_ptr` is the tensor's memory, on a device that runs kernels: no DTensor, no fake
    tensor, only NVIDIA GPUs."""
    return (
        x.device.type in ("cpu", "cuda")
        and not torch.version.hip
        and x.layout == torch.strided
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def lies_on_host(x: Tensor) -> bool:
    """Whether a loop on the host may read it from `data_ptr`: no subclass, no wrapper."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not is_functorch_wrapped(x)
        and not x.is_neg()
        and x.data_ptr() != 0
    )


def loop_threads() -> int:
    """Returns the threads of a loop on the host: PyTorch's number.

    A fork uses one: the thread library would wait forever for its parent's threads.
    """
    return 1 if this_process()[1] else torch.get_num_threads()


def pointer(x: Tensor | None) -> int:
    """Returns the tensor's address; 0 for None."""
    return 0 if x is None else x.data_ptr()


def no_memory(error: BaseException) -> bool:
    """Whether an operation ran out of memory; the CPU's allocator only says so in its message."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


# -------------------------------------------------------------------------------------------------
# The work of a first step as a line of the terminal, which shows that it has not hung.


_PATIENCE = 2.0
"""Seconds of work of one kind before a line is shown."""


class Work:
    """Work of one kind, in an unknown number of parts.

    After some seconds each part is shown while it runs: on standard error if that is a terminal, by one
    process per machine. No line remains. (Progress bars of libraries need the total, and start threads
    and locks of several processes.)

    Args:
        what: describes the work to the user.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bits, self._seconds = 0, 0.0

    @contextmanager
    def bit(self, name: str = "") -> Iterator[None]:
        """Context of one part. name: of the object that it is for."""
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
    """Returns standard error if it is a terminal."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    with suppress(Exception):  # from any replacement of standard error
        return sys.stderr if rank == "0" and sys.stderr.isatty() else None
    return None


def _write(terminal: TextIO, text: str, end: str = "") -> None:
    """Replaces the terminal's last line. A closed terminal raises no error."""
    with suppress(Exception):
        width = shutil.get_terminal_size().columns - 1
        terminal.write(f"\r{text[:width]:<{width}}{end}")
        terminal.flush()
