"""Rows of secure mode: drawn at the rate that is accounted, and nobody can foresee them."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from fractions import Fraction

import pytest
import torch
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fastclip.data import sampling
from fastclip.data.draws import SampledBatches
from fastclip.data.loader import draw_securely, watch_draws
from fastclip.data.sampling import permutation, poisson_sample
from fastclip.errors import ArgumentError
from tests.ops.noise.laws import ALPHA

DATA = TensorDataset(torch.arange(20.0))


@pytest.mark.parametrize("rate", [1e-3, 1 / 3, 0.9])
def test_the_rate(rate: float) -> None:
    drawn = poisson_sample(200_000, rate)
    low, high = stats.binom.ppf([ALPHA / 2, 1 - ALPHA / 2], 200_000, rate)
    assert low <= len(drawn) <= high
    assert torch.equal(drawn, drawn.unique())


@pytest.mark.parametrize("rate", [1e-9, 2**-24, 1 / 3, 0.1 + 0.2, 1 - 2**-53])
def test_the_rate_is_never_exceeded(rate: float, monkeypatch) -> None:
    """The share of words that draw a row is floor(rate 2^64) / 2^64: seen at the border."""
    below = int(Fraction(rate) * 2**64)
    border = below - 2**63
    words = torch.tensor([-(2**63), border - 1, border, 2**63 - 1])
    monkeypatch.setattr(sampling, "random_words", lambda n: contextlib.nullcontext(words[:n]))
    assert poisson_sample(4, rate).tolist() == [0, 1]
    assert 0 <= Fraction(rate) - Fraction(below, 2**64) < Fraction(1, 2**64)


def test_rates_of_one_and_no_rows() -> None:
    assert poisson_sample(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert poisson_sample(0, 0.5).tolist() == []


def test_rows_are_drawn_independently() -> None:
    """Of 4 rows at rate 1/2 all 16 subsets are equally likely: chi-square."""
    counts = Counter(tuple(poisson_sample(4, 0.5).tolist()) for _ in range(8000))
    assert len(counts) == 16
    assert stats.chisquare(list(counts.values())).pvalue > ALPHA


def test_orders_are_uniform() -> None:
    counts = Counter(tuple(permutation(4).tolist()) for _ in range(12_000))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > ALPHA


def test_shuffled_loaders_show_every_row_once_whatever_the_seed() -> None:
    def epoch() -> list[float]:
        torch.manual_seed(0)
        loader = DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
        draw_securely(loader)
        assert isinstance(loader.batch_sampler.sampler, RandomSampler)
        return [float(x) for (batch,) in loader for x in batch]

    first, second = epoch(), epoch()
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_samplers_of_other_lengths_and_subsets() -> None:
    many = DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=50))
    draw_securely(many)
    rows = Counter(float(x) for (batch,) in many for x in batch)
    assert sum(rows.values()) == 50
    assert set(rows.values()) == {2, 3}
    subset = DataLoader(DATA, 4, sampler=SubsetRandomSampler([3, 5, 7]))
    draw_securely(subset)
    draw_securely(subset)  # a second engine
    assert sorted(float(x) for (batch,) in subset for x in batch) == [3, 5, 7]


@pytest.mark.parametrize("kind", [RandomSampler, SubsetRandomSampler])
def test_orders_do_not_follow_torchs_seed(kind: type) -> None:
    loader = DataLoader(DATA, 4, sampler=kind(range(20)))
    draw_securely(loader)
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        orders.append([row for batch in loader.batch_sampler for row in batch])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


class Bucket(BatchSampler):
    """Batches by its own draws, whatever its sampler says."""

    def __iter__(self):
        return iter(torch.randperm(20).view(5, 4).tolist())


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 20, 20),
        RandomSampler(DATA, replacement=True),
        Bucket(RandomSampler(DATA), 4, drop_last=False),
        BatchSampler(WeightedRandomSampler([1.0] * 20, 20), 4, drop_last=False),
    ],
)
def test_samplers_that_draw_in_a_way_of_their_own_are_refused(sampler) -> None:
    kind = "batch_sampler" if isinstance(sampler, BatchSampler) else "sampler"
    with pytest.raises(
        ArgumentError, match=r"secure_mode=True expects Poisson sampling.*(Random|Bucket)"
    ):
        draw_securely(DataLoader(DATA, **{kind: sampler}))


def test_long_lists_of_rows_are_drawn_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 7)
    assert poisson_sample(50, 1 - 2**-50).tolist() == list(range(50))
    assert sorted({int(i) for _ in range(60) for i in poisson_sample(20, 0.2)}) == list(range(20))


def test_words_are_erased() -> None:
    with sampling.random_words(100) as words:
        assert words.any()
    assert not words.any()


def test_whatever_the_default_device() -> None:
    try:
        torch.set_default_device("meta")
        drawn, order = poisson_sample(100, 0.5), permutation(10)
    finally:
        torch.set_default_device(None)
    assert drawn.device.type == order.device.type == "cpu"


def test_samplers_that_are_watched_are_pickled_plain() -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    draw_securely(loader)
    for _ in range(3):
        watch_draws(loader, SampledBatches(independent=False, required=False))
        draw_securely(loader)
    copied = pickle.loads(pickle.dumps(loader.batch_sampler))
    assert type(copied) is BatchSampler
    assert sorted(row for batch in copied for row in batch) == list(range(20))
