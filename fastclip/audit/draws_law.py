"""Draws of rows as they came, against Poisson sampling: each row at rate q, independent of all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special, stats
from torch import Tensor

from fastclip.accounting.truncation import Rate, TruncatedPoisson, probability
from fastclip.audit.noise_law import at_distances, of_largest, shared, spectrum_of, two_sided

_COINCIDENCES = 2500
"""Expected, for a number of them to be as good as normal far out."""


def p_values(
    draws: Tensor, rates: Sequence[Rate], weights: Tensor | None = None
) -> dict[str, float]:
    """Of what is most unlike the law, by what is looked at.

    Whole: rows come once at the most, and all of a unit; at q = 1 all come. Sizes: of all draws
    together Binomial(N T, q), and no more and no less unlike each other than Binomial(N, q) are; of
    draws that are cut none is above the largest, as many reach it and others are as large as by chance.
    Rows: at any distance in the data set they are drawn together as often as by chance. Steps: any two
    have as many rows of one rate in common as draws of their sizes (hypergeometric).

    Args:
        draws: shares of each row, or unit, that came, [steps, rows].
        rates: that are accounted, [steps]. weights: factors of them, [rows]; None: all are 1.
    """
    whole = bool(((draws == 0) | (draws == 1)).all())
    if all(rate == 1 for rate in rates) and weights is None:
        return {"whole": float(whole and bool((draws == 1).all()))}
    came = draws.numpy() == 1
    steps, n = came.shape
    factors = np.ones(n) if weights is None else weights.numpy()
    q = np.asarray([probability(rate) for rate in rates])[:, None] * factors
    sizes = came.sum(1)
    cut = [rate for rate in rates if isinstance(rate, TruncatedPoisson)]
    if cut:
        alike = _cut_sizes(sizes, cut[0])
        # Given how many there are they are any of the rows.
        q = (np.clip(sizes, 0.5, n - 0.5) / n)[:, None] * factors
        whole = whole and cut == [cut[0]] * steps and cut[0].rows == n
    else:
        alike = _sizes(sizes, q)
    classes = [came[:, factors == factor] for factor in np.unique(factors)]
    return {
        "whole": float(whole),
        "sizes": alike,
        "rows": _rows((came - q) / np.sqrt(q * (1 - q)), float(q.mean(1).min())),
        "steps": shared(map(_steps, classes)),
    }


def _sizes(sizes: np.ndarray, q: np.ndarray) -> float:
    """Sums of independent rows of these rates, [steps, rows]."""
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
    """Rows at every distance, in all steps together."""
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
