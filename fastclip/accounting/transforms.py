"""Sums of many independent losses: by Fourier transforms with bounds on rounding, or in closed form."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.fft import irfft, rfft
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

_DEAD = -50.0
"""Logarithm of a characteristic function below which it is far below float64's rounding of 1."""


@dataclass
class Sums:
    """Sums over the steps of a composition: logarithms of transforms, and their errors."""

    exponent: np.ndarray
    """Logarithm of the characteristic function of the tilted losses."""
    more: np.ndarray
    """Addition of rare losses to the exponent."""
    doubt: np.ndarray
    """Rounding error of the exponent in float64."""
    rare_doubt: np.ndarray
    """Rounding error of `more`, beyond that of the exponent."""
    whole_doubt: np.ndarray
    """Rounding error of their sum."""
    above: np.ndarray
    """Logarithms of the moments of Chernoff's bound on the mass above the window."""
    length: int
    moment: float = 0.0
    infinite: float = 0.0

    @classmethod
    def of(cls, length: int, bounds: int) -> Sums:
        size = length // 2 + 1
        complexes, floats = (np.zeros(size, dtype=kind) for kind in (complex, float))
        return cls(
            complexes, complexes.copy(), floats, floats.copy(), floats.copy(), np.zeros(bounds), length
        )  # fmt: skip

    @classmethod
    def of_steps(cls, steps: Sequence[Sums], counts: Sequence[int], *, rare: bool) -> Sums:
        """Return the sums of `counts` steps of each kind, from those of one step."""
        first = steps[0]
        found = cls.of(first.length, len(first.above))
        for one, count in zip(steps, counts, strict=True):
            found.exponent += count * one.exponent
            found.doubt += count * one.doubt
            if rare:
                found.more += count * one.more
                found.rare_doubt += count * one.rare_doubt
                found.whole_doubt += count * one.whole_doubt
            found.above += count * one.above
            found.moment += count * one.moment
            found.infinite += count * one.infinite
        return found

    def add(
        self, begin: int, masses: np.ndarray, steps: int, mesh: float, tilt: float, bulk: float,
        bounds: np.ndarray, unit: float, *, rare: bool,
    ) -> None:  # fmt: skip
        """Add `steps` steps with these log masses, of which the first is at mesh point `begin`."""
        at = mesh * np.arange(begin, begin + len(masses))
        large = at > bulk
        if not rare:
            masses[large] = -math.inf
        for number, turn in enumerate(bounds):
            self.above[number] += steps * float(logsumexp(masses + turn * at))
        masses += tilt * at
        size = float(logsumexp(masses))
        self.moment += steps * size
        masses = np.exp(masses - size)
        # zero losses are often nearly all of the mass, and would hide the rest
        masses[-begin] = 0
        masses[-begin] = -masses.sum()
        tail = wrapped(np.where(large, masses, 0.0), begin, self.length)
        masses = wrapped(np.where(large, 0.0, masses), begin, self.length)
        self.add_masses(masses, tail if rare else None, steps, unit)

    def add_masses(
        self, masses: np.ndarray, tail: np.ndarray | None, steps: int, unit: float
    ) -> None:
        """Add `steps` steps with these masses, and rare ones if they are wanted, [length] each.

        Args:
            masses: masses of the losses that are not rare, minus 1 at a loss of zero.
            tail: masses of rare losses.
            steps: number of steps.
            unit: rounding of a transform relative to its norm.
        """
        change = rfft(masses)
        size_of = np.maximum(np.abs(1 + change), 1e-300)
        norm = float(np.linalg.norm(masses))
        self.exponent += steps * log1p(change)
        self.doubt += steps * unit * (norm / size_of + np.abs(change))
        if tail is not None:
            found, other = rfft(tail), float(np.linalg.norm(tail))
            whole = np.maximum(np.abs(1 + change + found), 1e-300)
            self.more += steps * log1p(found / np.where(size_of > 1e-300, 1 + change, 1e-300))
            self.rare_doubt += steps * unit * (other + np.abs(found)) / whole
            self.whole_doubt += steps * unit * ((norm + other) / whole + 1)

    def change(self, unit: float, *, rare: bool) -> tuple[np.ndarray, float]:
        """Return the characteristic function minus 1, or the change by rare losses, and its error.

        The error is that of its inverse transform, the norm over all points (Parseval).
        """
        exponent, more, dead = self.exponent, self.more, 0.0 if rare else -1.0
        found = np.full(len(exponent), dead, dtype=complex)
        if rare:
            grown = (exponent + more).real
            live = np.flatnonzero(np.maximum(exponent.real, grown) > _DEAD)
            exponent, more = exponent[live], more[live]
            small = more.real < 1
            found[live] = np.where(
                small, np.exp(exponent) * expm1(np.where(small, more, 0)),
                np.exp(exponent + more) - np.exp(exponent),
            )  # fmt: skip
            # Either relative to the rare losses, or of the difference of both transforms.
            whole, without = np.exp(grown), np.exp(self.exponent.real)
            doubt = np.minimum(
                np.abs(found) * self.doubt + whole * self.rare_doubt,
                whole * self.whole_doubt + without * self.doubt,
            )
        else:
            live = np.flatnonzero(exponent.real > _DEAD)
            found[live] = expm1(exponent[live])
            doubt = np.exp(exponent.real) * self.doubt
        error = float(np.linalg.norm(doubt)), unit * float(np.linalg.norm(found))
        return found, math.hypot(*error) / math.sqrt(len(found))


