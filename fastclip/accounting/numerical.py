"""Tight epsilon of composed Poisson-subsampled Gaussian steps, by their privacy loss distribution.

An epoch of random allocation is composed in the same way (fastclip.accounting.allocation).

The loss L = log P/Q of a step is put on a mesh whose points dominate it. The composition is a product
of Fourier transforms, and all truncated mass counts as delta. Epsilon is therefore an upper bound for
any mesh. The mesh only decides how tight it is, and is chosen from its error.

P is (1 - q) N(0, sigma^2) + q N(1, sigma^2) and Q is N(0, sigma^2) for a removed sample. For an added
sample P and Q are exchanged, and the loss changes its sign. Epsilon is the larger of the two.

Source: Koskela et al. 2020 (Fourier accountant); Doroshenko et al. 2022 (a mesh that dominates,
"connect the dots"); Zhu et al. 2022 (dominating pairs compose); Balle and Wang 2018 (q = 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.fft import next_fast_len
from scipy.optimize import brentq
from scipy.special import erf

from fastclip.accounting.allocation import Law, RandomAllocation, epoch_law
from fastclip.accounting.transforms import (
    Composition,
    Sums,
    gaussian_epsilon,
    gaussian_log_delta,
    log_difference,
    log_expm1,
    log_mass,
    logsumexp,
    rounding_unit,
    solved,
    total_at,
)
from fastclip.core.checks import between, positive

Sampling = float | RandomAllocation
"""Rate of Poisson sampling, or an allocation to one of several steps."""
Part = tuple[float, Sampling, int]
"""(noise multiplier, sampling, steps or epochs), summed up in any order."""

_TOLERANCE = 2e-4
"""Share of epsilon that the mesh may add by default."""
_NATURAL = 0.01
"""Share of 1 / |d log delta / d epsilon| below which the tolerance is relative to that share.

A relative change of delta by _TOLERANCE * _NATURAL moves epsilon by this tolerance."""
_CUT = math.log(1e-8)
"""Logarithm of the share of delta in single steps' largest losses, which count as infinite."""
_TAIL = math.log(1e-10)
"""Logarithm of the tilted mass on either side of the window of the composition."""
_MOST_POINTS, _MOST_OF_A_STEP = 2**19, 2**19
"""Points of the window and of one step, 120 MB in all. A coarser mesh is looser, never too small."""
_NODES = 1024
"""Nodes of the quadrature that plans a mesh. The result's guarantee does not depend on it."""
_RATIO = 1.3
"""Ratio of neighboring tilts among which a plan chooses."""
_TURNS = 16
"""Number of tilts among which Chernoff's bounds are chosen."""
_ROUNDING = 1e-9
"""Rounding of float64 per step of a composition (1e-14), over the share of delta it may be (1e-5)."""
_ROUNDS = 8
_MANY = 32
"""Number of parts above which ten times _TOLERANCE, and _MERGED, are allowed."""
_MERGED = 0.008
"""Share of epsilon that merging steps of similar noise may add, if there are many parts."""
_LOST_IN_EPOCHS = 1e-5
"""Share of delta in large losses of random allocations, which count as infinite."""
_LEAST_OF_EPOCHS = 0.25
"""Least noise for which a random allocation is more private than a full batch per epoch, in effect."""
_SEPARATE, _PLANS = 4, 8
"""Number of parts up to which their transforms are kept for the next step, and of plans kept."""
_MINOR = 0.85
"""Share of the first direction's epsilon up to which the second does not matter."""
_LOOSE = math.log(3e-3)
"""Logarithm of the share of delta that may be rounding in a plan for more steps."""
_LARGEST, _POINTS = 500.0, 1000
"""The largest epsilon of a profile, whose exponential is still finite, and their number."""
_LARGE_DELTA = 0.01
"""The delta for which the second mesh of a profile is chosen."""
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 1e-3, 1e7, 1e-30
"""Limits of float64's precision. Beyond them epsilon is that of a full batch, of this noise, or of this
rate, which are upper bounds."""


