"""The choices of batch size and sampler that fit a privacy budget, with the noise of each.

A step adds noise of standard deviation sigma C / B to each entry of the mean gradient. sigma follows
from the budget. Every pass has t = round(N / B) batches, at the sampling rate 1 / t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.special import bdtrc

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.calibration import find_noise_multiplier, in_passes
from fastclip.accounting.steps import Entry
from fastclip.core.checks import whole
from fastclip.core.system import Work
from fastclip.errors import ArgumentError

SAMPLERS = ("poisson", "allocation", "loader")
"""Values of `sampling` of make_private: Poisson, random allocation, and the data loader's own order."""
_LEAST_BATCH, _MOST_STEPS, _MOST_SIZES = 64, 2**14, 10
"""Smallest batch size, most steps of a pass and most batch sizes, unless you name the sizes."""
_POWER = 0.4
"""A guess of how sigma grows, as this power of the batch size."""


@dataclass(frozen=True)
class Choice:
    """One batch size with one sampler, and the noise that keeps the budget.

    Attributes:
        sampler: one of SAMPLERS.
        batch_size: B, the expected number of privacy units of a logical batch.
        steps_per_epoch: t. The sampling rate of "poisson" and "allocation" is 1 / t.
        steps: real steps of the run.
        sigma: noise multiplier, the noise of a summed gradient in units of C.
        physical_batches: expected physical batches of a step, or None if there is no limit.
    """

    sampler: str
    batch_size: int
    steps_per_epoch: int
    steps: int
    sigma: float
    physical_batches: float | None = None

    @property
    def epochs(self) -> float:
        """Length in passes over the data."""
        return self.steps / self.steps_per_epoch

    @property
    def passes(self) -> int:
        """Passes that are begun. Without Poisson sampling each of them is accounted in full."""
        return math.ceil(self.epochs)

    @property
    def noise(self) -> float:
        """sigma / B: noise per entry of a step's mean gradient, in units of C."""
        return self.sigma / self.batch_size

    @property
    def noise_of_mean(self) -> float:
        """sigma / (B sqrt(steps)): noise per entry of the mean over all steps, in units of C."""
        return self.noise / math.sqrt(self.steps)

    @property
    def noise_of_sum(self) -> float:
        """sigma sqrt(steps) / B: noise per entry of the sum over all steps, in units of C."""
        return self.noise * math.sqrt(self.steps)

    def history(self, steps: int | None = None) -> list[Entry]:
        """Return what the accountant holds after the run, or after its first `steps` >= 1 steps."""
        return _history(self.sampler, self.sigma, self.steps_per_epoch, steps or self.steps)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **asdict(self), "epochs": self.epochs, "noise": self.noise,
            "noise_of_mean": self.noise_of_mean, "noise_of_sum": self.noise_of_sum,
        }  # fmt: skip


def search(
    n: int, budget: tuple[float, float], sizes: Iterable[int] | None, samplers: Sequence[str], *,
    epochs: float | None, units: float, most: int | None,
) -> list[Choice]:  # fmt: skip
    """Return all choices by batch size, then by sampler. Choices without a whole step are left out.

    Args:
        n: privacy units. budget: (epsilon, delta). sizes: batch sizes in units, or None.
        samplers: of SAMPLERS, in their order.
        epochs: length in passes, or None. units: length in processed units otherwise.
        most: most units of a physical batch, or None.

    Raises:
        ArgumentError, ArgumentTypeError: a size is out of range, or no noise reaches the budget.
    """
    found: list[Choice] = []
    work, passes = Work("plans noise"), _passes(n, sizes)
    for sampler in samplers:
        for t in passes:
            batch = round(n / t)
            if sampler == "loader":
                t = -(-n // batch)
            steps = int(units * t / n) if epochs is None else in_passes(t, epochs)
            if not steps:
                continue
            with work.bit(f"{sampler}, batch size {batch}"):
                sigma = _sigma(sampler, steps, t, budget, _guess(found, sampler, batch))
            parts = None if most is None else _physical(sampler, n, t, most)
            found.append(Choice(sampler, batch, t, steps, sigma, parts))
    return sorted(found, key=lambda c: (c.batch_size, SAMPLERS.index(c.sampler)))


def _passes(n: int, sizes: Iterable[int] | None) -> list[int]:
    """Return t, the steps of a pass, for each batch size, by falling size.

    Args:
        n: privacy units. sizes: batch sizes, or None.

    Raises:
        ArgumentError, ArgumentTypeError: a size is above N / 2.
    """
    if sizes is None:
        least = min(_LEAST_BATCH, max(1, n // 8))
        powers = [
            2**k for k in range(n.bit_length()) if max(least, n / _MOST_STEPS) <= 2**k <= n / 2
        ]
        sizes = powers[:: -(-len(powers) // _MOST_SIZES)]
    batches = [whole("batch_sizes", size, 1) for size in sizes]
    if not batches or max(batches) > n / 2:
        raise ArgumentError(
            f"batch_sizes expects sizes of at most half of samples={n}, got {batches}."
        )
    return sorted({round(n / batch) for batch in batches})


def _history(sampler: str, sigma: float, t: int, steps: int) -> list[Entry]:
    """Return the history of `steps` steps at t steps per pass, as the engine records it."""
    if sampler == "poisson":
        return [(sigma, 1 / t, steps)]
    return [(sigma, RandomAllocation(t) if sampler == "allocation" else 1.0, -(-steps // t))]


def _sigma(
    sampler: str, steps: int, t: int, budget: tuple[float, float], near: float | None
) -> float:
    """Return the noise multiplier that make_private_with_epsilon finds, too."""
    (_, rate, count), (target, delta) = _history(sampler, 1.0, t, steps)[0], budget
    if sampler == "allocation":  # find_noise_multiplier puts real steps into epochs
        count = steps
    return find_noise_multiplier(
        target_epsilon=target, target_delta=delta, sample_rate=rate, steps=count, near=near
    )


def _guess(found: Sequence[Choice], sampler: str, batch: int) -> float | None:
    """Return about the sigma of a choice, from larger batches and other samplers, or None.

    Args:
        found: choices so far, by falling batch size for each sampler.
    """
    own = {c.batch_size: c.sigma for c in found if c.sampler == sampler}
    if sampler == "allocation":  # sigma changes as with Poisson sampling
        others = {c.batch_size: c.sigma for c in found if c.sampler == "poisson"}
        if batch in others:
            last = min(own, default=batch)
            return others[batch] * own.get(last, others[last]) / others[last]
    if not own or sampler == "loader":  # its search is fast
        return None
    last, *before = sorted(own)[:2]
    power = _POWER
    if before:
        power = math.log(own[last] / own[before[0]]) / math.log(last / before[0])
    return float(own[last] * (batch / last) ** power)


def _physical(sampler: str, n: int, t: int, most: int) -> float:
    """Return the expected number of physical batches of a step, of at most `most` units each.

    It is E max(1, ceil(X / most)) for X ~ Binomial(n, 1 / t) units, or X = B in the loader's order.
    """
    batch = round(n / t)
    if sampler == "loader":
        return float(-(-batch // most))
    limit = min(n, int(batch + 10 * math.sqrt(batch)) + 10)
    return 1 + math.fsum(float(bdtrc(k, n, 1 / t)) for k in range(most, limit, most))
