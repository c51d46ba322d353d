"""Random allocation: each sample is in a fixed number of batches of an epoch, at random steps.

The privacy loss of an epoch of t steps, of which one contains a given sample, is log R or -log R with
R = (R_1 + ... + R_t) / t. Without the sample (Q) the R_i are independent and log-normal, with
log R_i ~ N(-1 / (2 sigma^2), 1 / sigma^2) and mean 1. With it (P) one of them is size-biased,
log R_1 ~ N(1 / (2 sigma^2), 1 / sigma^2). Both hockey-stick divergences are convex in R:
H_a(P||Q) = E_Q max(R - a, 0) and H_a(Q||P) = E_Q max(1 - a R, 0). A gradient of norm below 1 has an R_i
that is smaller in convex order given the earlier steps, so an adaptive run is dominated as well.

Each R_i is put on a lattice. The mass of a cell moves to its two end points with unchanged mean, so
the sum of the R_i grows in convex order, and both divergences with it. The excess is of second order
in the mesh. The sum is a product of Fourier transforms.

A log-normal sum has a long tail, so epochs are divided by their largest R_i into levels, each on a
lattice of its own. Within a level the terms up to the previous level's largest value, and those above,
are split separately, so every part remains convex.

Source: Chua et al. 2024 (arXiv 2412.16802, the pair that dominates an epoch); Feldman and Shenfeld 2025
(arXiv 2502.08202) and 2026 (arXiv 2602.17284), random allocation and its loss distribution; Shaked and
Shanthikumar 2007 (convex order); Zhu et al. 2022 (dominating pairs compose).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.fft import irfft, next_fast_len
from scipy.special import log_ndtr, ndtr, ndtri_exp

from fastclip.accounting.transforms import Sums, logsumexp, on_losses, wrapped
from fastclip.core.checks import keep, whole
from fastclip.errors import ArgumentError, StepError


def one_batch(rate: Any, joined: object, kind: str) -> Any:
    """Return `rate`, which Opacus multiplies by the batches of a step, if that number is 1.

    Args:
        rate: a sampling other than a number.
        joined: the number of batches.
        kind: what the batches are, for the message.

    Raises:
        StepError: for several sampled batches in one step, for which no accounting is known.
    """
    if type(joined) is not int:
        return NotImplemented
    if joined != 1:
        raise StepError(
            f"This step joins {joined} {kind}, and no accounting is known for that. Call "
            "optimizer.step() after every sampled batch.",
            doc="privacy-budget",
        )
    return rate


@dataclass(frozen=True)
class RandomAllocation:
    """Sampling of one epoch: each sample is in exactly `times` of its `steps` batches.

    Every set of `times` steps is equally likely, independently of the other samples and of other
    epochs. Pass it instead of a sample rate anywhere in fastclip.accounting. One entry
    (sigma, RandomAllocation(t, k), n) of a history is n whole epochs of t steps each, and sigma is the
    least noise multiplier of their steps. An epoch counts in full, even if it was interrupted.

    It is deliberately not a number, so an accountant that does not support it fails.

    Args:
        steps: t, the number of batches of an epoch, at least 1.
        times: k, how many of them contain a given sample, from 1 to t.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, or of another type.
    """

    steps: int
    times: int = 1

    def __post_init__(self) -> None:
        keep(self, steps=whole("steps", self.steps, 1), times=whole("times", self.times, 1))
        if self.times > self.steps:
            raise ArgumentError(
                f"times expects at most steps={self.steps}, got {self.times}. A sample can be in each "
                "batch of an epoch once."
            )

    def __mul__(self, joined: object) -> RandomAllocation:
        """Return itself for one epoch. Opacus multiplies a rate by the batches of a step.

        Raises:
            StepError: for several sampled batches in one step, for which no accounting is known.
        """
        return one_batch(self, joined, "batches of a random allocation")

    def blocks(self) -> dict[int, int]:
        """Return the blocks of steps of which each contains a sample once, {steps: blocks}.

        Formal guarantee: `times` of `steps` is at most as revealing as independent allocations to one
        step of each block. A uniformly random partition of the steps into blocks of these sizes, and
        one uniformly random step of each, is a uniformly random set of steps. Given the partition,
        which does not depend on the data, the likelihood ratio of the epoch is the product of those of
        the blocks, and so is that of a composition. The divergences of neighbors are jointly convex, so
        the average over partitions is not larger.

        Source: the argument above. PLD_accounting, the library of Feldman and Shenfeld 2026
        (arXiv 2602.17284), uses the same blocks.
        """
        size, larger = divmod(self.steps, self.times)
        found = {size: self.times - larger}
        return found | ({size + 1: larger} if larger else {})


# -------------------------------------------------------------------------------------------------
# The privacy loss of an epoch, from which each sample is in one step.

_EXCESS = 4e-4
"""Variance that a lattice may add to the sum of a level, relative to the square of its scale."""
_RATIO = 16.0
"""Largest ratio of the largest R_i of neighboring levels."""
_CAPPED = 1e-6
"""Probability of an R_i beyond the last level in the direction in which large ones hardly matter."""
_POINTS = 2**13
"""Points of the resulting losses."""
_MOST = 2**21
"""Points of a level. A coarser lattice is looser, never too small."""
_TURNS = 12
"""Number of tilts among which Chernoff's bounds are chosen."""
_VISIBLE, _ENOUGH = 1e3, 30.0
"""Mass in units of its rounding error above which it is visible, and rounding in units of `tail`."""
_ROUNDS = 8