def numerical_epsilon(
    history: Iterable[tuple[float, Any, int]],
    delta: float,
    *,
    eps_error: float | None = None,
    delta_error: float | None = None,
) -> float:
    """Return epsilon of a history of Poisson-subsampled Gaussian steps.

    Formal guarantee: at least the tight epsilon for neighbors that differ by one added or removed
    sample, up to float64's rounding (1e-9 of it). The excess follows from the first-order estimate by
    which the mesh is chosen, 0.02 % by default (1 % for more than 32 different steps). The largest
    measured excess is 0.3 % for epsilons from 1e-5 to 100 (bench.accountants). Beyond 100, or if the
    mesh would need more than half a million points, the upper bound may be looser. It is at most that of
    full batches.

    Args:
        history: (noise multiplier, sampling rate in (0, 1], steps) entries, all multipliers positive.
        delta: in (0, 1).
        eps_error: how far the mesh may raise epsilon, by default 0.02 % of it.
        delta_error: part of delta that may count as an infinite loss, by default 1e-8 of delta. Random
            allocations may add about 1e-4 of delta.

    Returns:
        epsilon, or 0 if delta covers the run.

    Raises:
        ArgumentError, ArgumentTypeError: for an option out of range.
    """
    error = None if eps_error is None else positive("eps_error", eps_error)
    log_cut = math.log(delta) + _CUT
    if delta_error is not None:
        log_cut = math.log(min(between("delta_error", delta_error, 0, delta), delta / 10))
    parts, variation = _parts(history)
    if any(isinstance(rate, RandomAllocation) for _, rate, _ in parts):
        log_cut = min(log_cut, math.log(delta) + _CUT)
    if variation <= delta:
        return 0.0
    if _is_gaussian(parts):
        return gaussian_epsilon(1 / parts[0][0], delta)
    return _numerical_epsilon(parts, delta, error, log_cut)


def numerical_profile(
    history: Iterable[tuple[float, Any, int]], delta: float
) -> list[tuple[float, float]]:
    """Return the privacy profile of a history: pairs (epsilon, delta) from epsilon 0 on.

    Formal guarantee: that of `numerical_epsilon` for every pair, on meshes for two deltas.

    Args:
        history: as for `numerical_epsilon`.
        delta: in (0, 1), about the smallest delta of the profile.
    """
    parts, variation = _parts(history)
    if variation <= delta:
        return [(0.0, variation)]
    return [(0.0, variation), *_numerical_profile(parts, delta)]


def _parts(history: Iterable[tuple[float, Any, int]]) -> tuple[tuple[Part, ...], float]:
    """Return the different steps, all full batches as one, and a bound on the total variation."""
    totals: Counter[tuple[float, Sampling]] = Counter()
    shared = 0.0  # logarithm of the mass that neighbors share, at least
    for sigma, rate, steps in history:
        for part, count in samplings(sigma, rate):
            if not isinstance(part, RandomAllocation):
                part = max(part, _LEAST_RATE) if sigma >= _LEAST_NOISE else 1.0
            shared += steps * count * math.log1p(-min(_variation(sigma, part), 1 - 1e-15))
            totals[min(sigma, _MOST_NOISE), part] += steps * count
    if len(totals) > _MANY:
        totals = _merged(totals)
    parts = [(sigma, rate, steps) for (sigma, rate), steps in totals.items() if rate != 1]
    # Full batches are one Gaussian mechanism, exactly.
    full = math.hypot(*(steps**0.5 / sigma for (sigma, rate), steps in totals.items() if rate == 1))
    if full:
        parts.append((1 / full, 1.0, 1))
    parts.sort(key=lambda part: (part[0], _rank(part[1])))
    return tuple(parts), min(-math.expm1(shared) * (1 + 1e-12), 1.0)


def _is_gaussian(parts: tuple[Part, ...]) -> bool:
    return len(parts) == 1 and parts[0][1] == 1


def samplings(sigma: float, rate: Any) -> Iterator[tuple[Any, int]]:
    """Yield the samplings whose composition is one step or epoch, and how often each occurs."""
    if not isinstance(rate, RandomAllocation):
        yield rate, 1
        return
    for size, count in rate.blocks().items():
        yield (RandomAllocation(size) if size > 1 and sigma >= _LEAST_OF_EPOCHS else 1.0), count


