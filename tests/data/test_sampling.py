"""Poisson sampling: how often each row is drawn, and that each is drawn by itself.

Every test of a law has a false alarm rate of about 1e-6, its seeds aside.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from scipy import stats
from torch import Tensor

from fastclip.data.loader import PoissonSampler
from fastclip.data.sampling import _below, poisson_sample

ALPHA = 1e-6


def sampler(n: int, rate: float, secure: bool = False, **options: Any) -> PoissonSampler:
    generator = torch.Generator().manual_seed(11)
    return PoissonSampler(
        num_samples=n, sample_rate=rate, steps=4, generator=generator, secure=secure, **options
    )


def draws(source: PoissonSampler, times: int, n: int) -> Tensor:
    """Who was in each draw, bool [times, n]."""
    found = torch.zeros(times, n, dtype=torch.bool)
    for i in range(times):
        found[i, source.draw()] = True
    return found


def assert_frequencies(counts: Tensor, times: int, rates: Tensor) -> None:
    """Binomial, independent over rows: the squares of the normalized counts add up to chi-square."""
    z = (counts.double() - times * rates) / (times * rates * (1 - rates)).sqrt()
    assert stats.chi2.sf(float(z.square().sum()), len(z)) > ALPHA / 2
    assert stats.chi2.cdf(float(z.square().sum()), len(z)) > ALPHA / 2


def assert_pairwise_independent(drawn: Tensor, rates: Tensor) -> None:
    """Every pair of rows: a 2 x 2 table each, the largest deviation held against all of them."""
    times, n = drawn.shape
    both = drawn.double().T @ drawn.double()
    expected = times * rates[:, None] * rates[None]
    z = (both - expected) / (expected * (1 - rates[:, None] * rates[None])).sqrt()
    pairs = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    most = float(z[pairs].abs().max())
    assert stats.norm.sf(most) * 2 * int(pairs.sum()) > ALPHA


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_inclusion_frequencies_and_pairwise_independence(weighted: bool, secure: bool) -> None:
    n, times = 40, 10_000
    rates = torch.linspace(0.02, 0.6, n, dtype=torch.float64)
    if not weighted:
        rates = torch.full((n,), 0.17, dtype=torch.float64)
    drawn = draws(
        sampler(n, float(rates.max()), secure, rates=rates if weighted else None), times, n
    )
    assert_frequencies(drawn.sum(0), times, rates)
    assert_pairwise_independent(drawn, rates)


@pytest.mark.parametrize("secure", [False, True])
def test_draws_are_independent_of_the_ones_before(secure: bool) -> None:
    drawn = draws(sampler(20, 0.3, secure), 10_000, 20)
    after = (drawn[:-1] & drawn[1:]).sum(0)
    assert_frequencies(after, len(drawn) - 1, torch.full((20,), 0.09, dtype=torch.float64))


@pytest.mark.parametrize("secure", [False, True])
def test_rates_of_0_and_1_are_certain(secure: bool) -> None:
    rates = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    drawn = draws(sampler(5, 1.0, secure, rates=rates), 200, 5)
    assert drawn.sum(0)[[0, 1, 3, 4]].tolist() == [0, 200, 0, 200]


def test_a_small_rate_is_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 uniform below 10^-6 has probability 17 / 2^24, 1.3% too much; Opacus' rule."""
    every = torch.arange(2**24, dtype=torch.float32) / 2**24

    def rand(n: int, **kwargs: Any) -> Tensor:
        return every if kwargs["dtype"] == torch.float32 else torch.full((n,), 0.9).double()

    rate = 1e-6
    assert int((every < rate).sum()) == 17
    source = sampler(2**24, rate)
    monkeypatch.setattr(torch, "rand", rand)
    assert source.draw().tolist() == list(range(16))  # and row 16 with probability 0.777
    monkeypatch.setattr(
        torch, "rand", lambda n, **k: every if n == 2**24 else torch.full((n,), 0.7).double()
    )
    assert source.draw().tolist() == list(range(17))


