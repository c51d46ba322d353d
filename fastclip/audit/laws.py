"""Tests of the released noise and the sampled batches against their claimed laws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy import fft, special, stats
from torch import Tensor

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.steps import Rate, TruncatedPoisson, probability

TAILS = (3.0, 4.0)
"""Numbers of deviations beyond which entries are counted."""
_PIECES = 8
"""Number of pieces of noise, from the first step on, that are searched for permuted copies."""
_LARGE = 1000
"""Fewest entries of a parameter that is searched."""


def p_values_of_noise(noise: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """P-values of the noise, by kind of test; the tests of one kind share its p-value.

    - entries: Kolmogorov-Smirnov distance of each parameter's entries, and sums of squares of each
      parameter and step.
    - tails and largest: the number of entries in the tails, and the largest entry.
    - distances: correlations of entries at any distance within a step.
    - steps: correlations of two steps at one entry, and of consecutive steps at any distance.
    - copies: two pieces of noise that hold the same values in another order, or negated.

    Args:
        noise: [steps, entries], over its claimed deviation.
        sizes: number of entries of each parameter, in order.
    """
    values = noise.numpy()
    pieces = np.split(values, np.cumsum(sizes)[:-1], axis=1)
    laws = [float(stats.kstest(piece.ravel(), "norm").pvalue) for piece in pieces]
    laws += [of_squares(part) for part in (*pieces, *(values if len(values) > 1 else ()))]
    within, between = _largest_within(values)
    found = {
        "entries": shared(laws),
        "tails": shared([_beyond(values, limit) for limit in TAILS]),
        "largest": _of_maximum(values),
        "distances": within,
        "copies": copies(list(_of_size(pieces))),
    }
    if len(values) > 1:
        pairs = _between_steps(values)
        found["steps"] = shared([of_largest(_most(pairs), len(pairs)), between])
    return found


def p_value(noise: Tensor) -> float:
    """The joint p-value of all tests, for the noise of one parameter."""
    return shared(p_values_of_noise(noise, [noise.shape[1]]).values())


def shared(p_values: Iterable[float]) -> float:
    """The joint p-value of several: the smallest, times their number."""
    found = list(p_values)
    return min(1.0, len(found) * min(found)) if found else 1.0


def two_sided(below: float, above: float) -> float:
    """The two-sided p-value from the probabilities of at most, and at least, this value."""
    return min(1.0, 2 * min(below, above))


def of_squares(values: np.ndarray) -> float:
    """The p-value of the sum of squares of numbers that should be standard normal."""
    n, total = values.size, float(np.square(values).sum())
    return two_sided(float(special.chdtr(n, total)), float(special.chdtrc(n, total)))


def of_repeats(first: Tensor, second: Tensor) -> float:
    """The p-value of the noise of two runs, [entries] each, that should be independent."""
    a, b = first.numpy(), second.numpy()
    return shared([of_largest(abs(a @ b) / math.sqrt(len(a)), 1), copies([a, b])])


def of_largest(largest: float, among: int) -> float:
    """Probability that one of `among` standard normals is at least this far from 0."""
    return min(1.0, 2 * among * float(special.ndtr(-largest)))


def copies(pieces: Sequence[np.ndarray]) -> float:
    """Probability that two independent pieces of one size are as similar as two of these.

    The Kolmogorov-Smirnov distance D is of absolute values, so order and sign do not matter. The law
    of small distances is sqrt(2 pi) / x exp(-pi^2 / (8 x^2)) at sqrt(n / 2) D = x.
    """
    ordered, found = [np.sort(np.abs(piece)) for piece in pieces], []
    for a, b in combinations(ordered, 2):
        if len(a) != len(b):
            continue
        n = len(a)
        at = np.searchsorted(b, a, side="right") - np.arange(1, n + 1)
        x = math.sqrt(n / 2) * (float(np.abs(at).max()) + 1) / n
        found.append(min(1.0, math.sqrt(2 * math.pi) / x * math.exp(-(math.pi**2) / (8 * x * x))))
    return shared(found)


def at_distances(spectrum: np.ndarray, other: np.ndarray, n: int) -> np.ndarray:
    """Sums of products of n entries with others k positions further on, for k = 1 to n - 1."""
    return fft.irfft(np.conj(spectrum) * other, _length(n))[1:n]


def spectrum_of(values: np.ndarray) -> np.ndarray:
    """The spectrum of entries whose correlations are computed, [n]."""
    return fft.rfft(values, _length(len(values)))


def _length(n: int) -> int:
    return fft.next_fast_len(2 * n, real=True)


def _largest_within(values: np.ndarray) -> tuple[float, float]:
    """P-values of the normalized correlations at every distance, within steps and between two steps."""
    steps, n = values.shape
    counts = np.arange(n - 1, 0, -1)
    enough = counts >= 2000  # the central limit needs this many so far out
    if not enough.any():
        return 1.0, 1.0
    scale = np.sqrt(counts[enough])
    within, between, before = 0.0, 0.0, None
    for step in values:
        here = spectrum_of(step)
        within = max(within, _most(at_distances(here, here, n)[enough] / scale))
        if before is not None:
            for pair in ((before, here), (here, before)):
                between = max(between, _most(at_distances(*pair, n)[enough] / scale))
        before = here
    return of_largest(within, steps * len(scale)), of_largest(between, 2 * (steps - 1) * len(scale))


def _most(normals: np.ndarray) -> float:
    return float(np.abs(normals).max()) if len(normals) else 0.0


def _between_steps(values: np.ndarray) -> np.ndarray:
    """Normalized correlations of any two steps at the same entries."""
    products = values @ values.T / np.sqrt(values.shape[1])
    return products[np.triu_indices(len(values), 1)]


def _beyond(values: np.ndarray, limit: float) -> float:
    """The p-value of the number of entries beyond a limit."""
    count, share = int((np.abs(values) > limit).sum()), 2 * float(special.ndtr(-limit))
    above = float(special.bdtrc(count - 1, values.size, share)) if count else 1.0
    return two_sided(float(special.bdtr(count, values.size, share)), above)


def _of_maximum(values: np.ndarray) -> float:
    """The p-value of the largest entry."""
    tail = 2 * float(special.ndtr(-np.abs(values).max()))
    within = values.size * math.log1p(-min(tail, 1 - 1e-16))
    return two_sided(math.exp(within), -math.expm1(within))


def _of_size(pieces: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The first pieces of large parameters, step by step."""
    large = [piece for piece in pieces if piece.shape[1] >= _LARGE]
    if large:
        yield from [piece[step] for step in range(len(large[0])) for piece in large][:_PIECES]


