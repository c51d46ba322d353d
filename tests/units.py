"""Rows of a batch that belong to units, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastclip.ops.units import UnitSamples

SCATTERED = (0, 1, 0, 2, 0, 3, 2, 1, 4, 0, 5, 5)
"""Ragged, and no unit's rows lie side by side."""


def unit_samples(
    owner: Sequence[int], reduction: str = "mean", device: str | torch.device = "cpu"
) -> UnitSamples:
    """Units of these numbers."""
    sizes = [list(owner).count(unit) for unit in set(owner)]
    rows = torch.tensor(list(owner), dtype=torch.int64, device=device)
    return UnitSamples(rows, len(sizes), max(sizes, default=0), reduction)


def scattered(b: int, reduction: str = "mean") -> UnitSamples:
    """b rows of some units: of one, where there are but two rows."""
    owner = [0, 0] if b == 2 else [SCATTERED[i % len(SCATTERED)] for i in range(b)]
    return unit_samples(owner, reduction)


def adjacent(b: int, reduction: str = "mean") -> UnitSamples:
    """The same units, whose rows lie one behind the other."""
    return unit_samples(sorted(scattered(b).owner.tolist()), reduction)


class Elsewhere(UnitSamples):
    """As on a device that would have to be waited for: nothing is looked at."""

    sizes = None  # type: ignore[assignment]


def padded(b: int, reduction: str = "mean") -> UnitSamples:
    """The same units, of which only the largest one's rows are known."""
    known = scattered(b)
    return Elsewhere(known.owner, known.count, known.largest, reduction)


LAYOUTS = {"scattered": scattered, "adjacent": adjacent, "padded": padded}
