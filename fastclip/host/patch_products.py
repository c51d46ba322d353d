"""Launcher of the inner products of patch Grams, of which fastclip._host keeps none in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from fastclip import _host
from fastclip._torch import invents
from fastclip.memory import lies_on_host, loop_threads
from fastclip.ops.conv import ConvGeometry, windows

_TYPES = (torch.float32, torch.float64)


def patch_products(
    pixels: Tensor, outputs: Tensor, space: tuple[int, ...], out: tuple[int, ...],
    geometry: ConvGeometry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """fastclip.ops.patch_products, in one read of both Grams: the patch Gram is never in memory."""
    same = pixels.dtype == outputs.dtype and pixels.dtype in _TYPES
    if not same or not (lies_on_host(pixels) and lies_on_host(outputs)):
        return NotImplemented
    (n, s, o), squares = (len(pixels), *map(_numel, (space, out))), (pixels.shape, outputs.shape)
    if squares != ((n, s, s), (n, o, o)) or invents():
        return NotImplemented
    pixels, outputs = pixels.contiguous(), outputs.contiguous()
    offsets, _held = _offsets(tuple(space), tuple(out), geometry)
    found = torch.empty(len(pixels), 3, dtype=torch.float64, device="cpu")
    _host.patch_gram_products(
        pixels.data_ptr(), outputs.data_ptr(), found.data_ptr(), len(pixels), pixels.shape[1],
        outputs.shape[1], offsets, pixels.dtype == torch.float64, loop_threads(),
    )  # fmt: skip
    product_, trace, _ = found.to(pixels.dtype).unbind(1)
    return product_, trace, found[:, 2]


@functools.lru_cache(maxsize=256)
def _offsets(
    space: tuple[int, ...], out: tuple[int, ...], geometry: ConvGeometry
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """The runs of positions that each offset sees, as patch_gram.hpp has them; and their memory."""
    offsets, held = [], []
    seen = [windows(axis, space[axis], out[axis], geometry) for axis in range(len(space))]
    for pairs in product(*seen):
        to, of = (
            [range(s.start, s.stop, s.step or 1) for s in side] for side in zip(*pairs, strict=True)
        )
        runs = torch.tensor(
            [_starts(to, out), _starts(of, space), [len(to[-1])] * _count(to)],
            dtype=torch.int32, device="cpu",
        )  # fmt: skip
        held.append(runs)
        offsets.append((*(row.data_ptr() for row in runs), runs.shape[1], geometry.stride[-1]))
    return offsets, held


def _starts(ranges: list[range], sizes: tuple[int, ...]) -> list[int]:
    """The first position of every line along the last axis."""
    found = []
    for place in product(*ranges[:-1], ranges[-1][:1]):
        position = 0
        for coordinate, size in zip(place, sizes, strict=True):
            position = position * size + coordinate
        found.append(position)
    return found


def _count(ranges: list[range]) -> int:
    return _numel(map(len, ranges[:-1]))


def _numel(sizes: Iterable[int]) -> int:
    return torch.Size(sizes).numel()
