"""How rows are drawn, said once: what the engine, the accountant and every statement of privacy read."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from torch import Tensor

from fastclip.accounting.calibration import in_passes
from fastclip.accounting.protected import Protected
from fastclip.data.mixed import Canaries
from fastclip.errors import ArgumentError

POISSON = "Poisson"
"""Every unit is in a draw independently of all others."""
TRUNCATED = "truncated Poisson"
"""The same, and a draw of more than max_batch_size units is cut to a uniformly random subset."""
SHUFFLED = "shuffled"
"""A random order, cut into batches: no unit is drawn independently of the others."""
GIVEN_ORDER = "given order"
"""An order that is not drawn here: the loader's own sampler, a sequence, a list of batches."""
STREAM = "stream"
"""Nobody knows which rows come, and how often in a pass: an IterableDataset, a Poisson sampler of the
user's own."""

ENDLESS = sys.maxsize
"""Draws in a pass over a stream that has no length: no run has as many."""


def epochs_of(steps: int, a_pass: int) -> float:
    """A number of epochs e for which `steps` steps are planned, where a pass has `a_pass`.

    `steps / a_pass` may come out one step too long, by rounding (7 / 25 of 25 steps are 8).
    """
    return max(0.0, (steps - 0.5) / a_pass)


@dataclass(frozen=True)
class SamplingDesign:
    """All about how the rows of a step are drawn.

    Privacy is stated for units: rows, or what several rows have in common (a patient).

    Formal guarantee: where `poisson`, every unit is in a draw independently of all others and of the
    draws before, with a probability of at most `rate` (of `rates[i]`, unit i). Where `public` neither
    `rate` nor `expected_batch_size` depends on the number of units, so that neighbours may differ in
    one that was added or removed. Else they follow from that number, and neighbours are data sets of
    the same, public number, one unit of which contributes nothing (zero-out). Truncated draws are those
    of "Tighter Privacy Analysis for Truncated Poisson Sampling" (arXiv 2508.15089): a Poisson draw
    first, then a uniformly random subset; their price depends on `units`, too.
    """

    sampler: str
    """POISSON, TRUNCATED, SHUFFLED, GIVEN_ORDER or STREAM."""
    rate: float
    """q, the largest probability to be in a draw; of what is not Poisson, 1 / steps."""
    expected_batch_size: float
    """B, the divisor of the noisy sums, in units."""
    steps: int
    """Draws in one pass over the data; ENDLESS of a stream without a length."""
    units: int
    """N, how many may be drawn; 0 of a stream without a length."""
    rates: Tensor | None = field(default=None, compare=False)
    """Row-wise probabilities, float64 [n], where they differ."""
    public: bool = False
    """q and B were given, so that neither depends on N."""
    max_batch_size: int | None = None
    """Most units of a truncated draw."""
    unit: str = "row"
    """What is drawn, clipped and protected as one: "row", or "unit" of several rows."""
    max_rows_per_unit: int | None = None
    """Rows of a unit that one draw takes at most, chosen anew each time."""
    unit_reduction: str | None = None
    """A unit's gradient is the "mean" or the "sum" of its rows' gradients."""
    secure: bool = False
    """Drawn from cryptographic randomness."""
    readers: int = 1
    """Workers that read a stream side by side, each of which may bring every row."""
    canaries: Canaries | None = None
    """Rows of an audit that are among those of the data set."""

    @property
    def protected(self) -> Protected:
        """Whom steps of such draws protect; N stays secret where q and B were given, and no draw is cut,
        whose price depends on N."""
        return Protected(frozenset({self.unit}), self.public and self.max_batch_size is None)

    @property
    def poisson(self) -> bool:
        """Units are drawn independently, so that amplification by sampling holds."""
        return self.sampler in (POISSON, TRUNCATED)

    def described(self) -> str:
        """All of it in words, rates by row included, to be held against another process' design."""
        rates = None if self.rates is None else hash(tuple(self.rates.tolist()))
        return f"{replace(self, rates=None)}, rates {rates}"

    def steps_in(self, epochs: float) -> int:
        """Steps in `epochs` passes; `steps_of(rate, epochs)` wherever 1 / q is the length of a pass.

        Raises:
            ArgumentError: a stream has no length.
        """
        if self.steps == ENDLESS:
            raise ArgumentError(
                "epochs needs the length of a pass, and the data set is an IterableDataset without one. "
                "Give it a __len__, or pass noise_multiplier to make_private"
            )
        return in_passes(self.steps, epochs)
