"""Steps that are planned, taken, and said to be taken."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.accounting.calibration import steps_of
from fastclip.data.design import SamplingDesign, epochs_of
from fastclip.data.plan import Request, plan_sampling, prepare


def test_a_pass_of_every_length_has_as_many_steps_as_the_loader() -> None:
    """Opacus' int(1 / q) loses a step at 49, 93, 99, 105, ...; the ceiling adds one at others."""
    lost = [n for n in range(1, 5001) if int(1 / (1 / n)) != n]
    assert {49, 93, 99, 105} & set(lost)
    assert [n for n in range(1, 5001) if steps_of(1 / n) != n] == []


@pytest.mark.parametrize("secure", [False, True])
def test_steps_are_taken_as_planned_for_every_length(secure: bool) -> None:
    """The very sampler that make_private puts in, at every loader length from 1 to 5000."""
    data = TensorDataset(torch.zeros(5000, 1))
    whole = DataLoader(data, 1)
    for n in range(1, 5001):
        subset = torch.utils.data.Subset(data, range(n))
        plan = plan_sampling(DataLoader(subset, 1), Request(), secure=secure)
        sampler = plan.sampler(None)
        assert len(sampler) == sampler.steps == plan.design.steps == steps_of(plan.design.rate) == n
        public = Request(sample_rate=1 / n, expected_batch_size=1)
        given = plan_sampling(whole, public, secure=secure)
        assert given.sampler(None).steps == given.design.steps == n
        if n in (1, 2, 49, 93, 99, 105, 107, 500):
            assert sum(1 for _ in sampler) == n


@pytest.mark.parametrize("n", [1, 2, 49, 93, 99, 105, 4999])
@pytest.mark.parametrize("epochs", [0.1, 0.5, 0.28, 1 / 3, 1, 1.5, 2.999, 3, 0.1 + 0.2, 17.25])
def test_fractional_epochs(epochs: float, n: int) -> None:
    """The whole steps of the product, as transformers' Trainer takes them; never one too few."""
    design = SamplingDesign("Poisson", 1 / n, 1, n, n)
    assert steps_of(1 / n, epochs) == design.steps_in(epochs) == math.ceil(epochs * n)
    assert steps_of(1 / n, epochs) >= Fraction(epochs) * n - Fraction(1, 10**9)


def test_epochs_of_a_number_of_steps() -> None:
    """steps / n epochs may be planned one too long: 7 / 25 of 25 steps are 8."""
    assert steps_of(1 / 25, 7 / 25) == 8
    for n in (*range(1, 130), 4999, 5000):
        for steps in (*range(400), 10**6, 10**8 + 1):
            assert steps_of(1 / n, epochs_of(steps, n)) == steps


def test_rates_that_do_not_divide_one() -> None:
    assert [steps_of(q) for q in (1.0, 0.7, 0.3, 0.26, 1e-6)] == [1, 1, 3, 4, 10**6]


@pytest.mark.parametrize("length", [93, 99, 105])
def test_the_loader_that_comes_back(length: int) -> None:
    data = TensorDataset(torch.zeros(2 * length, 1))
    found = prepare(DataLoader(data, 2), Request(), FastPrivacyEngine().accountant, None)
    loader, design = found.loader, found.design
    assert len(loader) == design.steps == sum(1 for _ in loader) == length
    assert (design.rate, design.expected_batch_size) == (1 / length, 2)