@pytest.mark.parametrize("rate", [1 / 93, 0.25, 1.0, 0.0])
def test_seeded_draws_are_opacus_own(rate: float) -> None:
    """The same generator, the same rows: a run that was seeded for Opacus stays what it was."""
    theirs = UniformWithReplacementSampler(
        num_samples=5000, sample_rate=rate, steps=4, generator=torch.Generator().manual_seed(11)
    )
    assert list(sampler(5000, rate)) == list(theirs)


def test_row_wise_rates_compare_all_64_bits() -> None:
    """Words at the border: floor(q 2^64) of them are below, in both halves of the integers."""

    for rate in (2.0**-64, 3 * 2.0**-64, 0.3, 0.5, 0.5 + 2**-53, 0.7, 1 - 2.0**-53):
        border = int(rate * 2.0**64)
        words = [border + d - 2**63 for d in (-1, 0, 1) if 0 <= border + d < 2**64]
        found = _below(torch.tensor(words), torch.full((len(words),), rate, dtype=torch.float64))
        assert found.tolist() == [w + 2**63 < border for w in words], rate
    rates = torch.zeros(7, dtype=torch.float64)
    assert poisson_sample(7, rates).tolist() == []
    assert poisson_sample(7, rates + 1).tolist() == list(range(7))


# Truncated


@pytest.mark.parametrize("secure", [False, True])
def test_truncated_draws_are_uniformly_random_subsets(secure: bool) -> None:
    """Poisson first, then a uniformly random subset: P(S) of all subsets of at most 2 of 4 rows."""
    n, q, most, times = 4, 0.5, 2, 12_000
    source = sampler(n, q, secure, max_batch_size=most)
    found = Counter(tuple(source.draw().tolist()) for _ in range(times))
    expected: Counter = Counter()
    for size in range(n + 1):
        for drawn in itertools.combinations(range(n), size):
            kept = list(itertools.combinations(drawn, min(size, most)))
            for subset in kept:
                expected[subset] += q**size * (1 - q) ** (n - size) / len(kept) * times
    assert set(found) == set(expected)
    keys = sorted(expected)
    test = stats.chisquare([found[k] for k in keys], [expected[k] for k in keys])
    assert test.pvalue > ALPHA


@pytest.mark.parametrize("secure", [False, True])
def test_the_law_of_truncation_that_is_accounted(secure: bool) -> None:
    """A row is kept with the probability that dp-accounting's analysis computes from q, N and m.

    Given that at least m others are drawn, the row is in the batch with probability
    P(Binomial(N, q) > m) m / (N P(Binomial(N - 1, q) >= m)).
    """
    n, q, most, times = 30, 0.3, 8, 8_000
    kept = draws(sampler(n, q, secure, max_batch_size=most), times, n)
    assert int(kept.sum(1).max()) == most
    full = float(stats.binom.sf(most - 1, n - 1, q))
    given = float(stats.binom.sf(most, n, q)) * most / full / n
    chance = (1 - full) * q + full * given
    counts = int(kept[:, 0].sum()), times - int(kept[:, 0].sum())
    assert stats.chisquare(counts, [chance * times, (1 - chance) * times]).pvalue > ALPHA
    each = kept.sum(0).double()
    z = (each - times * chance) / (times * chance * (1 - chance)) ** 0.5
    assert stats.norm.sf(float(z.abs().max())) * 2 * n > ALPHA


def test_rows_of_a_subset_are_drawn_by_their_own_numbers() -> None:
    source = sampler(3, 1.0, samples=torch.tensor([7, 2, 9]))
    assert list(source) == [[7, 2, 9]] * 4
    cut = sampler(3, 1.0, samples=torch.tensor([7, 2, 9]), max_batch_size=2)
    assert all(len(rows) == 2 and set(rows) <= {7, 2, 9} for rows in cut)
