"""Norms do not depend on how the numbers of a row lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import ops

LAYOUTS = {
    "side by side": lambda c, n: c.repeat(1, n),
    "expanded": lambda c, n: c.expand(-1, n),
    "transposed": lambda c, n: c.T.repeat(n, 1).T,
    "sliced": lambda c, n: c.repeat(1, 2 * n)[:, ::2],
    "matrices": lambda c, n: c[:, :, None].expand(-1, 2, n // 2),
    "matrices, transposed": lambda c, n: c[:, :, None].repeat(1, n // 2, 2).mT,
}
"""Of rows [b, 1] to [b, n]: each entry is the row's only number, so that all roundings agree."""


@pytest.mark.parametrize("n", [64, 512, 1024, 3000, 4096])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_of_equal_entries(layout: str, n: int) -> None:
    """At most the room of the scales below the truth."""
    values = 1 + torch.arange(2000)[:, None] / 2000
    rows: Tensor = LAYOUTS[layout](values, n)
    assert rows.shape[0] == len(values)
    assert rows[0].numel() == n
    exact = n**0.5 * values[:, 0].double()
    low = 1 - ops.row_norm_sq(rows).double().sqrt() / exact
    assert low.max() <= 2.0**-19


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clip_accumulate(layout: str) -> None:
    """No sample's contribution passes the threshold."""
    values = 1 + torch.arange(200)[:, None] / 200
    for row in LAYOUTS[layout](values, 1024).split(1):
        total = ops.clip_accumulate([row], 1.0)[0][0]
        assert total.double().norm() <= 1
