"""Which samples of a batch belong to one privacy unit, and how these are laid out together.

A unit (a patient) is clipped as one. Its gradient is the mean, or the sum, of its samples' gradients. In
clipped sums each sample takes its unit's scale. Norms need the samples of a unit together. If the unit
numbers are on the CPU, units of equal size are laid out together without padding. On another device,
where reading them would wait, all are padded to the largest.

Index letters: b sample, u unit, n samples of a unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from fastclip.core.numerics import widen
from fastclip.errors import ArgumentError, ArgumentTypeError

_IN_PLACE_BYTES = 256 << 10
"""Bytes of a run above which one more call of an operation costs less than copying it, on a CPU."""


@dataclass(frozen=True, eq=False)
class UnitSamples:
    """The samples of a physical batch, by the privacy unit that each belongs to.

    Args:
        owner: unit of each sample, 0 to count - 1 in any order, int64 [b]; best on the CPU.
        count: units in the batch; each has a sample. 0: the samples are placeholders of an empty
            sampled batch.
        largest: samples of the largest unit.
        reduction: a unit's gradient is the "mean" or the "sum" of its samples' gradients.
        views: number of views per sample, whose gradient is their mean.

    Raises:
        ArgumentError, ArgumentTypeError: they do not fit each other. On a GPU a unit of more samples
            than `largest` contributes nothing, because a check would wait for the device.
    """

    owner: Tensor
    count: int
    largest: int
    reduction: str = "mean"
    views: int = 1

    def __post_init__(self) -> None:
        owner = self.owner
        if not isinstance(owner, Tensor) or owner.dtype != torch.int64 or owner.dim() != 1:
            got = f"{owner.dtype} {list(owner.shape)}" if isinstance(owner, Tensor) else repr(owner)
            raise ArgumentTypeError(
                f"UnitSamples expects owner as an int64 tensor [samples], got {got}. Number the "
                "units of this batch from 0, and give each sample the number of its unit.",
                doc="privacy-units",
            )
        if self.reduction not in ("mean", "sum"):
            raise ArgumentError(
                f'UnitSamples expects reduction="mean" or "sum", got {self.reduction!r}.'
            )
        if self.count < 0 or (self.count > 0) != (self.largest > 0):
            raise ArgumentError(
                "UnitSamples expects count and largest both positive, or both 0 for an empty "
                f"sampled batch, got count={self.count} and largest={self.largest}.",
                doc="privacy-units",
            )
        if self.count and (sizes := self.sizes) is not None:
            bad = len(owner) and int(owner.min()) < 0
            if bad or len(sizes) != self.count or not all(sizes) or max(sizes) != self.largest:
                raise ArgumentError(
                    f"UnitSamples expects count={self.count} units numbered from 0, each with a sample "
                    f"and the largest with largest={self.largest}, got "
                    + ("a negative number." if bad else f"units of {sizes[:8]} samples."),
                    doc="privacy-units",
                )

    def __len__(self) -> int:
        return len(self.owner)

    @property
    def joined(self) -> bool:
        """Whether some unit may have several samples."""
        return self.largest > 1

    @cached_property
    def sizes(self) -> list[int] | None:
        """Samples of every unit, if known without waiting for a device."""
        if self.owner.device.type != "cpu":
            return None
        return self.owner.clamp_min(0).bincount(minlength=self.count).tolist()

    @cached_property
    def _made(self) -> dict[object, Tensor | Layout | None]:
        """Unit numbers and layouts by device."""
        return {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the unit numbers on a device."""
        known = self._made.get(device)
        if not isinstance(known, Tensor):
            known = self._made[device] = self.owner.to(device, non_blocking=True)
        return known

    def counted(self, device: torch.device) -> Tensor:
        """Returns the samples of every unit, int64 [u]."""
        owner = self.on(device)
        return torch.zeros(self.count, dtype=torch.int64, device=device).index_add_(
            0, owner, torch.ones_like(owner)
        )

    def weights(self, device: torch.device) -> Tensor | None:
        """Returns the factors that turn a unit's sum into its gradient, float64 [u]; None for 1."""
        if not self.joined:
            return None
        if self.reduction == "sum":
            one = torch.full((self.count,), 1 / self.views, dtype=torch.float64, device=device)
            return None if self.views == 1 else one
        return self.counted(device).to(torch.float64).reciprocal()

    def unknown(self, device: torch.device) -> Tensor | None:
        """Returns units of more samples than `largest`, bool [u]; None if that was checked."""
        return None if self.sizes is not None else self.counted(device) > self.largest

    def firsts(self, device: torch.device) -> Tensor:
        """Returns the first sample of every unit, int64 [u]."""
        owner = self.on(device)
        numbers = torch.arange(len(owner), dtype=torch.int64, device=device)
        none = torch.full((self.count,), len(owner), dtype=torch.int64, device=device)
        if not self.count:
            return none
        return none.scatter_reduce_(0, owner, numbers, "amin")

    def spread(self, scales: Tensor) -> Tensor:
        """Expands scales of units [..., u] to samples, [..., b]."""
        if not self.count:
            return scales.new_zeros(*scales.shape[:-1], len(self))
        return scales.index_select(-1, self.on(scales.device))

    def total(self, x: Tensor) -> Tensor:
        """Sums samples [b, ...] per unit, [u, ...], in the accumulation type."""
        x = widen(x)
        return x.new_zeros(self.count, *x.shape[1:]).index_add_(0, self.on(x.device), x)

    def of_views(self, views: int) -> UnitSamples:
        """Returns the same units in a batch with this many adjacent views of each sample."""
        owner = self.owner.repeat_interleave(views)
        return replace(self, owner=owner, largest=self.largest * views, views=views)

    def units_of(self, rows: Tensor) -> Tensor:
        """Returns the unit of each of these samples, int64; -1 (no sample) stays -1."""
        owner = self.on(rows.device)
        return torch.cat([owner.new_full((1,), -1), owner])[rows + 1]

    def of_entries(self, rows: Tensor, each: int) -> UnitSamples:
        """Returns the units of entries, `each` per sample; `rows` gives the sample of each entry."""
        return replace(
            self, owner=self.owner.index_select(0, rows), largest=self.largest * each
        )  # fmt: skip

    def positions(self, each: int) -> int:
        """Returns a unit's positions for `each` per sample, in root mean square (for Grams)."""
        if not self.sizes:
            return self.largest * each
        mean = sum(n * n for n in self.sizes) / len(self.sizes)
        return max(1, round(mean**0.5 * each))

    def layout(self, device: torch.device, nbytes: int) -> Layout:
        """Returns how samples of `nbytes` in all are laid out by units."""
        adjacent = self._adjacent
        in_place = adjacent is not None and (
            len(adjacent) <= len(set(self.sizes or ()))
            or (device.type == "cpu" and nbytes >= _IN_PLACE_BYTES * len(adjacent))
        )
        known = self._made.get((device, in_place))
        if not isinstance(known, Layout):
            if in_place:
                assert adjacent is not None
                known = Layout(adjacent)
            else:
                known = self._padded(device) if self.sizes is None else self._sorted(device)
            self._made[device, in_place] = known
        return known

    @cached_property
    def _adjacent(self) -> tuple[tuple[int, int], ...] | None:
        """Returns runs of units of equal size if units are contiguous, else None."""
        if self.sizes is None or bool((self.owner.diff() < 0).any()):
            return None
        return tuple((len(list(run)), n) for n, run in groupby(self.sizes))

    def _sorted(self, device: torch.device) -> Layout:
        """Returns the layout with smaller units first."""
        sizes = self.owner.bincount(minlength=self.count)
        order = (sizes[self.owner] * self.count + self.owner).argsort(stable=True)
        units = sizes.argsort(stable=True)
        runs = tuple((len(list(run)), n) for n, run in groupby(sizes[units].tolist()))
        return Layout(
            runs, order.to(device, non_blocking=True),
            units.argsort().to(device, non_blocking=True),
        )  # fmt: skip

    def _padded(self, device: torch.device) -> Layout:
        """Returns the layout with all units padded to the largest."""
        owner, sizes = self.on(device), self.counted(device)
        order = owner.argsort(stable=True)
        place = torch.arange(self.largest, dtype=torch.int64, device=device)
        first = (sizes.cumsum(0) - sizes)[:, None]
        rows = order[(first + place).clamp_max(len(owner) - 1)]  # [u, n]
        lacking = place >= sizes[:, None]
        return Layout(((self.count, self.largest),), rows.flatten(), None, lacking.flatten())