def _variation(sigma: float, rate: Sampling) -> float:
    """Return a number that is at least the total variation of a step or an epoch."""
    whole = float(erf(8**-0.5 / sigma))
    if not isinstance(rate, RandomAllocation):
        return rate * whole
    return min(whole, math.sqrt(math.expm1(sigma**-2) / rate.steps) / 2)  # by the variance


def _rank(rate: Sampling) -> float:
    """Return a number by which samplings are sorted."""
    return 1.0 + rate.steps if isinstance(rate, RandomAllocation) else rate


def _merged(totals: Counter[tuple[float, Sampling]]) -> Counter[tuple[float, Sampling]]:
    """Merge steps of one rate and similar noise, counted at the least noise among them.

    Epsilon remains an upper bound, because it falls with the noise. It grows about as
    sigma^-(1 + sigma^-2) for small rates, so this adds at most _MERGED to it.
    """
    found: Counter[tuple[float, Sampling]] = Counter()
    least, last = math.inf, cast("Sampling", math.nan)
    for sigma, rate in sorted(totals, key=lambda part: (_rank(part[1]), part[0])):
        if rate != last or sigma > least * (1 + _MERGED / (1 + least**-2)):
            least, last = sigma, rate
        found[least, rate] += totals[sigma, rate]
    return found


@lru_cache(maxsize=1024)
def _numerical_epsilon(
    parts: tuple[Part, ...], delta: float, error: float | None, log_cut: float
) -> float:
    """Return epsilon of the parts, cached because runs and searches repeat the same request."""
    log_delta = math.log(delta)
    # No more than if every batch were full.
    full = gaussian_epsilon(_full_batches(parts), delta)
    found = None
    if len(parts) <= _SEPARATE:
        ahead = tuple((sigma, rate, _ahead(steps)) for sigma, rate, steps in parts)
        planned = _plan(ahead, delta, error, log_cut)
        found = planned.after([steps for _, _, steps in parts], log_delta)
    if found is None:
        found = _plan(parts, delta, error, log_cut).epsilon
    return min(found, full)


