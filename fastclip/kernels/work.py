"""How much there is to do: into how many parts a sum is cut, and which batches a search serves.

Programs run in waves: a device has `slots` for programs at once, and the last wave leaves those empty
for which nothing is left.
"""

from __future__ import annotations

import functools

import torch

from fastclip.kernels.runtime import cdiv

_WAVES = 8
"""Most waves that a sum is cut for."""
STORE = 8
"""A part's own sum, written and read once more, in steps of 64 positions: what more parts cost."""
_CLASSES = (64, 256, 1024)
"""Most programs, or steps, of all classes but the last."""
_TILE = 128
"""Rows and columns of a tile of which a multiprocessor holds one."""
_MOST_RESIDENT = 4
"""Tiles that a multiprocessor holds, however small they are."""
_CORES = 4
"""Of a device that has none to count: the interpreter's."""


def work_class(n: int) -> int:
    """The class of n programs, or steps: what a search found for one n serves its class.

    A batch of other size must not be served by what a check on two rows found, and Poisson batches,
    each of its own size, must not search each time. A class reaches from n to 4 n: batches that vary
    by less meet two at most. In the last the device is full whatever the tile is.
    """
    return next((k for k, most in enumerate(_CLASSES) if n <= most), len(_CLASSES))


def cost(splits: int, tiles: int, steps: int, slots: int, store: int = STORE) -> int:
    """Steps that a device takes one after the other for `tiles` sums of `steps`, each in `splits`.

    Args:
        store: steps that a part's own sum costs.
    """
    more = store if splits > 1 else 0
    return cdiv(tiles * splits, slots) * (cdiv(steps, splits) + more)


@functools.lru_cache(maxsize=4096)
def splits_of(tiles: int, steps: int, slots: int, store: int = STORE) -> int:
    """Into how many parts to cut each of `tiles` sums, so that the last wave is nearly full.

    The fewest whose cost is within 1/16 of the least: each part takes memory for its sum. No part is
    empty.
    """
    full = (min(steps, slots * n // tiles) for n in range(1, _WAVES + 1))
    found = {1} | {cdiv(steps, cdiv(steps, most)) for most in full if most > 1}
    costs = {splits: cost(splits, tiles, steps, slots, store) for splits in found}
    enough = min(costs.values()) * 17 // 16
    return min(splits for splits, price in costs.items() if price <= enough)


def slots(device: torch.device, rows: int, columns: int) -> int:
    """Programs that run at once, each with a tile of so many rows and columns."""
    return _cores(device) * min(_MOST_RESIDENT, _TILE * _TILE // (rows * columns))


@functools.cache
def _cores(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return _CORES
    return torch.cuda.get_device_properties(device).multi_processor_count
