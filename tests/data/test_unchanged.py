"""What a sampler is told after make_private reaches no draw that is recorded as another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine
from fastclip.errors import StepError
from tests.refusal import refused

N, D, STEPS = 60, 3, 6


def start(accountant: str = "rdp", secure: bool = False, loader: Any = None, **told: Any) -> tuple:
    torch.manual_seed(0)
    engine, model = FastPrivacyEngine(accountant=accountant, secure_mode=secure), nn.Linear(D, 1)
    data = TensorDataset(torch.randn(N, D))
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, N // STEPS, **(loader or {})), noise_multiplier=1.0,
        max_grad_norm=1.0, **told,
    )  # fmt: skip
    return engine, *made


def train(run: tuple) -> list[int]:
    """A pass; rows of each draw."""
    _, model, optimizer, loader = run
    sizes = []
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sizes.append(len(x))
    return sizes


def faster(sampler: Any) -> None:
    sampler.sample_rate = 0.5


def of_more(sampler: Any) -> None:
    sampler.num_samples = 2 * N


def foreseen(sampler: Any) -> None:
    sampler.secure = False


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (faster, {}),
        (faster, {"grad_sample_mode": "hooks"}),
        (faster, {"secure": True}),
        (of_more, {}),
        (foreseen, {"secure": True}),
    ],
)
def test_another_draw_than_the_recorded_one_is_refused(change: Callable, told: dict) -> None:
    """In the middle of a pass, too: no step of it is taken, and none is recorded at the old rate."""
    run = start(**told)
    train(run)
    ahead = iter(run[-1])
    next(ahead)
    change(run[-1].batch_sampler)
    with refused("make_private again", StepError):
        next(ahead)
    with refused("make_private again", StepError):
        train(run)
    assert run[0].accountant.history == [(1.0, 1 / STEPS, STEPS)]


def test_a_draw_that_is_not_cut_any_more_is_refused() -> None:
    pytest.importorskip("dp_accounting")
    run = start("pld", max_batch_size=12)
    run[-1].batch_sampler.max_batch_size = None
    with refused(
        "max_batch_size of the returned data loader's sampler changed after make_private", StepError
    ):
        train(run)


def test_weights_that_are_changed_in_place_reach_no_draw() -> None:
    weights = torch.ones(N, dtype=torch.float64)
    run = start(loader={"sampler": WeightedRandomSampler(weights, N)})
    for rates in (run[-1].batch_sampler.rates, run[0].sampling.rates):
        rates.fill_(1.0)
    weights.fill_(9.0)
    assert sum(train(run)) < 2 * N
    with pytest.raises(AttributeError):
        run[-1].batch_sampler.rates = torch.ones(N, dtype=torch.float64)


def test_weights_are_those_of_another_loader_no_more() -> None:
    """A second make_private on a loader that has rates keeps its own."""
    weights = torch.ones(N, dtype=torch.float64)
    first = start(loader={"sampler": WeightedRandomSampler(weights, N)})
    model = nn.Linear(D, 1)
    second = FastPrivacyEngine(accountant="rdp")
    made = second.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=first[-1],
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    first[-1].batch_sampler._rates.fill_(1.0)
    assert sum(train((second, *made))) < 2 * N


@pytest.mark.parametrize("name", ["_samples", "_rates"])
def test_rows_cannot_be_put_in_the_place_of_the_drawn_ones(name: str) -> None:
    run = start()
    sampler = run[-1].batch_sampler
    with pytest.raises(AttributeError):
        setattr(sampler, name[1:], torch.zeros(N, dtype=torch.int64))
    setattr(sampler, name, torch.zeros(N, dtype=torch.int64))
    with refused("sampler changed after make_private", StepError):
        train(run)
    assert not run[0].accountant.history


def test_units_are_drawn_as_they_were() -> None:
    run = start(unit_ids=torch.arange(N) // 2, max_samples_per_unit=1)
    run[-1].batch_sampler.max_samples_per_unit = None
    with refused("max_samples_per_unit", StepError):
        train(run)


def test_what_costs_no_more_may_be_changed() -> None:
    run = start()
    sampler = run[-1].batch_sampler
    sampler.sample_rate, sampler.steps, sampler.generator = 0.01, 3, torch.Generator()
    train(run)
    assert run[0].accountant.history == [(1.0, 1 / STEPS, 3)]


def test_an_order_that_begins_to_repeat_rows_is_refused() -> None:
    run = start(loader={"shuffle": True}, poisson_sampling=False)
    train(run)
    run[-1].batch_sampler.sampler.replacement = True
    with refused(
        "replacement of the returned data loader's sampler changed after make_private", StepError
    ):
        train(run)