class Law(NamedTuple):
    """Losses of an epoch with their masses under the first distribution of the pair, [point] each."""

    losses: np.ndarray
    masses: np.ndarray
    infinite: float
    """Mass of infinite losses."""

    def on_mesh(self, mesh: float) -> tuple[int, np.ndarray, float]:
        """Return losses at multiples of `mesh` that dominate these.

        Returns:
            (number of the first point, logarithm of the masses there [point], logarithm of the mass of
            infinite losses).
        """
        low = min(math.floor(self.losses[0] / mesh), -1)
        points = max(math.ceil(self.losses[-1] / mesh), 1) - low + 1
        masses = on_losses(self.losses, self.masses, mesh * low, mesh, points)
        with np.errstate(divide="ignore"):
            return low, np.log(masses), float(np.log(self.infinite))


@lru_cache(maxsize=64)
def epoch_law(sigma: float, steps: int, tail: float, added: bool) -> Law:
    """Return the losses of one epoch, in one direction.

    Formal guarantee: for each a >= 0 and for compositions, the losses dominate those of an epoch whose
    neighbors differ by one removed (or added, or zeroed) sample of sensitivity 1, up to the rounding of
    float64 in the masses of R_i (1e-12 of each). The rounding of a Fourier transform has a relative norm
    of at most epsilon log2(length), and is counted in addition, by Parseval and Cauchy-Schwarz.

    Args:
        sigma: noise multiplier.
        steps: t >= 2.
        tail: mass of unlikely events that counts as an infinite loss, several times.
        added: False for the loss log R under P, True for -log R under Q.
    """
    term = _Term(1 / sigma, steps, tail, added)
    low = term.at(ndtri_exp(math.log(tail) / steps))
    top = term.top()
    infinite = term.none_above(low) + term.any_above(top)
    count = max(math.ceil(math.log(top / low) / math.log(_RATIO)), 1)
    ratio = (top / low) ** (1 / count)
    losses, masses = [], []
    for number in range(count):
        level = _Level(term, low, low * ratio, last=number == count - 1)
        level.sum_up()
        losses += level.losses
        masses += level.masses
        infinite += level.infinite
        low = level.high
    return _evenly(np.concatenate(losses), np.concatenate(masses), infinite, tail)


