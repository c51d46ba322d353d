"""Secure normals in vectors and on all threads, and the sums on which they lie in the same pass.

csrc/host/secure_normals.inc has ChaCha20 and Box-Muller in the best instructions of the processor.
Neither is taken on faith: a process holds a sample, drawn under a key that everybody knows, against
OpenSSL's cipher and NumPy's functions before it draws the first; where they differ, OpenSSL and PyTorch
draw. (PyTorch's functions may ask for threads, for which a fork would wait for ever.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastclip import _host
from fastclip._torch import foreign_modes
from fastclip.host.plain import is_written_to, lies_alike
from fastclip.memory import loop_threads, pointer
from fastclip.noise import keystream

SET: str = _host.secure_instructions()[0]
"""The instructions in which normals are drawn."""
LEAST = 2**13
"""Numbers of a thread: fewer cost more than they save."""
_LANES = {"avx512": 16}
_BLOCK = 16
"""Words of 32 bits in a block of the cipher."""
_SAMPLE = (1, 999, 260)


def secure_normals(
    outs: list[Tensor], std: float, guarded: bool, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """fastclip.noise.secure_normals, of float32 in memory."""
    totals = totals or [None] * len(outs)
    pairs = zip(outs, totals, strict=True)
    ready = all(is_written_to(o) and (t is None or lies_alike(o, t)) for o, t in pairs)
    if not ready or not serves():
        return NotImplemented
    draw(outs, std, guarded, totals, factor)
    return None


def serves() -> bool:
    """Whether no mode wants to hear of a draw, and the loop is right here."""
    return not foreign_modes() and is_right(SET)


def draw(
    outs: Sequence[Tensor], std: float, guarded: bool, totals: Sequence[Tensor | None],
    factor: float,
) -> None:  # fmt: skip
    """Fill tensors that are written to, beside totals that lie alike, under a key of its own."""
    with keystream.fresh_key() as key:
        _draw(key, outs, std, guarded, totals, factor, SET)
    for out in outs:
        torch.autograd.graph.increment_version(out)  # autograd does not see what loops write


def _draw(
    key: bytes | bytearray, outs: Sequence[Tensor], std: float, guarded: bool,
    totals: Sequence[Tensor | None], factor: float, instructions: str,
) -> None:  # fmt: skip
    runs = [
        (out.data_ptr(), out.numel(), pointer(total))
        for out, total in zip(outs, totals, strict=True)
    ]
    threads = max(1, min(loop_threads(), sum(map(Tensor.numel, outs)) // LEAST))
    _host.secure_normals(
        key=key, runs=runs, std=std, factor=factor, guarded=guarded, instructions=instructions,
        threads=threads,
    )  # fmt: skip


@functools.cache
def is_right(instructions: str) -> bool:
    """Whether samples of both kinds are what OpenSSL's cipher and NumPy make of the same key.

    Raises:
        SecureModeError: without the cryptography package.
    """
    key, std, factor = bytes(range(keystream.KEY_BYTES)), 1.7, 0.3
    for guarded in (False, True):
        found = [torch.empty(n, dtype=torch.float32, device="cpu") for n in _SAMPLE]
        totals = [torch.linspace(-3, 3, n, dtype=torch.float32, device="cpu") for n in _SAMPLE]
        _draw(key, found, std, guarded, [None, *totals[1:]], factor, instructions)
        first = 0
        totals[0].zero_()
        for out, total in zip(found, totals, strict=True):
            values, first = expected(key, len(out), first, guarded, instructions)
            if not torch.allclose(out.double(), std * values + factor * total, atol=1e-5):
                return False
    return True


def expected(
    key: bytes, count: int, first: int, guarded: bool, instructions: str
) -> tuple[Tensor, int]:
    """Standard normals of a run whose blocks begin at `first`, float64; and the first block after it.

    A lane has a block of its own, of which every 2 or (guarded) 8 words give two values.
    """
    lanes, terms = _LANES.get(instructions, 8), 4 if guarded else 1
    batches = -(-count // (_BLOCK // terms * lanes))
    words = np.empty((batches, lanes, _BLOCK // 2 // terms, terms, 2), "<u4")
    stream = keystream.require_cipher()(key).encryptor()
    stream.update(bytes(4 * _BLOCK * first))
    stream.update_into(bytes(words.nbytes), words.reshape(-1).view(np.uint8))
    u = (words[..., 0] + 0.5) / 2**32
    angle = math.pi * (words[..., 1] + 0.5) / 2**31
    radius = np.sqrt(-2 * np.log(u))
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)]).sum(-1) / math.sqrt(terms)
    # [cosine or sine, batch, lane, pair] before
    values = torch.from_numpy(both.transpose(1, 3, 0, 2).reshape(-1))
    return values[:count], first + batches * lanes
