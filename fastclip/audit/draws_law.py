"""Draws of rows as they came, against Poisson sampling: each row at rate q, independent of all else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import special, stats
from torch import Tensor

from fastclip.audit.noise_law import at_distances, of_largest, shared, spectrum_of, two_sided

_COINCIDENCES = 2500
"""Expected, for a number of them to be as good as normal far out."""


def p_values(draws: Tensor, rates: Sequence[float]) -> dict[str, float]:
    """Of what is most unlike the law, by what is looked at.

    Whole: rows come once at the most, and all of a unit; at q = 1 all come. Sizes: of all draws
    together Binomial(N T, q), and no more and no less unlike each other than Binomial(N, q) are. Rows:
    at any distance in the data set they are drawn together as often as by chance. Steps: any two have
    as many rows in common as draws of their sizes (hypergeometric).

    Args:
        draws: shares of each row, or unit, that came, [steps, rows].
        rates: that are accounted, [steps].
    """
    whole = bool(((draws == 0) | (draws == 1)).all())
    if all(rate == 1 for rate in rates):
        return {"whole": float(whole and bool((draws == 1).all()))}
    came = draws.numpy() == 1
    steps, n = came.shape
    q = np.asarray(rates, dtype=float)[:, None]
    sizes = came.sum(1)
    even = (sizes - n * q[:, 0]) / np.sqrt(n * q[:, 0] * (1 - q[:, 0]))
    unlike = float((even**2).sum())
    total = float(even.sum() / np.sqrt(steps))
    return {
        "whole": float(whole),
        "sizes": shared([
            2 * float(special.ndtr(-abs(total))),
            two_sided(float(special.chdtr(steps, unlike)), float(special.chdtrc(steps, unlike))),
        ]),
        "rows": _rows((came - q) / np.sqrt(q * (1 - q)), float(q.min())),
        "steps": _steps(came, sizes),
    }  # fmt: skip


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


def _steps(came: np.ndarray, sizes: np.ndarray) -> float:
    """Any two steps; given how many were drawn, what they have in common is exactly hypergeometric."""
    steps, n = came.shape
    first, second = np.triu_indices(steps, 1)
    if not len(first):
        return 1.0
    wide = came.astype(np.float32)
    common = np.rint(wide @ wide.T)[first, second]
    law = stats.hypergeom(n, sizes[first], sizes[second])
    least = min(float(law.cdf(common).min()), float(law.sf(common - 1).min()))
    return min(1.0, 2 * len(first) * least)
