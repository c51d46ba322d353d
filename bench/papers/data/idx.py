"""The idx format of MNIST: big-endian magic number and sizes, then bytes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from bench.papers.data.reading import opened, reading
from fastclip.errors import ArgumentError

IMAGES, LABELS = 2051, 2049
"""Magic numbers: unsigned bytes in three dimensions, and in one."""


def read_idx(path: Path, magic: int) -> np.ndarray:
    """The bytes of an idx file, gzip-compressed or not, in its dimensions.

    Raises:
        ArgumentError: it has another magic number, or more or fewer bytes than its sizes say.
    """
    with reading(path), opened(path) as file:
        content = file.read()
    dimensions = magic % 256  # the last byte of the magic number
    header = 4 * (1 + dimensions)
    found = struct.unpack_from(">I", content)[0] if len(content) >= header else None
    if found != magic:
        came = "a file that is too short" if found is None else f"{found}"
        raise ArgumentError(
            f"{path}: expected an idx file of magic number {magic}, came {came}: it is another file, "
            "or damaged; get it again"
        )
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    expected = header + int(np.prod(sizes, dtype=np.int64))
    if len(content) != expected:
        raise ArgumentError(
            f"{path}: its header says {' x '.join(map(str, sizes))}, which is {expected:,} bytes, but "
            f"it has {len(content):,}: it was cut off or damaged on the way; get it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes [n] or [n, h, w] as a gzip-compressed idx file."""
    magic = {1: LABELS, 3: IMAGES}[values.ndim]
    header = struct.pack(f">{1 + values.ndim}I", magic, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0))