def _ahead(steps: int) -> int:
    """Round a number of steps up by at most a third, so a run needs few plans."""
    unit = 1 << max(steps.bit_length() - 2, 0)
    return -(-steps // unit) * unit


class _Plan(NamedTuple):
    """Compositions of a run in both directions, which give epsilon for any numbers of steps."""

    epsilon: float
    removed: list[Composition]
    added: list[Composition]
    fine: bool
    """Whether the second direction is as tight as the first. Otherwise it is known to matter less."""

    def after(self, steps: Sequence[int], log_delta: float) -> float | None:
        """Return epsilon after these numbers of steps of the parts, or None if it needs another plan.

        It is an upper bound for any numbers, and tight for those that are not much smaller than planned.
        """
        if self.epsilon == math.inf:
            return None
        found = []
        for way in (self.removed, self.added):
            curves = [one.curve(steps) for one in way]
            reached = solved(curves, log_delta)
            if reached is None or any(
                curve.loose(reached[0]) > log_delta + _LOOSE for curve in curves
            ):
                return None
            found.append(reached[0])
        removed, added = found
        return max(removed, added) if self.fine or added <= removed else None


@lru_cache(maxsize=_PLANS)
def _plan(
    parts: tuple[Part, ...], delta: float, error: float | None, log_cut: float
) -> _Plan:  # fmt: skip
    """Return the compositions of the parts, cached because the next step of a run needs the same."""
    removed, added, reach = _both_ways(parts, log_cut)
    found, first = _one_way(parts, removed, False, reach, math.log(delta), error, 0.0)
    if found == math.inf:
        return _Plan(math.inf, [], [], False)
    other, second = _one_way(parts, added, True, reach, math.log(delta), error, found)
    return _Plan(max(found, other), first, second, other > _MINOR * found)


def _both_ways(parts: tuple[Part, ...], log_cut: float) -> tuple[_Losses, _Losses, float]:
    """Return the losses for a removed and for an added sample, and how far outcomes reach."""
    count = sum(steps for _, _, steps in parts)
    # At most exp(-z^2 / 2) of a Gaussian is beyond z.
    reach = math.sqrt(2 * (math.log(count) - log_cut))
    few = max(_NODES // max(len(parts) // 64, 1), 256)
    removed, added = (_planned(parts, reach, few, added) for added in (False, True))
    return removed, added, reach


@lru_cache(maxsize=64)
def _numerical_profile(parts: tuple[Part, ...], delta: float) -> tuple[tuple[float, float], ...]:
    """Return the profile of the parts, cached because a report and its picture ask for the same."""
    mu = _full_batches(parts)
    top = min(gaussian_epsilon(mu, delta), _LARGEST)
    grid = (top * np.linspace(0, 1, _POINTS) ** 2).tolist()
    pairs = [(eps, math.exp(gaussian_log_delta(eps, mu)) * (1 + 1e-9)) for eps in grid]
    if _is_gaussian(parts):
        return tuple(pairs)
    counts = [steps for _, _, steps in parts]
    for level in (
        delta,
        max(delta, _LARGE_DELTA),
    ):  # the mesh of a small delta is coarse at epsilon 0
        removed, added, reach = _both_ways(parts, math.log(level) + _CUT)
        found, first = _one_way(parts, removed, False, reach, math.log(level), None, 0.0)
        other, second = _one_way(parts, added, True, reach, math.log(level), None, 0.0)
        if not first or not second:  # full batches are known, and nothing finer
            continue
        ways = [[one.curve(counts).everywhere() for one in way] for way in (first, second)]
        top = min(top, max(found, other))
        for eps in (top * np.linspace(0, 1, _POINTS) ** 2).tolist():
            log = max(total_at(curves, eps) for curves in ways)
            pairs += [(eps, math.exp(log))] if log < 0 else []
    return tuple(pairs)


def _full_batches(parts: tuple[Part, ...]) -> float:
    """Return mu of the run if every batch were full, which has no less cost."""
    return math.hypot(*(steps**0.5 / sigma for sigma, _, steps in parts))


def _loss(at: np.ndarray, sigma: float, rate: float) -> np.ndarray:
    """Return log(1 - q + q exp(u)) at the outcomes x, where u = (2 x - 1) / (2 sigma^2)."""
    ratio = (2 * at - 1) / (2 * sigma**2)
    if rate == 1:
        return ratio
    small = np.log1p(rate * np.expm1(np.minimum(ratio, 1.0)))  # keeps the digits of a small rate
    return np.where(ratio < 1, small, np.logaddexp(math.log1p(-rate), math.log(rate) + ratio))


def _log_ratio(losses: np.ndarray, rate: float) -> np.ndarray:
    """Return u at which the loss has these values, or -inf if the loss is larger everywhere."""
    if rate == 1:
        return losses
    with np.errstate(divide="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1.0)) / rate, -1.0))
    large = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, small, large)


def _quadrature(
    sigma: float, rate: float, reach: float, nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return losses of a step and the logarithms of their mass under P and under Q, [node] each."""
    at = np.linspace(-reach * sigma, 1 + reach * sigma, nodes)
    out = -((at / sigma) ** 2) / 2
    out -= logsumexp(out)
    loss = _loss(at, sigma, rate)
    inside = out + loss
    return loss, inside - logsumexp(inside), out


def _planned(parts: tuple[Part, ...], reach: float, nodes: int, added: bool) -> _Losses:
    """Return the losses of all parts in one direction on a quadrature."""
    losses, weights = [], []
    for sigma, rate, _ in parts:
        if isinstance(rate, RandomAllocation):
            found, masses, _ = _law(sigma, rate, reach, added)
            masses = masses.reshape(nodes, -1).sum(-1)
            with np.errstate(divide="ignore"):
                weights.append(np.log(masses / masses.sum()))
            losses.append(found.reshape(nodes, -1).mean(-1))
            continue
        loss, inside, out = _quadrature(sigma, rate, reach, nodes)
        losses.append(-loss if added else loss)
        weights.append(out if added else inside)
    steps = np.array([float(steps) for _, _, steps in parts])
    return _Losses(steps, np.stack(losses), np.stack(weights))


def _law(sigma: float, rate: RandomAllocation, reach: float, added: bool) -> Law:
    """Return the losses of an epoch, of which a negligible share of delta counts as infinite.

    The share is rounded to a power of ten, because a longer run then finds the same law in the cache.
    """
    log_tail = math.log(_LOST_IN_EPOCHS) - _CUT - reach**2 / 2
    return epoch_law(sigma, rate.steps, 10.0 ** math.floor(log_tail / math.log(10)), added)


class _Losses:
    """Losses of all parts in one direction on a quadrature, by which a mesh is planned.

    K is the logarithm of the composition's moment generating function. "Tilted" means weighted by
    exp(tilt L).
    """

    def __init__(self, steps: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> None:
        self.steps, self.losses, self.weights = steps, losses, weights
        self.range = float(np.ptp(losses))
        self.widest = float(np.abs(losses).max())
        spread = max(self._spread(self._mass(0.0)), 1e-9 * self.widest)
        least, largest = min(1e-5 / spread, 0.01 / self.widest), 1e3 / spread
        count = math.ceil(math.log(largest / least, _RATIO))
        self.tilts = np.geomspace(least, largest, count)
        self.curve = np.array([self.steps @ self._generating(tilt) for tilt in self.tilts])

    def _generating(self, tilt: float) -> np.ndarray:
        found: np.ndarray = logsumexp(self.weights + tilt * self.losses)
        return found

    def first_tilt(self, log_delta: float) -> tuple[float, float]:
        """Return (tilt, epsilon) of the best Renyi bound (Balle et al. 2020, Theorem 21)."""
        tilts, curve = self.tilts, self.curve
        bounds = (curve - log_delta - np.log1p(tilts)) / tilts + np.log(tilts / (1 + tilts))
        best = int(np.argmin(bounds))
        return float(tilts[best]), float(bounds[best])

    def tilt_for(self, loss: float, log_hidden: float) -> float:
        """Return the least tilt at which float64 does not hide delta at this loss, or the best one.

        A smaller tilt makes a narrower window, with few large losses.

        Args:
            loss: epsilon.
            log_hidden: logarithm of delta over the rounding of float64 in a mass of 1.
        """
        weight = self.curve - self.tilts * loss
        quiet = np.flatnonzero(weight <= log_hidden)
        return float(self.tilts[quiet[0] if len(quiet) else np.argmin(weight)])

    def upto(self, bulk: float) -> _Losses:
        """Return the losses up to `bulk`."""
        weights = np.where(self.losses > bulk, -math.inf, self.weights)
        return _Losses(self.steps, self.losses, weights)

    def rarely_above(self, mass: float) -> float:
        """Return a loss that a step of the run exceeds with a probability of at most `mass`."""
        shares = (self._mass(0.0) * self.steps[:, None]).ravel()
        order = np.argsort(-self.losses.ravel())
        beyond = int(np.searchsorted(np.cumsum(shares[order]), mass))
        return float(self.losses.ravel()[order[min(beyond, len(order) - 1)]])

    def window(self, tilt: float, log_delta: float) -> tuple[float, float, float]:
        """Return (lowest loss, highest loss, tilt of Chernoff's bound above it).

        Little mass is outside of this window, tilted or not.
        """
        spread = self._spread(self._mass(tilt))
        here = self.steps @ self._generating(tilt)

        def bound(turn: float) -> float:
            return float(self.steps @ self._generating(tilt + turn) - here - _TAIL) / turn

        # The best tilt for a normal loss is in the middle, and for a few large losses at the lower end.
        normal = math.sqrt(-2 * _TAIL) / max(spread, 1e-9 * self.widest)
        turns = np.geomspace(min(1 / self.widest, 0.05 * normal), 2 * normal, _TURNS)
        highs = [bound(turn) for turn in turns]
        best = int(np.argmin(highs))
        high, beyond = highs[best], tilt + float(turns[best])
        tails = (self.curve - log_delta - _CUT) / self.tilts
        if float(tails.min()) > high:
            high, beyond = float(tails.min()), float(self.tilts[np.argmin(tails)])
        return max(bound(-turn) for turn in turns), high, beyond

    def _mass(self, tilt: float) -> np.ndarray:
        """Return the mass of each part's tilted loss, [part, node]."""
        mass = self.weights + tilt * self.losses
        found: np.ndarray = np.exp(mass - logsumexp(mass, keepdims=True))
        return found

    def _spread(self, mass: np.ndarray) -> float:
        """Return the standard deviation of the composition."""
        mean = (mass * self.losses).sum(-1, keepdims=True)
        return math.sqrt(float(self.steps @ (mass * (self.losses - mean) ** 2).sum(-1)))

    def mesh(self, tilt: float, error: float) -> float:
        """Return the mesh that raises epsilon by `error`, to first order.

        A loss between two points l and l' of the mesh moves to one of them. K then grows by
        tilt (tilt + 1) / 2 E[(L - l) (l' - L)], where the expectation is h^2 / 6, or h |L| around 0.
        Epsilon grows by this over tilt.
        """
        allowed = 2 * error / (1 + tilt)
        mass = self._mass(tilt) * self.steps[:, None]
        sizes = np.abs(self.losses)

        def excess(log_mesh: float) -> float:
            mesh = math.exp(log_mesh)
            return float((mass * np.minimum(mesh**2 / 6, mesh * sizes)).sum()) / allowed - 1

        # Between two points delta is treated as linear, with a relative error of slope^2 h^2 / 8.
        most = math.log(8 * error / (1 + tilt)) / 2
        if excess(most) <= 0:
            return math.exp(most)
        least = math.log(6 * allowed / float(self.steps.sum())) / 2 - 1
        return math.exp(brentq(excess, least, most, xtol=0.01))


def _one_way(
    parts: tuple[Part, ...], losses: _Losses, added: bool, reach: float, log_delta: float,
    error: float | None, least: float,
) -> tuple[float, list[Composition]]:  # fmt: skip
    """Return (epsilon, compositions) in one direction. Epsilon is inf if float64 carries none.

    It is not tight if it is far below `least`.

    delta is the sum of two parts, from compositions without a large loss and from those with one. The
    rounding of the second is small relative to its own small mass, and the first has no tail to hide.
    Meshes are chosen from Renyi's bound, and refined until epsilon is stable.
    """
    rounding = log_delta - math.log(_ROUNDING * float(losses.steps.sum()))
    bulk = math.inf
    if rounding < 0 and not added:  # an added sample's losses are small
        bulk = max(losses.rarely_above(math.exp(rounding) / 4), 0.0)
    kinds = [(losses.upto(bulk), False, rounding)]
    if bulk < math.inf:
        kinds.append((losses, True, math.inf))
    tolerance = _TOLERANCE if len(parts) <= _MANY else 10 * _TOLERANCE
    slope, found = losses.first_tilt(log_delta)
    best, mesh, further = math.inf, math.inf, 0.0
    kept: list[Composition] = []
    for attempt in range(_ROUNDS):
        scale = max(found, least, _NATURAL / slope)
        # The first order of the mesh's error ends at about a tenth.
        wanted = min(error / 2, 0.1 * scale) if error else tolerance * scale
        if not attempt:  # the second direction seldom matters, so a coarse mesh may do
            wanted = max(wanted, 0.1 * least)
        tilts = [plan.tilt_for(found, hidden) for plan, _, hidden in kinds]
        windows = [kinds[k][0].window(tilt, log_delta) for k, tilt in enumerate(tilts)]
        widest = max(high - low for low, high, _ in windows) * (1 + further)
        windows = [(low, high + (high - low) * further, turn) for low, high, turn in windows]
        finest = max(widest / _MOST_POINTS, losses.range / _MOST_OF_A_STEP)
        needed = max(finest, min(plan.mesh(slope, wanted) for plan, _, _ in kinds))
        coarse, mesh = mesh > 1.2 * needed, max(min(needed, mesh / 2), finest)
        composed = [
            _composed(parts, added, reach, mesh, window, tilt, bulk, rare=rare)
            for (_, rare, _), tilt, window in zip(kinds, tilts, windows, strict=True)
        ]
        curves = [one.curve([steps for _, _, steps in parts]) for one in composed]
        before, now = found, solved(curves, log_delta)
        if now is not None:
            found, slope = now[0], now[1] or slope
            if found <= best:
                best, kept = found, composed
            if best <= _MINOR * least or (not coarse and abs(before - found) <= 2 * wanted):
                break
            if mesh <= 1.2 * finest:
                break
        else:  # delta is larger in the whole window, because the mesh widened the losses too much
            mesh, further = mesh / 4, 2 * further + 1
    return best, kept


def _composed(
    parts: tuple[Part, ...], added: bool, reach: float, mesh: float,
    window: tuple[float, float, float], tilt: float, bulk: float, *, rare: bool,
) -> Composition:  # fmt: skip
    """Return the composition at the points of a mesh in a window of losses.

    Args:
        window: lowest and highest loss, and the tilt of Chernoff's bound.
        bulk: losses above it are rare.
        rare: compositions with a rare loss if True, those without if False.
    """
    first, last = math.floor(window[0] / mesh) - 2, math.ceil(window[1] / mesh) + 8
    length = next_fast_len(last - first + 1, real=True)
    bounds = window[2] / np.array([1.0, 4.0])
    separate = len(parts) <= _SEPARATE
    kept: list[Sums] = []
    for sigma, rate, steps in parts:
        if separate or not kept:
            kept.append(Sums.of(length, len(bounds)))
        count = 1 if separate else steps
        begin, masses, lost = _step_on_mesh(sigma, rate, reach, mesh, added)
        kept[-1].add(
            begin, masses.copy(), count, mesh, tilt, bulk, bounds, rounding_unit(length), rare=rare
        )
        if rare or bulk == math.inf:
            kept[-1].infinite += count * math.exp(lost)
    at = mesh * np.arange(length)
    weights = np.exp(-tilt * at) * -np.expm1(-at)
    return Composition(kept, first, length, mesh, tilt, weights, bounds, rare)


@lru_cache(maxsize=1)  # both parts of a delta use it
def _step_on_mesh(
    sigma: float, rate: Sampling, reach: float, mesh: float, added: bool
) -> tuple[int, np.ndarray, float]:
    """Return a pair on the points of a mesh that dominates the pair of one step.

    Outcomes with losses between two points are split between both, with unchanged mass under P and
    under Q. The likelihood ratio then varies more around the same mean, so every delta grows.

    Returns:
        (number of the first point, logarithm of the masses there [point], logarithm of the mass of
        infinite losses), under P. If `added`, under Q and for the negated losses.
    """
    if isinstance(rate, RandomAllocation):
        return _law(sigma, rate, reach, added).on_mesh(mesh)
    lowest, highest = _loss(np.array([-reach * sigma, 1 + reach * sigma]), sigma, rate) / mesh
    low, high = min(math.floor(lowest), -1), max(math.ceil(highest), 1)
    points = mesh * np.arange(low, high + 1)
    ratios = _log_ratio(points, rate)  # u at the edges of the bins, [point]
    edges = np.concatenate([[-math.inf], sigma**2 * ratios + 0.5, [math.inf]]) / sigma
    out, inside = log_mass(edges), log_mass(edges - 1 / sigma)  # [point + 1], of N(0,.), N(1,.)
    # Under P, for each bin: the mass that goes to its upper point, and to its lower one.
    least = math.log1p(-rate) if rate < 1 else -math.inf  # no loss is smaller
    up = np.logaddexp(
        math.log(rate) + log_difference(inside[1:], out[1:] + ratios),
        out[1:] + log_difference(np.full(len(points), least), points),
    )
    down = math.log(rate) + log_difference(out[:-1] + ratios, inside[:-1])
    infinite, nothing = up[-1], down[0] - points[0]
    masses = np.full(len(points), -math.inf)
    masses[1:] = up[:-1] - math.log(-math.expm1(-mesh))
    masses[:-1] = np.logaddexp(masses[:-1], down[1:] - log_expm1(mesh))
    masses[-1] = np.logaddexp(masses[-1], out[-1] + points[-1])
    below = np.logaddexp(out[0] + least, math.log(rate) + inside[0])
    masses[0] = np.logaddexp(masses[0], below)
    if added:
        return -high, (masses - points)[::-1].copy(), float(nothing)
    return low, masses, float(infinite)