@dataclass(frozen=True, eq=False)
class Layout:
    """Samples laid out by units.

    Args:
        runs: number of units and samples per unit, run by run.
        order: the samples in the order of the runs, int64; None: unchanged.
        places: position of each unit among the runs', int64 [u]; None: in order.
        lacking: which entries of `order` are padding, bool.
    """

    runs: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    places: Tensor | None = None
    lacking: Tensor | None = None

    def split(self, x: Tensor) -> list[Tensor]:
        """Returns samples [b, ...] by units, run by run: [u, n, ...]."""
        if self.order is not None:
            x = x.index_select(0, self.order)
        if self.lacking is not None:
            x.masked_fill_(self.lacking.view(-1, *[1] * (x.dim() - 1)), 0)
        parts = x.split([u * n for u, n in self.runs])
        return [part.unflatten(0, run) for part, run in zip(parts, self.runs, strict=True)]

    def gather(self, parts: list[Tensor]) -> Tensor:
        """Joins results of the runs, [u, ...] each, in the order of the units."""
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found if self.places is None else found.index_select(0, self.places)

    def scatter(self, x: Tensor) -> list[Tensor]:
        """Splits values of the units, [u, ...], run by run: the inverse of `gather`."""
        if self.places is not None:
            x = torch.empty_like(x).index_copy_(0, self.places, x)
        return list(x.split([u for u, _ in self.runs]))
