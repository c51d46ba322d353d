"""Noise as a run has released it, against its claimed law: standard normal, independent everywhere."""

from __future__ import annotations

import numpy as np
from scipy import special, stats
from torch import Tensor


def p_value(noise: Tensor) -> float:
    """Probability of what is most unlike the law among its laws of one entry, of two, and of two steps.

    Kolmogorov and Smirnov's distance of all entries; the largest correlation of entries at any distance
    within a step; the largest of two steps at the same entry. The three share the probability.

    Args:
        noise: [steps, entries] over its claimed deviation; NaN where something else was added.
    """
    values = noise.numpy()
    known = np.isfinite(values)
    found = [
        float(stats.kstest(values[known], "norm").pvalue),
        _of_largest(
            np.concatenate([_at_distances(*pair) for pair in zip(values, known, strict=True)])
        ),
    ]
    if len(values) > 1:
        found.append(_of_largest(_between_steps(values[:, known.all(0)])))
    return min(1.0, len(found) * min(found))


def _at_distances(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Normalised correlations of a step's entries at every distance, each standard normal."""
    size = 2 * len(values)
    spectrum = np.fft.rfft(np.where(known, values, 0.0), size)
    pairs = np.fft.rfft(known.astype(float), size)
    sums = np.fft.irfft(np.abs(spectrum) ** 2, size)[1 : len(values)]
    counts = np.rint(np.fft.irfft(np.abs(pairs) ** 2, size)[1 : len(values)])
    enough = counts >= 2000  # so far out the central limit holds for no fewer
    return sums[enough] / np.sqrt(counts[enough])


def _between_steps(values: np.ndarray) -> np.ndarray:
    """The same of any two steps at the same entries."""
    products = values @ values.T / np.sqrt(values.shape[1])
    return products[np.triu_indices(len(values), 1)]


def _of_largest(normals: np.ndarray) -> float:
    """Probability of one so far from 0 among so many."""
    if not len(normals):
        return 1.0
    return min(1.0, 2 * len(normals) * float(special.ndtr(-np.abs(normals).max())))