# -------------------------------------------------------------------------------------------------
# The sampled batches, compared with Poisson sampling: each sample independently at rate q.


_COINCIDENCES = 2500
"""Expected number of coincidences for which their number is close to normal far out."""


def p_values_of_draws(
    draws: Tensor, rates: Sequence[Rate], weights: Tensor | None = None
) -> dict[str, float]:
    """P-values of the sampled batches, by kind of test.

    - whole: a sample comes at most once, and with all of its unit. At q = 1 all come, at q = 0 none.
    - sizes: all batches together are Binomial(N T, q), and they vary as Binomial(N, q) does. Truncated
      batches never exceed the largest size, reach it as often, and otherwise vary, as by chance.
    - rows: samples at any distance in the data set are drawn together as often as by chance.
    - steps: any two batches share as many samples of one rate as their sizes imply (hypergeometric).
    Of a random allocation, a sample comes exactly k times in a whole pass and at most k times in the
    last one. Sizes are compared within passes (Pearson), and batches of different passes.

    Args:
        draws: share of each sample, or unit, that was sampled, [steps, samples].
        rates: the accounted rates, [steps].
        weights: factors of the rates, [samples]; None: all are 1.
    """
    whole = bool(((draws == 0) | (draws == 1)).all())
    came = draws.numpy() == 1
    if rates and isinstance(rates[0], RandomAllocation):
        return {"whole": float(whole and set(rates) == {rates[0]})} | _of_allocation(came, rates[0])
    factors = np.ones(came.shape[1]) if weights is None else weights.numpy()
    q = np.asarray([probability(rate) for rate in rates])[:, None] * factors
    sure = (q == 0) | (q == 1)  # these are not random
    whole = whole and bool((came == q)[sure].all())
    by_chance = ~sure.all(0)
    if not by_chance.any():
        return {"whole": float(whole)}
    came, q, factors = came[:, by_chance], q[:, by_chance], factors[by_chance]
    steps, n = came.shape
    sizes = came.sum(1)
    cut = [rate for rate in rates if isinstance(rate, TruncatedPoisson)]
    if cut:
        alike = _truncated_sizes(sizes, cut[0])
        # Given its size, a batch is a uniform subset of the samples.
        q = (np.clip(sizes, 0.5, n - 0.5) / n)[:, None] * factors
        whole = whole and cut == [cut[0]] * steps and cut[0].rows == n
    else:
        alike = _sizes(sizes, q)
    classes = [came[:, factors == factor] for factor in np.unique(factors)]
    rate = float(q.mean(1).min())
    return {
        "whole": float(whole),
        "sizes": alike,
        "rows": _rows((came - q) / np.sqrt(np.where(q * (1 - q) > 0, q * (1 - q), 1)), rate),
        "steps": shared(map(_steps, classes)),
    }


