"""Statistical laws that noise must obey, each at a significance that a good source never meets."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

ALPHA = 1e-7
"""Two-sided significance of every check: a test of unseeded noise fails once in ten million runs."""
TAILS = (2.0, 3.0, 4.0, 4.5, 5.0)


class SeededBits:
    """Words of numpy's generator, for tests that must not depend on chance."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def fill(self, words: Tensor) -> None:
        raw = bytearray(self.generator.bytes(words.numel() * words.element_size()))
        words.view(torch.uint8).view(-1).copy_(torch.frombuffer(raw, dtype=torch.uint8))


def assert_standard_normal(values: Tensor) -> None:
    """Kolmogorov-Smirnov, four moments and the tails to 5 sigma, of independent values."""
    x = values.detach().double().flatten()
    n = len(x)
    assert bool(torch.isfinite(x).all())
    assert stats.kstest(x.numpy(), "norm").pvalue > ALPHA
    limit = stats.norm.isf(ALPHA / 2)
    # mean and variance of x^k for k = 1 to 4: 0, 1; 1, 2; 0, 15; 3, 96
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        z = (float(x.pow(power).mean()) - mean) / (variance / n) ** 0.5
        assert abs(z) < limit, (power, z)
    for sigma in TAILS:
        for tail in (x > sigma, x < -sigma):
            count, p = int(tail.sum()), stats.norm.sf(sigma)
            low, high = stats.binom.ppf([ALPHA / 2, 1 - ALPHA / 2], n, p)
            assert low <= count <= high, (sigma, count, n * p)


def assert_uncorrelated(x: Tensor, y: Tensor) -> None:
    """Equal entries of two draws are independent: their products sum to N(0, n)."""
    x, y = x.double().flatten(), y.double().flatten()
    z = float(x @ y) / len(x) ** 0.5
    assert abs(z) < stats.norm.isf(ALPHA / 2), z
    z = float(x.square() @ y.square() - len(x)) / (8 * len(x)) ** 0.5  # var(x^2 y^2) = 9 - 1
    assert abs(z) < 2 * stats.norm.isf(ALPHA / 2), z  # heavy tails: twice the normal's limit
