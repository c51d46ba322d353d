"""Poisson sampling of units: each by itself, with all its rows or a random few of them, once.

Every test of a law has a false alarm rate of about 1e-6, its seeds aside.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from fastclip.data.loader import UnitSampler
from tests.data.test_sampling import (
    ALPHA,
    assert_frequencies,
    assert_pairwise_independent,
    draws,
)

UNIT = torch.tensor([2, 0, 1, 2, 2, 3, 1, 2, -1, 0, 2])
ROWS = {0: [1, 9], 1: [2, 6], 2: [0, 3, 4, 7, 10], 3: [5]}


def sampler(
    rate: float = 0.4,
    secure: bool = False,
    steps: int = 3,
    unit: torch.Tensor = UNIT,
    **options: Any,
) -> UnitSampler:
    generator = torch.Generator().manual_seed(5)
    return UnitSampler(
        unit, sample_rate=rate, steps=steps, secure=secure, generator=generator, **options
    )


@pytest.mark.parametrize("secure", [False, True])
def test_a_draw_is_all_rows_of_its_units_each_once(secure: bool) -> None:
    for rows in sampler(secure=secure, steps=300):
        units = list(dict.fromkeys(UNIT[rows].tolist()))
        assert list(rows) == [row for unit in units for row in ROWS[unit]]
        assert rows.sizes == tuple(len(ROWS[unit]) for unit in units)


@pytest.mark.parametrize("secure", [False, True])
def test_units_are_drawn_with_their_rate_and_independently(secure: bool) -> None:
    """A unit of five rows no more often than one of a single row."""
    n, times, q = 30, 10_000, 0.12
    unit = torch.repeat_interleave(torch.arange(n), torch.arange(n) % 5 + 1)
    rates = torch.full((n,), q, dtype=torch.float64)
    drawn = draws(sampler(q, secure, unit=unit[torch.randperm(len(unit))]), times, n)
    assert_frequencies(drawn.sum(0), times, rates)
    assert_pairwise_independent(drawn, rates)


@pytest.mark.parametrize("secure", [False, True])
def test_a_few_rows_of_a_unit_are_a_uniformly_random_subset_drawn_anew(secure: bool) -> None:
    """Of unit 2's five rows two: each of the 10 pairs as often; and independently in the next draw."""
    found = list(sampler(1.0, secure, steps=8_000, max_samples_per_unit=2))
    pairs = []
    for rows in found[:500]:
        assert rows.sizes == (2, 2, 2, 1)
        assert len(set(rows)) == len(rows) == 7
    for rows in found:
        pairs.append(tuple(row for row in rows if row in ROWS[2]))
    counts = Counter(pairs)
    assert len(counts) == 10
    assert stats.chisquare(list(counts.values())).pvalue > ALPHA
    following = Counter(zip(pairs[::2], pairs[1::2], strict=True))
    seen = [following[a, b] for a in counts for b in counts]
    assert stats.chisquare(seen).pvalue > ALPHA


def test_truncated_draws_are_cut_to_units() -> None:
    for rows in sampler(1.0, steps=100, max_batch_size=2):
        assert len(rows.sizes) == 2
        assert sorted(rows) == sorted(r for u in set(UNIT[rows].tolist()) for r in ROWS[u])


def test_what_a_unit_can_bring_at_most() -> None:
    assert (sampler().largest, sampler(max_samples_per_unit=3).largest) == (5, 3)
    assert sampler(max_samples_per_unit=9).largest == 5
    assert sampler().num_samples == 4


def numbers(rows: list) -> list[int]:
    return [int(x) for (x,) in rows]


@pytest.mark.parametrize("workers", [0, 2])
def test_through_a_data_loader(workers: int) -> None:
    data = TensorDataset(torch.arange(11))
    loader = DataLoader(
        data, batch_sampler=sampler(steps=20), num_workers=workers, collate_fn=numbers
    )
    seen = [rows for rows in loader if rows]
    assert len(seen) > 5
    for rows in seen:
        assert rows == [r for u in dict.fromkeys(UNIT[rows].tolist()) for r in ROWS[u]]
