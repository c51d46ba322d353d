"""Two positions that take each other back nearly whole, whose dot products all round the worst way.

K = n [1 x; x x^2] and H = n [1 -y; -y y^2]: what is left of n^2 (1 - x y)^2 is smaller than what the
entries have been rounded by. Numbers are chosen by their own rounding errors; powers of two keep these.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip.ops import half_gram, routed_norm
from fastclip.rules.records import LinearRecord


def rows(values: Tensor, t: int, n: int) -> Tensor:
    """[b, t, n]: of each sample a position of ones, one of its value, and nothing else."""
    found = torch.zeros(len(values), t, n)
    found[:, 0], found[:, 1] = 1, values[:, None]
    return found


def adverse(t: int, n: int) -> tuple[Tensor, Tensor]:
    """Numbers x and y of samples: x y is near 1, and all errors make the norm come out low."""
    torch.manual_seed(0)
    values = 1 + torch.rand(2000)
    grams, exact = half_gram(rows(values, t, n)).double(), n * values.double()
    low = 2 * grams[:, 0, 1] / exact - grams[:, 1, 1] / (exact * values.double())
    worst = values[low.argsort(descending=True)[:150]]
    x, y = torch.cartesian_prod(worst, worst / 2).unbind(1)
    left = (1 - x.double() * y.double()).abs()
    near = (left > 5e-4) & (left < 2e-2)
    return x[near][:800], y[near][:800]


@pytest.mark.parametrize("n", [64, 192, 384])
@pytest.mark.parametrize("t", [2, 12])
@pytest.mark.parametrize("way", ["linear", "routed"])
def test_norm(way: str, t: int, n: int) -> None:
    x, y = adverse(t, n)
    assert len(x) > 100
    a, g = rows(x, t, n), rows(-y, t, n)
    if way == "linear":
        found = LinearRecord(a, g, ghost=True).norm_sq()
    else:
        owner = torch.arange(len(x)).repeat_interleave(t)
        found = routed_norm(a.flatten(0, 1), g.flatten(0, 1), owner, len(x))
    assert isinstance(found, Tensor)
    exact = n * (1 - x.double() * y.double()).abs()
    assert bool((exact <= found.double().sqrt()).all())