def _sizes(sizes: np.ndarray, q: np.ndarray) -> float:
    """The p-value of batch sizes with independent samples at these rates, [steps, samples]."""
    even = (sizes - q.sum(1)) / np.sqrt((q * (1 - q)).sum(1))
    unlike, steps = float((even**2).sum()), len(sizes)
    return shared([
        2 * float(special.ndtr(-abs(float(even.sum()) / np.sqrt(steps)))),
        two_sided(float(special.chdtr(steps, unlike)), float(special.chdtrc(steps, unlike))),
    ])  # fmt: skip


def _truncated_sizes(sizes: np.ndarray, rate: TruncatedPoisson) -> float:
    """The p-value of truncated binomial sizes; those below the largest by Fisher's method."""
    most, steps = rate.max_batch_size, len(sizes)
    if int(sizes.max()) > most:
        return 0.0
    drawn = stats.binom(rate.rows, rate.rate)
    full, often = int((sizes == most).sum()), stats.binom(steps, float(drawn.sf(most - 1)))
    below = drawn.logcdf(sizes[sizes < most]) - drawn.logcdf(most - 1)
    small = float(stats.chi2.sf(-2 * below.sum(), 2 * len(below))) if len(below) else 1.0
    return shared([two_sided(float(often.cdf(full)), float(often.sf(full - 1))), small])


def _of_allocation(came: np.ndarray, rate: RandomAllocation) -> dict[str, float]:
    """P-values of batches of a random allocation, bool [steps, samples]. The last pass may be shorter.

    A sample's vector of one pass has covariance t / (t - 1) (I - 1 1^T / t) in units of q (1 - q). Its
    square has the trace t^2 / (t - 1), and that of independent batches has t.
    """
    t, k, n = rate.steps, rate.times, came.shape[1]
    q, starts = k / t, range(0, len(came), t)
    passes = [came[start : start + t] for start in starts]
    often = [one.sum(0) for one in passes]
    right = all(
        bool((o == k if len(p) == t else o <= k).all()) for o, p in zip(often, passes, strict=True)
    )
    if q == 1:
        return {"times": float(right)}
    sizes = []
    for whole in (one for one in passes if len(one) == t):
        unlike = float(((whole.sum(1) - n * q) ** 2).sum()) * (t - 1) / (n * q * (1 - q) * t)
        sizes.append(
            two_sided(float(special.chdtr(t - 1, unlike)), float(special.chdtrc(t - 1, unlike)))
        )
    standard = (came - q) / np.sqrt(q * (1 - q)) * ((t - 1) / t) ** 0.25
    return {
        "times": float(right), "sizes": shared(sizes), "rows": _rows(standard, q),
        "steps": _steps(came, t),
    }  # fmt: skip


def _rows(standard: np.ndarray, rate: float) -> float:
    """The p-value of pairs of samples at every distance, in all steps together."""
    steps, n = standard.shape
    counts = np.arange(n - 1, 0, -1) * steps
    enough = counts * rate**2 >= _COINCIDENCES
    if not enough.any():
        return 1.0
    sums = np.sum([at_distances(one, one, n) for one in map(spectrum_of, standard)], axis=0)
    normals = sums[enough] / np.sqrt(counts[enough])
    return of_largest(float(np.abs(normals).max()), len(normals))


def _steps(came: np.ndarray, a_pass: int = 1) -> float:
    """The p-value of the overlap of any two steps, which is hypergeometric given their sizes.

    Only the pairs farthest from the expected overlap are tested, at the level of all pairs.

    Args:
        a_pass: number of steps that depend on each other, of which no pair is tested.
    """
    steps, n = came.shape
    first, second = np.triu_indices(steps, 1)
    apart = first // a_pass != second // a_pass
    first, second = first[apart], second[apart]
    if not len(first) or n < 2:
        return 1.0
    wide, sizes = came.astype(np.float32), came.sum(1)
    common = np.rint(wide @ wide.T)[first, second]
    a, b = sizes[first].astype(float), sizes[second].astype(float)
    spread = np.sqrt(a * b * (n - a) * (n - b) / (n * n * (n - 1)))
    far = (common - a * b / n) / np.maximum(spread, 1e-9)
    fewest, most = int(far.argmin()), int(far.argmax())

    def law(pair: int) -> Any:
        return stats.hypergeom(n, sizes[first[pair]], sizes[second[pair]])

    least = min(law(fewest).cdf(common[fewest]), law(most).sf(common[most] - 1))
    return min(1.0, 2 * len(first) * float(least))
