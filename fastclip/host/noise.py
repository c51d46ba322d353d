"""Normals of a CPU generator in vectors and on all threads: to the bit what PyTorch draws of it on one,
and the sums on which they lie in the same pass.

PyTorch spends most of a normal on its call for a word, which for large models is a quarter of a step.
csrc/host/mersenne.cpp makes the same words and the same normals of them. That they are the same is not
relied on: PyTorch's last bits depend on how it was compiled, so a process holds a sample of both
against each other before it draws the first, and where they differ PyTorch draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fastclip import _host
from fastclip._torch import foreign_modes, function_modes
from fastclip.host import secure_noise
from fastclip.host.alone import is_alone
from fastclip.host.plain import all_lie_alike, is_written_to, lies_alike
from fastclip.memory import loop_threads, pointer
from fastclip.noise.source import SECURE, SEEDED, TORCHS, SecureNoise, SeededNoise
from fastclip.ops.finalize import add_totals, check_std

LEAST = 2**15
"""Numbers of a thread, and of a draw, of which fewer cost more than they save."""
_ROW = 16
"""PyTorch makes so many normals of as many words; the rest of a tensor takes another row."""
_SAMPLE = (16, 2**17, 999, 31)


def draw_normals(
    outs: list[Tensor], std: float, source: Any, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """fastclip.ops.finalize.draw_normals, where PyTorch's generator draws enough, or none does."""
    if type(source) is SecureNoise:
        return _draw_securely(outs, std, source, totals, factor)
    own = type(source) is SeededNoise and getattr(source.normal_, "__func__", None) is SEEDED
    own = own and Tensor.normal_ is TORCHS
    if not own or not std >= 0 or sum(map(Tensor.numel, outs)) < LEAST:
        return NotImplemented
    if foreign_modes() or function_modes() or not is_alone():  # who would not hear of it
        return NotImplemented
    generator = source.drawing()
    alike = all_lie_alike(outs, totals)  # nearly always
    fit = [n >= _ROW for n in map(Tensor.numel, outs)] if alike else [*map(_fits, outs)]
    together = zip(outs, totals or [None] * len(outs), fit, strict=True)
    for fits, run in groupby(together, itemgetter(2)):
        of, added, _ = map(list, zip(*run, strict=True))
        read, rest = (added, [None] * len(of)) if alike else _apart(of, added)
        if fits and is_faithful() and _draw_together(of, std, generator, read, factor):
            added = rest
        else:
            for out in of:
                source.normal_(out, std)
        add_totals(of, added, factor)
    return None


def _draw_securely(
    outs: list[Tensor], std: float, source: SecureNoise, totals: Sequence[Tensor | None],
    factor: float,
) -> None:  # fmt: skip
    """All that lies in memory under one key."""
    check_std(std)
    plain = getattr(source.normal_, "__func__", None) is SECURE
    pairs = zip(outs, totals or [None] * len(outs), strict=True)
    kinds: dict[bool, list[tuple[Tensor, Tensor | None]]] = {True: [], False: []}
    for pair in pairs:
        kinds[is_written_to(pair[0])].append(pair)
    if not plain or not kinds[True] or not secure_noise.serves():
        return NotImplemented
    of, added = map(list, zip(*kinds[True], strict=True))
    read, rest = _apart(of, added)
    secure_noise.draw(of, std, source.guarded, read, factor)
    add_totals(of, rest, factor)
    for out, total in kinds[False]:
        source.normal_(out, std)
        add_totals([out], [total], factor)
    return None


def _apart(
    outs: Sequence[Tensor], totals: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Totals that a loop can read beside what it draws, and the others; None in all other places."""
    read = [o if lies_alike(out, o) else None for out, o in zip(outs, totals, strict=True)]
    return read, [None if one is o else o for one, o in zip(read, totals, strict=True)]


def _fits(out: Tensor) -> bool:
    return is_written_to(out) and out.numel() >= _ROW


@functools.cache
def is_faithful() -> bool:
    """Whether a sample of numbers, and the generator after them, are those of this PyTorch."""
    ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    found = [torch.empty(count, dtype=torch.float32, device="cpu") for count in _SAMPLE]
    expected = [torch.empty_like(out) for out in found]
    totals = [torch.linspace(-3, 3, count, dtype=torch.float32, device="cpu") for count in _SAMPLE]
    if not _host.mersenne_has_normals() or not _draw_together(found, 1.7, ours, totals, 0.3):
        return False
    for out in expected:
        out.normal_(0.0, 1.7, generator=theirs)
    add_totals(expected, totals, 0.3)
    bits = (x.view(torch.int32) for x in (torch.cat(found), torch.cat(expected)))
    return torch.equal(*bits) and torch.equal(ours.get_state(), theirs.get_state())


def _draw_together(
    outs: Sequence[Tensor], std: float, generator: torch.Generator, totals: Sequence[Tensor | None],
    factor: float,
) -> bool:  # fmt: skip
    """Whether it is done; else the generator stands where it stood. The totals lie as their outs do."""
    if type(generator) is not torch.Generator or generator.device.type != "cpu":
        return False
    before = generator.get_state()
    counts = [*map(Tensor.numel, outs)]
    state = before.numpy().tobytes()
    try:
        after = _host.mersenne_advanced(state, sum(n + _ROW * (n % _ROW > 0) for n in counts))
    except ValueError:  # no generator that csrc/host/mersenne.cpp knows
        return False
    if not torch.equal(generator.get_state(), before):  # another thread draws from it
        return False
    # Whatever happens now, nothing is drawn twice.
    generator.set_state(torch.frombuffer(bytearray(after), dtype=torch.uint8))
    threads = max(1, min(loop_threads(), sum(counts) // LEAST))
    own: Callable[[Any], int] = pointer if type(None) in {*map(type, totals)} else Tensor.data_ptr
    runs = [*zip(map(Tensor.data_ptr, outs), counts, map(own, totals), strict=True)]
    _host.mersenne_normals(state=state, runs=runs, std=std, factor=factor, threads=threads)
    return True


NORMALS = {"draw_normals": draw_normals, "secure_normals": secure_noise.secure_normals}
"""Operation of fastclip.ops -> launcher."""