def logsumexp(logs: np.ndarray, *, keepdims: bool = False) -> np.ndarray:
    """Return log(sum(exp(logs))) over the last axis. SciPy's takes ten times as long for few points."""
    most = np.maximum(logs.max(-1, keepdims=True), -1e300)
    with np.errstate(divide="ignore"):
        found: np.ndarray = most + np.log(np.exp(logs - most).sum(-1, keepdims=True))
    return found if keepdims else found[..., 0]


def log1p(change: np.ndarray) -> np.ndarray:
    """Return log(1 + z), with all digits of a small z, unlike NumPy's log1p."""
    size = np.abs(change)
    small = np.where(size < 0.5, change, 0)
    near = np.log1p(small.real * (2 + small.real) + small.imag**2) / 2
    far = np.log(np.maximum(np.abs(1 + change), 1e-300))
    found: np.ndarray = np.where(size < 0.5, near, far) + 1j * np.angle(1 + change)
    return found


def log_expm1(positive: float) -> float:
    return positive + math.log(-math.expm1(-positive)) if positive > 0 else -math.inf


def expm1(exponent: np.ndarray) -> np.ndarray:
    """Return exp(z) - 1, with all digits of a small z."""
    real, imag = exponent.real, exponent.imag
    turned = np.expm1(real) * np.cos(imag) - 2 * np.sin(imag / 2) ** 2
    found: np.ndarray = turned + 1j * np.exp(real) * np.sin(imag)
    return found


