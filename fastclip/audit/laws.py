"""Noise and draws as a run has released them, against the laws that are claimed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy import fft, special, stats
from torch import Tensor

from fastclip.accounting.steps import Rate, TruncatedPoisson, probability

TAILS = (3.0, 4.0)
"""Deviations beyond which entries are counted."""
_PIECES = 8
"""Parameters' noise of so many steps, from the first on, is looked for permuted copies."""
_LARGE = 1000
"""Entries of a parameter that is."""


def p_values_of_noise(noise: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """Of what is most unlike the law, by what is looked at; each is shared by its own looks.

    Kolmogorov and Smirnov's distance of each parameter's entries, and their squares, and those of each
    step; how many lie in the tails; the largest; correlations of entries at any distance within a step;
    of two steps at one entry, and of a step with the next one at any distance; two pieces of noise that
    hold the same values in another order, or negated.

    Args:
        noise: [steps, entries] over its claimed deviation.
        sizes: entries of each parameter, in this order.
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
    """Of all of them, of noise of one parameter."""
    return shared(p_values_of_noise(noise, [noise.shape[1]]).values())


def shared(p_values: Iterable[float]) -> float:
    """The least of several, times their number."""
    found = list(p_values)
    return min(1.0, len(found) * min(found)) if found else 1.0


def two_sided(below: float, above: float) -> float:
    """From the probabilities of so little, and of so much."""
    return min(1.0, 2 * min(below, above))


def of_squares(values: np.ndarray) -> float:
    """Of the sum of squares of numbers that should be standard normal."""
    n, total = values.size, float(np.square(values).sum())
    return two_sided(float(special.chdtr(n, total)), float(special.chdtrc(n, total)))


def of_repeats(first: Tensor, second: Tensor) -> float:
    """Of two runs' noise, [entries] each, that should have nothing in common."""
    a, b = first.numpy(), second.numpy()
    return shared([of_largest(abs(a @ b) / math.sqrt(len(a)), 1), copies([a, b])])


def of_largest(largest: float, among: int) -> float:
    """Probability of one so far from 0 among so many standard normals."""
    return min(1.0, 2 * among * float(special.ndtr(-largest)))


def copies(pieces: Sequence[np.ndarray]) -> float:
    """Probability that two independent samples of one size are as alike as two of these are.

    Distances of Kolmogorov and Smirnov of absolute values, which no order and no sign changes; the
    law of small ones is sqrt(2 pi) / x exp(-pi^2 / (8 x^2)) at sqrt(n / 2) D = x.
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
    """Sums of products of n entries, and of others, k places further on: k = 1 to n - 1."""
    return fft.irfft(np.conj(spectrum) * other, _length(n))[1:n]


def spectrum_of(values: np.ndarray) -> np.ndarray:
    """Of entries that are to be held against each other, [n]."""
    return fft.rfft(values, _length(len(values)))


def _length(n: int) -> int:
    return fft.next_fast_len(2 * n, real=True)


def _largest_within(values: np.ndarray) -> tuple[float, float]:
    """Of the normalized correlations at every distance, each standard normal: of steps, and of two."""
    steps, n = values.shape
    counts = np.arange(n - 1, 0, -1)
    enough = counts >= 2000  # so far out the central limit holds for no fewer
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
    """The same of any two steps at the same entries."""
    products = values @ values.T / np.sqrt(values.shape[1])
    return products[np.triu_indices(len(values), 1)]


def _beyond(values: np.ndarray, limit: float) -> float:
    """Probability of so many, or so few, entries beyond a limit."""
    count, share = int((np.abs(values) > limit).sum()), 2 * float(special.ndtr(-limit))
    above = float(special.bdtrc(count - 1, values.size, share)) if count else 1.0
    return two_sided(float(special.bdtr(count, values.size, share)), above)


def _of_maximum(values: np.ndarray) -> float:
    """Probability of a largest entry so far out, or so near."""
    tail = 2 * float(special.ndtr(-np.abs(values).max()))
    within = values.size * math.log1p(-min(tail, 1 - 1e-16))
    return two_sided(math.exp(within), -math.expm1(within))


def _of_size(pieces: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The first large ones, step by step."""
    large = [piece for piece in pieces if piece.shape[1] >= _LARGE]
    if large:
        yield from [piece[step] for step in range(len(large[0])) for piece in large][:_PIECES]


# -------------------------------------------------------------------------------------------------
# Draws of samples as they came, against Poisson sampling: each sample at rate q, independent of all
# else.


_COINCIDENCES = 2500
"""Expected, for a number of them to be as good as normal far out."""


def p_values_of_draws(
    draws: Tensor, rates: Sequence[Rate], weights: Tensor | None = None
) -> dict[str, float]:
    """Of what is most unlike the law, by what is looked at.

    Whole: samples come once at the most, and all of a unit; at q = 1 all come, at q = 0 none. Sizes:
    of all draws together Binomial(N T, q), and no more and no less unlike each other than
    Binomial(N, q) are; of draws that are cut none is above the largest, as many reach it and others
    are as large as by chance. Samples: at any distance in the data set they are drawn together as
    often as by chance. Steps: any two have as many samples of one rate in common as draws of their
    sizes (hypergeometric).

    Args:
        draws: shares of each sample, or unit, that came, [steps, samples].
        rates: that are accounted, [steps]. weights: factors of them, [samples]; None: all are 1.
    """
    whole = bool(((draws == 0) | (draws == 1)).all())
    came = draws.numpy() == 1
    factors = np.ones(came.shape[1]) if weights is None else weights.numpy()
    q = np.asarray([probability(rate) for rate in rates])[:, None] * factors
    sure = (q == 0) | (q == 1)  # there is no chance in these
    whole = whole and bool((came == q)[sure].all())
    by_chance = ~sure.all(0)
    if not by_chance.any():
        return {"whole": float(whole)}
    came, q, factors = came[:, by_chance], q[:, by_chance], factors[by_chance]
    steps, n = came.shape
    sizes = came.sum(1)
    cut = [rate for rate in rates if isinstance(rate, TruncatedPoisson)]
    if cut:
        alike = _cut_sizes(sizes, cut[0])
        # Given how many there are they are any of the samples.
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
    """Sums of independent samples of these rates, [steps, samples]."""
    even = (sizes - q.sum(1)) / np.sqrt((q * (1 - q)).sum(1))
    unlike, steps = float((even**2).sum()), len(sizes)
    return shared([
        2 * float(special.ndtr(-abs(float(even.sum()) / np.sqrt(steps)))),
        two_sided(float(special.chdtr(steps, unlike)), float(special.chdtrc(steps, unlike))),
    ])  # fmt: skip


def _cut_sizes(sizes: np.ndarray, rate: TruncatedPoisson) -> float:
    """Binomial ones, of which none is above the largest; Fisher's product of those that are below it."""
    most, steps = rate.max_batch_size, len(sizes)
    if int(sizes.max()) > most:
        return 0.0
    drawn = stats.binom(rate.rows, rate.rate)
    full, often = int((sizes == most).sum()), stats.binom(steps, float(drawn.sf(most - 1)))
    below = drawn.logcdf(sizes[sizes < most]) - drawn.logcdf(most - 1)
    small = float(stats.chi2.sf(-2 * below.sum(), 2 * len(below))) if len(below) else 1.0
    return shared([two_sided(float(often.cdf(full)), float(often.sf(full - 1))), small])


def _rows(standard: np.ndarray, rate: float) -> float:
    """Samples at every distance, in all steps together."""
    steps, n = standard.shape
    counts = np.arange(n - 1, 0, -1) * steps
    enough = counts * rate**2 >= _COINCIDENCES
    if not enough.any():
        return 1.0
    sums = np.sum([at_distances(one, one, n) for one in map(spectrum_of, standard)], axis=0)
    normals = sums[enough] / np.sqrt(counts[enough])
    return of_largest(float(np.abs(normals).max()), len(normals))


def _steps(came: np.ndarray) -> float:
    """Any two steps; given how many were drawn, what they have in common is exactly hypergeometric.

    Only the pairs that are farthest from what is expected are looked at, of all of them.
    """
    steps, n = came.shape
    first, second = np.triu_indices(steps, 1)
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
