"""Cyclic Poisson sampling: which group a step draws from, how often, and what is recorded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine
from fastclip.data.sampling import CyclicPoisson
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.refusal import refused

N, T, B = 60, 12, 4


def private(loader: DataLoader | None = None, *, secure: bool = False, **asked: Any) -> Any:
    """(engine, model, optimizer, loader) of a small private model."""
    model = nn.Linear(3, 2)
    engine = FastPrivacyEngine(secure_mode=secure)
    data = TensorDataset(torch.randn(N, 3), torch.arange(N))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, N // T) if loader is None else loader, noise_multiplier=1.0,
            max_grad_norm=1.0, **{"sampling": CyclicPoisson(B)} | asked,
        )  # fmt: skip
    return engine, *made


@pytest.mark.parametrize("secure", [False, True])
def test_a_step_draws_from_its_group_at_b_times_the_rate(secure: bool) -> None:
    """Two-sided binomial tests of each sample at a level of 1e-6."""
    *_, loader = private(secure=secure)
    passes = 200
    came = torch.zeros(N, dtype=torch.int64)
    for _ in range(passes):
        for number, (_, samples) in enumerate(loader):
            assert (samples % B == number % B).all()
            came[samples] += 1
    for often in came.tolist():
        assert binomtest(often, passes * T // B, B / T).pvalue > 1e-6
    assert binomtest(int(came.sum()), N * passes * T // B, B / T).pvalue > 1e-6


def test_a_turn_is_recorded_before_its_first_step() -> None:
    engine, model, optimizer, loader = private()

    def take(steps: int) -> int:
        for taken, (x, _) in enumerate(loader, 1):
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward() if len(x) else model(x).sum().backward()
            optimizer.step()
            if taken == steps:
                break
        return sum(count for *_, count in engine.accountant.history)

    assert [take(steps) for steps in (1, B, B + 1, T)] == [1, 2, 4, 7]
    assert engine.accountant.history == [(1.0, B / T, 7)]
    assert len(engine.mechanism(epochs=2).planned) == 1
    assert engine.mechanism(epochs=2).planned[0] == (1.0, B / T, 2 * T // B)


def test_the_design_says_it() -> None:
    engine, *_ = private(sample_rate=1 / T, expected_batch_size=5.0)
    design = engine.sampling
    assert (design.sampler, design.rate, design.groups) == ("cyclic Poisson", B / T, B)
    assert (design.expected_batch_size, design.public, design.poisson) == (5.0, False, False)
    said = str(engine.mechanism(delta=1e-5))
    assert "a turn through the groups is accounted as one step" in said
    assert "which decides the groups, is public" in said
    assert "zero-out" in said


def test_units_are_drawn_from_their_group() -> None:
    ids = [k // 3 for k in range(N)]
    *_, loader = private(unit_ids=ids)
    for number, (_, samples) in enumerate(loader):
        assert (samples // 3 % B == number % B).all()


def test_a_loader_that_samples_in_turn_already() -> None:
    *_, loader = private()
    for sampling in (CyclicPoisson(B), "poisson", "allocation", "loader"):
        with refused("the data loader that you gave to make_private", ArgumentError):
            private(loader, sampling=sampling)


def test_errors() -> None:
    with refused("fewer groups", ArgumentError):
        private(sampling=CyclicPoisson(T + 1))
    with refused("Omit max_batch_size", ArgumentError):
        private(max_batch_size=3)
    data = TensorDataset(torch.randn(N, 3), torch.arange(N))
    weighted = DataLoader(data, 5, sampler=WeightedRandomSampler([1.0] * N, N))
    with refused("WeightedRandomSampler", ArgumentError):
        private(weighted)
    for groups in (0, 2.5, "a"):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="groups"):
            CyclicPoisson(groups)