def wrapped(masses: np.ndarray, begin: int, length: int) -> np.ndarray:
    """Return masses at points from `begin` on, each added at its number modulo `length`, [length]."""
    begin %= length
    rows = -(-(begin + len(masses)) // length)
    padded = np.zeros(rows * length)
    padded[begin : begin + len(masses)] = masses
    found: np.ndarray = padded.reshape(rows, length).sum(0)
    return found


def log_mass(edges: np.ndarray) -> np.ndarray:
    """Return the log mass of a standard normal variable between consecutive edges."""
    low, high = edges[:-1], edges[1:]
    right = low > 0  # by the nearer tail, whose digits are not lost
    near = log_ndtr(np.where(right, -low, high))
    return log_difference(near, log_ndtr(np.where(right, -high, low)))


def log_difference(large: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Return log(exp(large) - exp(small)), or -inf if the difference is only rounding."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: np.ndarray = large + np.log(-np.expm1(np.minimum(small - large, 0.0)))
    return np.where(np.isneginf(large), -math.inf, found)


def on_losses(
    losses: np.ndarray, masses: np.ndarray, start: float, mesh: float, points: int
) -> np.ndarray:
    """Return masses at the points start, start + mesh, ..., which dominate these, [point].

    The mass of a loss is split between its two neighbors, with unchanged mass under both distributions.
    A loss below `start` becomes `start`.

    Source: Doroshenko et al. 2022 ("connect the dots").
    """
    places = np.maximum(losses - start, 0.0)
    cells = np.minimum((places / mesh).astype(np.int64), points - 2)
    up = np.clip(np.expm1(mesh * cells - places) / math.expm1(-mesh), 0.0, 1.0) * masses
    return np.bincount(cells, masses - up, points) + np.bincount(cells + 1, up, points)


class Curve:
    """log delta of a composition at epsilons `first` * mesh, (`first` + 1) * mesh, ..., falling.

    Args:
        composition: its window, mesh and tilt.
        masses: tilted masses at the points of the mesh, [length].
        moment: logarithm by which they are multiplied.
        hidden: logarithm of their rounding, which is tilted as they are.
        outside: logarithm of the mass of infinite losses.
    """

    def __init__(
        self, composition: Composition, masses: np.ndarray, moment: float, hidden: float,
        outside: float,
    ) -> None:  # fmt: skip
        self.first, self.mesh, self.length = composition.first, composition.mesh, len(masses)
        self._tilt, self._weights = composition.tilt, composition.weights
        self._masses, self._moment = masses, moment
        self._hidden, self._outside = hidden, outside
        self._known: Any = {}

    def everywhere(self) -> Curve:
        """Compute log delta at all points at once and return the curve, for many epsilons."""
        at = self.mesh * np.arange(self.first, self.first + self.length)
        center = float(at.mean())
        with np.errstate(divide="ignore"):
            found = np.log(self._masses) - (1 + self._tilt) * (at - center)
        # delta(l) - delta(l + mesh) = (exp(l + mesh) - exp(l)) Q(losses above l), relative to a center.
        found = np.logaddexp.accumulate(found[::-1])[:-1] + (at[-2::-1] - center)
        found = np.logaddexp.accumulate(found)[::-1]
        found += self._moment - self._tilt * center + log_expm1(self.mesh)
        found = np.logaddexp(found, self._moment + self._hidden - self._tilt * at[:-1])
        found = np.logaddexp(found, self._outside)
        self._known = dict(enumerate(found.tolist()))
        return self

    def log_delta(self, number: int) -> float:
        """Return log delta at a point, sum_l P(l) (1 - exp(eps - l)) over the losses l above it."""
        if number >= self.length - 1:
            return self._outside
        if number not in self._known:
            above = float(self._masses[number:] @ self._weights[: self.length - number])
            found = math.log(above) if above > 0 else -math.inf
            found = self._moment + float(np.logaddexp(found, self._hidden))
            found -= self._tilt * self.mesh * (self.first + number)
            self._known[number] = float(np.logaddexp(found, self._outside))
        return self._known[number]

    def loose(self, eps: float) -> float:
        """Return the logarithm of the part of delta that is rounding or infinite losses."""
        return max(self._moment + self._hidden - self._tilt * eps, self._outside)

    def at(self, eps: float) -> float:
        """Return an upper bound of log delta, linear in exp(eps) between two points of the mesh."""
        before = math.floor(eps / self.mesh)
        number = before - self.first
        if number < 0:
            return math.inf
        high, low = self.log_delta(number), self.log_delta(number + 1)
        if not high > low:
            return high
        share = math.exp(log_expm1(eps - before * self.mesh) - log_expm1(self.mesh))
        if not 0 < share < 1:  # by rounding
            return float(low if share >= 1 else high)
        return float(np.logaddexp(high + math.log1p(-share), low + math.log(share)))


def solved(curves: list[Curve], log_delta: float) -> tuple[float, float] | None:
    """Return (epsilon, -d log delta / d epsilon) of a sum of deltas, or None if it is never reached."""

    def total(eps: float) -> float:
        return total_at(curves, eps)

    low, high = 0.0, max((c.first + c.length) * c.mesh for c in curves)
    if total(low) <= log_delta:
        return 0.0, 0.0
    if total(high) > log_delta:
        return None
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) > log_delta else (low, middle)
    mesh = min(curve.mesh for curve in curves)
    return high, max((total(high) - total(high + mesh)) / mesh, 0.0)


def total_at(curves: list[Curve], eps: float) -> float:
    return float(np.logaddexp.reduce([curve.at(eps) for curve in curves]))


class Composition(NamedTuple):
    """Transforms of the tilted losses of one step of each part, on a mesh and in a window.

    The masses are multiplied by exp(tilt L) before the transform and divided by it afterwards. The
    rounding of float64 is then small relative to the masses around the window's center, however small
    delta is. Mass outside of the window wraps around into it, where it is counted in addition. Mass
    above the window also counts as infinite (Chernoff's bound).
    """

    steps: list[Sums]
    """One step of each part, or all steps of all parts."""
    first: int
    length: int
    mesh: float
    tilt: float
    weights: np.ndarray
    """exp(-tilt l) (1 - exp(-l)) at the points l = 0, mesh, 2 mesh, ..., [length]."""
    bounds: np.ndarray
    """Tilts of Chernoff's bound."""
    rare: bool

    def curve(self, steps: Sequence[int]) -> Curve:
        """Return delta after these numbers of steps of the parts."""
        counts = steps if len(self.steps) == len(steps) else [1]
        sums = Sums.of_steps(self.steps, counts, rare=self.rare)
        change, rounding = sums.change(rounding_unit(self.length), rare=self.rare)
        masses = irfft(change, self.length)
        if not self.rare:
            masses[0] += 1
        masses = np.maximum(np.roll(masses, -self.first % self.length), 0.0)
        infinite = math.log(sums.infinite) if sums.infinite else -math.inf
        top = (self.first + self.length - 1) * self.mesh
        outside = float(np.logaddexp(float((sums.above - self.bounds * top).min()), infinite))
        # By Cauchy and Schwarz, from the masses above a point and their weights exp(-tilt (l - point)).
        hidden = math.log(1e-300 + rounding)
        hidden += min(math.log(self.length), -log_expm1(2 * self.tilt * self.mesh)) / 2
        if math.isnan(float(masses.sum()) + sums.moment + hidden + outside):
            raise ArithmeticError("the composition is not a number")
        return Curve(self, masses, sums.moment, hidden, outside)


def rounding_unit(length: int) -> float:
    """Return the rounding of a Fourier transform relative to its norm."""
    return sys.float_info.epsilon * math.log2(2 * length)


# -------------------------------------------------------------------------------------------------
# Sums of the losses of Gaussian mechanisms, which are one Gaussian mechanism.


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of one Gaussian mechanism of noise multiplier 1 / mu, or of a composition to it.

    Formal guarantee: the tight epsilon, plus a rounding margin of 1e-9 of it.

    Source: Balle and Wang 2018, Theorem 8.

    Args:
        mu: sqrt(sum of sigma^-2).
        delta: in (0, 1).
    """
    log_delta = math.log(delta)
    if mu > 1e150:
        return math.inf
    if mu == 0 or gaussian_log_delta(0.0, mu) <= log_delta:
        return 0.0
    most = mu * (
        mu / 2 + math.sqrt(-2 * log_delta)
    )  # where the loss is larger with probability delta
    found = most
    if gaussian_log_delta(most, mu) < log_delta:  # otherwise the two are equal in float64
        found = brentq(
            lambda eps: gaussian_log_delta(eps, mu) - log_delta,
            0, most, xtol=1e-12 * most, rtol=1e-13,
        )  # fmt: skip
    return float(found * (1 + 1e-9) + 1e-12 * most)


def gaussian_log_delta(eps: float, mu: float) -> float:
    """Return log(Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu))."""
    near, far = mu / 2 - eps / mu, -mu / 2 - eps / mu
    if near > 0:
        ratio = math.exp(eps + log_ndtr(far) - log_ndtr(near))
    else:  # both are tails, whose quotient is that of erfcx
        ratio = float(erfcx(-far / math.sqrt(2)) / erfcx(-near / math.sqrt(2)))
    return float(log_ndtr(near)) + (math.log1p(-ratio) if ratio < 1 else -math.inf)