class _Term:
    """The law of R_i in one direction.

    Args:
        spread: 1 / sigma, the standard deviation of log R_i.
        steps: t.
        tail: as in `epoch_law`.
        added: as in `epoch_law`.
    """

    def __init__(self, spread: float, steps: int, tail: float, added: bool) -> None:
        self.spread, self.steps, self.tail, self.added = spread, steps, tail, added

    def at(self, deviation: float) -> float:
        """Return R_i at a standard normal deviation of Q."""
        return math.exp(self.spread * (float(deviation) - self.spread / 2))

    def deviation(self, value: Any) -> Any:
        """Return the inverse of `at`. Under P it is less by `spread`."""
        with np.errstate(divide="ignore"):
            return np.log(value) / self.spread + self.spread / 2

    def top(self) -> float:
        """Return the largest R_i of the last level."""
        if self.added:
            return self.at(-ndtri_exp(math.log(_CAPPED / self.steps)))
        least = math.log(self.tail / 2)
        return self.at(
            max(self.spread - ndtri_exp(least), -ndtri_exp(least - math.log(self.steps)))
        )

    def none_above(self, value: float) -> float:
        """Return the probability that no R_i is above `value`."""
        z = self.deviation(value)
        if self.added:
            return math.exp(self.steps * log_ndtr(z))
        return math.exp((self.steps - 1) * log_ndtr(z) + log_ndtr(z - self.spread))

    def any_above(self, value: float) -> float:
        """Return a bound on the mass of an R_i above `value`. It is 0 if they are moved there."""
        if self.added:
            return 0.0
        z = self.deviation(value)
        return float(ndtr(self.spread - z) + (self.steps - 1) * ndtr(-z))

    def any_below(self, value: float) -> float:
        """Return a bound on the probability of an R_i below `value`."""
        return self.steps * float(ndtr(self.deviation(value))) if value else 0.0

    def mesh(self, value: float) -> float:
        """Return the mesh of a level whose largest R_i is above `value`.

        A lattice adds at most mesh^2 / 4 to the variance of R_i, mesh^2 / 6 for a smooth law, and at
        most mesh * E R_i.
        """
        z = self.deviation(value)
        mass, mean, square = (float(log_ndtr(z - k * self.spread)) for k in range(3))
        mean, square = math.exp(mean - mass), math.exp(square - mass + self.spread**2)
        narrow = min(self.spread, 1.0) ** 2
        scale = max(square - mean**2, narrow * mean**2 / 100) + narrow * value**2 / self.steps
        return min(max(math.sqrt(6 * _EXCESS * scale), _EXCESS * scale), value / 32)

    def in_cells(self, mesh: float, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the masses of the cells between points of a lattice that move down and up, [cell]."""
        z = self.deviation(mesh * np.arange(begin, end + 1))
        mass, mean = _between(z), _between(z - self.spread)
        up = np.clip(mean / mesh - np.arange(begin, end) * mass, 0.0, mass)
        return mass - up, up


class _Kind(NamedTuple):
    """Terms of one law: masses at the points of the lattice, of R_i up to `low` and above, [point]."""

    small: np.ndarray
    large: np.ndarray
    terms: int


class _Level:
    """Epochs whose largest R_i is in (low, high].

    Args:
        term: the law of R_i.
        low: largest R_i of the level below.
        high: about the largest R_i of this level.
        last: whether this is the last level.
    """

    def __init__(self, term: _Term, low: float, high: float, *, last: bool) -> None:
        self.term, self.low = term, low
        self.losses: list[np.ndarray] = []
        self.masses: list[np.ndarray] = []
        mesh = term.mesh(low)
        while True:
            below = math.ceil(low / mesh)
            self.mesh = low / below
            self._put_on_lattice(below, math.ceil(high / self.mesh), last=last)
            self._find_window()
            if self.length <= _MOST or below == 1:
                break
            mesh *= 2 * self.length / _MOST

    def _put_on_lattice(self, below: int, end: int, *, last: bool) -> None:
        term, mesh = self.term, self.mesh
        self.begin = math.floor(term.at(ndtri_exp(math.log(term.tail / term.steps))) / mesh)
        self.high = mesh * end
        down, up = term.in_cells(mesh, self.begin, end)
        border, points = below - self.begin, end - self.begin + 1
        small, large = np.zeros(points), np.zeros(points)
        small[:border] = down[:border]
        small[1 : border + 1] += up[:border]
        large[border:-1] = down[border:]
        large[border + 1 :] += up[border:]
        if term.added and last:  # a smaller R has a larger loss
            large[-1] += float(ndtr(-term.deviation(self.high)))
        self.kinds = [_Kind(small, large, term.steps)]
        if not term.added:  # one of the terms is size-biased
            values = mesh * np.arange(self.begin, end + 1)
            self.kinds = [
                _Kind(small, large, term.steps - 1), _Kind(small * values, large * values, 1)
            ]  # fmt: skip
        self.at = mesh * np.arange(points)  # relative to the first point

    def _find_window(self) -> None:
        """Choose a window of sums outside of which there is little mass, by Chernoff's bounds."""
        depth = -math.log(self.term.tail)
        with np.errstate(divide="ignore"):
            logs = [(np.log(kind.small + kind.large), kind.terms) for kind in self.kinds]
        mean = variance = self.moment = 0.0
        for log, count in logs:
            self.moment += count * float(logsumexp(log))
            mass = np.exp(log - logsumexp(log))
            center = float(mass @ self.at)
            mean += count * center
            variance += count * float(mass @ (self.at - center) ** 2)
        normal = math.sqrt(2 * depth / variance)
        self.turns = np.geomspace(min(1 / self.at[-1], normal / 20), 2 * normal, _TURNS)
        self.turns = np.concatenate([-self.turns[::-1], self.turns])
        self.bounds = np.array([
            sum(count * float(logsumexp(log + turn * self.at)) for log, count in logs)
            for turn in self.turns
        ])  # fmt: skip
        edges = (self.bounds + depth) / self.turns
        self.first = max(math.floor(edges[:_TURNS].max() / self.mesh), 0)
        self.length = math.ceil(edges[_TURNS:].min() / self.mesh) + 2 - self.first
        if self.length > 0:
            self.length = next_fast_len(self.length, real=True)

    def sum_up(self) -> None:
        """Sum the terms, and add the losses and masses of the level.

        Mass outside of the window wraps around into it. On the side of small losses it is counted there,
        at a larger loss. On the side of large losses it also counts as infinite. If rounding hides the
        tail of large losses, the tail is computed again with masses that are tilted towards it. The
        rounding up to there counts at its first point, which is again a larger loss.
        """
        term = self.term
        self.infinite = term.any_below(self.mesh * self.begin)
        if self.length <= 0 or self.moment < math.log(2 * term.tail):
            self.infinite += math.exp(self.moment)  # hardly any epoch
            return
        numbers = self.first + np.arange(self.length)
        if term.added:
            numbers = numbers[::-1]  # by growing loss
        edge = self.mesh * (numbers[-1] - (0 if term.added else -1))
        if edge > 0 or not term.added:
            self.infinite += math.exp(min((self.bounds - self.turns * edge)[self._outwards()]))
        masses, rounding = self._tilted(0.0, numbers)
        for _ in range(_ROUNDS):
            tails = np.cumsum(masses[::-1])[::-1]
            cut = int(np.searchsorted(-tails, -_VISIBLE * rounding))
            if rounding <= _ENOUGH * term.tail or not 0 < cut < len(numbers):
                break
            towards = (self.bounds - self.turns * self.mesh * numbers[cut])[self._outwards()]
            tilt = float(self.turns[self._outwards()][np.argmin(towards)])
            beyond, less = self._tilted(tilt, numbers[cut:])
            if not less < rounding / 2:
                break
            self._keep(numbers[: cut + 1], np.append(masses[:cut], rounding))
            numbers, masses, rounding = numbers[cut:], beyond, less
        self.infinite += rounding
        self._keep(numbers, masses)

    def _outwards(self) -> slice:
        """Return the tilts towards large losses."""
        return slice(None, _TURNS) if self.term.added else slice(_TURNS, None)

    def _tilted(self, tilt: float, numbers: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the masses of sums at points of the lattice, and the sum of their rounding errors."""
        unit = sys.float_info.epsilon * math.log2(2 * self.length)
        sums = Sums.of(self.length, 0)
        for kind in self.kinds:
            weights = np.exp(tilt * self.at - max(tilt * self.at[-1], 0.0))
            size = float(weights @ (kind.small + kind.large))
            small, large = kind.small * weights / size, kind.large * weights / size
            sums.moment += kind.terms * (math.log(size) + max(tilt * self.at[-1], 0.0))
            small[0] = -(small[1:].sum() + large.sum())  # minus 1
            sums.add_masses(
                wrapped(small, 0, self.length), wrapped(large, 0, self.length), kind.terms, unit
            )
        change, error = sums.change(unit, rare=True)
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp(sums.moment - tilt * self.mesh * numbers)
            masses = irfft(change, self.length)[numbers % self.length] * weights
            rounding = error * float(np.linalg.norm(weights))
        return np.maximum(masses, 0.0), rounding

    def _keep(self, numbers: np.ndarray, masses: np.ndarray) -> None:
        offset = self.begin * self.term.steps
        if self.term.added and offset + numbers[-1] == 0:
            self.infinite += float(masses[-1])
        kept = (masses > 0) & (offset + numbers > 0)
        losses = np.log(self.mesh / self.term.steps * (offset + numbers[kept]))
        self.losses.append(-losses if self.term.added else losses)
        self.masses.append(masses[kept])


def _between(z: np.ndarray) -> np.ndarray:
    """Return the mass of a standard normal variable between consecutive edges."""
    low, high = z[:-1], z[1:]
    right = low > 0  # by the nearer tail, whose digits are not lost
    return ndtr(np.where(right, -low, high)) - ndtr(np.where(right, -high, low))


def _evenly(losses: np.ndarray, masses: np.ndarray, infinite: float, tail: float) -> Law:
    """Return losses on even points. The `tail` of the largest is infinite, of the smallest larger."""
    order = np.argsort(losses)
    losses, masses = losses[order], masses[order]
    kept = np.cumsum(masses[::-1])[::-1] > tail
    infinite += float(masses[~kept].sum())
    losses, masses = losses[kept], masses[kept]
    start = float(losses[np.searchsorted(np.cumsum(masses), tail)])
    points = np.linspace(start, float(losses[-1]), _POINTS)
    mesh = float(points[1] - points[0])
    found = Law(points, on_losses(losses, masses, start, mesh, _POINTS), infinite)
    for values in found[:2]:
        values.setflags(write=False)
    return found
