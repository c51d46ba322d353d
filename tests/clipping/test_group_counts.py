"""Counts of groups: who is in each, one way and the other, however many groups there are."""

from __future__ import annotations

import pytest
import torch

from bench.cost import Cost
from fastclip.clipping.thresholds import two_way_counts


@pytest.mark.parametrize("count", [1, 3, 1000])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_counts_are_of_each_group(rows: int, count: int) -> None:
    torch.manual_seed(rows + count)
    groups = torch.randint(-1, count, (rows,))
    first = torch.rand(rows) < 0.5
    found = two_way_counts(first, groups, count)
    assert found.dtype == torch.float64
    for k in range(count):
        mine = [bool(way) for way, group in zip(first, groups, strict=True) if group == k]
        assert found[:, k].tolist() == [sum(mine), len(mine) - sum(mine)]


def test_cost_grows_with_rows_and_groups_not_with_their_product() -> None:
    rows, count = 3000, 2000
    with Cost() as cost:
        two_way_counts(torch.ones(rows, dtype=torch.bool), torch.arange(rows) % count, count)
    assert cost.total["bytes"] < 200 * (rows + count)
