"""Random allocation: where each sample goes, what is recorded, and what raises an error."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from fastclip import FastPrivacyEngine
from fastclip.accounting import epsilon
from fastclip.accounting.allocation import RandomAllocation
from fastclip.clipping import StepNoise, dp_sgd
from fastclip.data.sampling import Allocation, OwnOrder, Poisson, allocation
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.refusal import refused

N, T = 12, 4


def data(n: int = N) -> TensorDataset:
    return TensorDataset(torch.randn(n, 3), torch.arange(n))


def private(loader: DataLoader | None = None, *, secure: bool = False, **asked: Any) -> Any:
    """(engine, model, optimizer, loader) of a small private model."""
    model = nn.Linear(3, 2)
    engine = FastPrivacyEngine(accountant="pld", secure_mode=secure)
    asked = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sampling": "allocation"} | asked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), N // T) if loader is None else loader, **asked,
        )  # fmt: skip
    return engine, *made


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum(1).mean().backward() if len(x) else model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_every_sample_is_in_as_many_batches_of_a_pass(times: int, secure: bool) -> None:
    *_, loader = private(sampling=Allocation(times), secure=secure)
    for _ in range(5):
        batches = [numbers.tolist() for _, numbers in loader]
        assert len(batches) == T
        assert all(numbers == sorted(set(numbers)) for numbers in batches)
        assert Counter(chain.from_iterable(batches)) == dict.fromkeys(range(N), times)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("steps", "times"), [(5, 1), (5, 2), (4, 3)])
def test_every_choice_of_batches_is_as_likely(steps: int, times: int, secure: bool) -> None:
    """Of one sample and of two together, against the uniform law at a level of 1e-4."""
    generator = None if secure else torch.Generator().manual_seed(0)
    n = 20_000
    found: list[list[int]] = [[] for _ in range(n)]
    for number, units in enumerate(allocation(n, steps, times, generator)):
        for unit in units.tolist():
            found[unit].append(number)
    subsets = Counter(map(tuple, found))
    assert len(subsets) == math.comb(steps, times)
    assert chisquare(list(subsets.values())).pvalue > 1e-4
    pairs = Counter(zip(map(tuple, found[::2]), map(tuple, found[1::2]), strict=True))
    everything = math.comb(steps, times) ** 2
    assert chisquare([*pairs.values(), *[0] * (everything - len(pairs))]).pvalue > 1e-4


def test_a_pass_is_recorded_whole_before_its_first_step() -> None:
    engine, model, optimizer, loader = private()
    entry = (1.0, RandomAllocation(T, 1))
    for passes in (1, 2):
        for x, _ in loader:
            step(model, optimizer, x)
            assert engine.accountant.history == [(*entry, passes)]
    for x, _ in loader:  # ends early, and the next pass makes another choice
        step(model, optimizer, x)
        break
    for x, _ in loader:
        step(model, optimizer, x)
        assert engine.accountant.history == [(*entry, 4)]
    for _ in loader:  # a pass without a step releases nothing
        pass
    assert engine.accountant.history == [(*entry, 4)]


def test_another_pass_makes_another_choice() -> None:
    *_, loader = private(DataLoader(data(200), 20))
    one, other = ([numbers.tolist() for _, numbers in loader] for _ in range(2))
    assert one != other


def test_less_noise_within_a_pass_is_recorded_in_addition() -> None:
    engine, model, optimizer, loader = private()
    for number, (x, _) in enumerate(loader):
        optimizer.noise_multiplier = 1.0 if number < 2 else 0.5
        step(model, optimizer, x)
    rate = RandomAllocation(T, 1)
    assert engine.accountant.history == [(1.0, rate, 1), (0.5, rate, 1)]


@pytest.mark.parametrize("sampling", ["allocation", "loader"])
def test_a_schedule_is_recorded_at_the_least_noise_of_each_pass(sampling: str) -> None:
    """As planned, and before the first step, which has more noise."""
    strategy = replace(dp_sgd(), noise=StepNoise(2 * T, T, 0.9))
    engine, model, optimizer, loader = private(sampling=sampling, clipping=strategy)
    sigmas = []
    for passes in range(2):
        for x, _ in loader:
            sigmas.append(optimizer.noise_multiplier)
            step(model, optimizer, x)
            assert len(engine.accountant.history) == passes + 1
    rate = RandomAllocation(T) if sampling == "allocation" else 1.0
    assert len(set(sigmas)) == T
    assert engine.accountant.history == [(min(sigmas[:T]), rate, 1), (min(sigmas[T:]), rate, 1)]
    assert list(engine.mechanism(epochs=2).planned) == engine.accountant.history


def test_epsilon_is_below_that_of_poisson_sampling() -> None:
    found = {}
    for sampling in ("poisson", "allocation", "loader"):
        engine, model, optimizer, loader = private(
            DataLoader(data(200), 2), sampling=sampling, max_grad_norm=1e-6
        )
        for x, _ in loader:
            step(model, optimizer, x)
        found[sampling] = engine.get_epsilon(1e-5)
    assert found["allocation"] < found["poisson"] < found["loader"]


def test_the_design_and_the_mechanism_say_it() -> None:
    engine, *_ = private(sample_rate=1 / 6, expected_batch_size=2.0)
    design = engine.sampling
    assert (design.sampler, design.steps, design.rate) == ("random allocation", 6, 1 / 6)
    assert (design.expected_batch_size, design.public, design.poisson) == (2.0, True, False)
    said = str(engine.mechanism(delta=1e-5))
    assert "random allocation, q = 0.166667; a pass is accounted as a whole" in said
    assert "added or removed" in said
    assert engine.mechanism().as_json()["sampler"] == "random allocation"


def test_the_number_of_batches_stays_when_a_sample_is_removed() -> None:
    asked = {"sample_rate": 0.25, "expected_batch_size": 3.0}
    designs = [private(DataLoader(data(n), 3), **asked)[0].sampling for n in (N, N - 1)]
    assert [d.steps for d in designs] == [T, T]
    assert [d.expected_batch_size for d in designs] == [3.0, 3.0]


def test_units_are_allocated_with_all_their_samples() -> None:
    ids = [0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 4, 5]
    *_, loader = private(unit_ids=ids)
    batches = [numbers.tolist() for _, numbers in loader]
    assert sorted(chain.from_iterable(batches)) == list(range(N))
    held = [{ids[k] for k in numbers} for numbers in batches]
    assert sum(map(len, held)) == 6


def test_a_subset_of_the_samples() -> None:
    loader = DataLoader(data(), 2, sampler=torch.utils.data.SubsetRandomSampler([1, 3, 5, 7]))
    *_, loader = private(loader)
    assert sorted(k for _, numbers in loader for k in numbers.tolist()) == [1, 3, 5, 7]
    *_, loader = private(DataLoader(Subset(data(), [1, 3, 5, 7]), 2))
    assert sorted(k for _, numbers in loader for k in numbers.tolist()) == [1, 3, 5, 7]


def test_workers_and_empty_batches() -> None:
    engine, model, optimizer, loader = private(DataLoader(data(3), 1, num_workers=1))
    sizes = []
    for _ in range(6):
        for x, _ in loader:
            sizes.append(len(x))
            step(model, optimizer, x)
    assert sum(sizes) == 6 * 3
    assert 0 in sizes
    assert engine.accountant.history == [(1.0, RandomAllocation(3, 1), 6)]


def test_a_seed_repeats_the_batches() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        *_, loader = private(DataLoader(data(50), 5, generator=torch.Generator().manual_seed(3)))
        found.append([numbers.tolist() for _ in range(2) for _, numbers in loader])
    assert found[0] == found[1]


def test_batches_are_not_joined() -> None:
    _, model, _, loader = private(DataLoader(data(40), 10))
    batches = iter(loader)
    model(next(batches)[0]).square().sum(1).mean().backward()
    with refused("Call optimizer.step"):
        model(next(batches)[0]).square().sum(1).mean().backward()


def test_a_changed_number_of_batches() -> None:
    *_, loader = private()
    loader.batch_sampler.steps = 2
    with pytest.raises(StepError, match="steps of the returned data loader's sampler changed"):
        list(loader)


class Own(Sampler):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(data())

    def __len__(self) -> int:
        return N


WRONG: dict[str, tuple[DataLoader | None, dict[str, Any], str]] = {
    "poisson_sampling too": (None, {"poisson_sampling": True}, "Omit poisson_sampling"),
    "and without": (None, {"poisson_sampling": False}, "Omit poisson_sampling"),
    "an own sampler": (DataLoader(data(), 3, sampler=Own(N)), {}, "Own"),
    "weights": (DataLoader(data(), 3, sampler=WeightedRandomSampler([1.0] * N, N)), {}, "Weighted"),
    "drop_last": (DataLoader(data(), 3, drop_last=True), {}, "drop_last=False"),
    "a stream": (DataLoader(Stream(), 3), {}, "IterableDataset"),
    "too many times": (None, {"sampling": Allocation(5)}, "fewer times"),
    "no whole number": (None, {"sample_rate": 0.3}, "Pass sample_rate=1/3"),
    "truncated": (None, {"max_batch_size": 3}, "Omit max_batch_size"),
    "a mode of Opacus": (None, {"grad_sample_mode": "hooks"}, "Omit grad_sample_mode"),
    "a name": (None, {"sampling": "alocation"}, "'poisson', 'allocation', 'loader'"),
    "an accountant without it": (None, {"accountant": "gdp"}, "pld"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_errors(wrong: tuple[DataLoader | None, dict[str, Any], str]) -> None:
    loader, asked, message = wrong
    if "accountant" in asked:
        model = nn.Linear(3, 2)
        with refused(message, ArgumentError):
            FastPrivacyEngine(**asked).make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data(), 3), noise_multiplier=1.0, max_grad_norm=1.0,
                sampling="allocation",
            )  # fmt: skip
        return
    with refused(message, ArgumentError):
        private(loader, **asked)


def test_a_loader_that_allocates_already() -> None:
    *_, loader = private()
    for sampling in ("allocation", "poisson", "loader"):
        with refused("the data loader that you gave to make_private", ArgumentError):
            private(loader, sampling=sampling)


@pytest.mark.parametrize("times", [0, -1, 1.5])
def test_times_that_are_no_number(times: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="times"):
        Allocation(times)


def test_a_law_and_its_name() -> None:
    for name, law in {
        "poisson": Poisson(),
        "allocation": Allocation(),
        "loader": OwnOrder(),
    }.items():
        designs = [private(sampling=each)[0].sampling for each in (name, law)]
        assert designs[0] == designs[1]
    with pytest.raises(ArgumentTypeError, match="sampling expects one of"):
        private(sampling=3)


def test_a_budget_in_whole_passes() -> None:
    model = nn.Linear(3, 2)
    engine = FastPrivacyEngine(accountant="pld")
    with pytest.warns(UserWarning, match=r"2.5 epochs .* 3 whole passes"):
        made = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epochs=2.5,
            data_loader=DataLoader(data(40), 2), target_epsilon=2.0, target_delta=1e-5,
            max_grad_norm=1.0, sampling="allocation",
        )  # fmt: skip
    assert engine.mechanism().planned == ((made[1].noise_multiplier, RandomAllocation(20, 1), 3),)
    for _ in range(3):
        for x, _ in made[2]:
            step(made[0], made[1], x)
    assert 1.97 <= engine.get_epsilon(1e-5) <= 2.0


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_a_budget_of_falling_noise(times: int, epochs: int) -> None:
    """The planned history spends the target, at the least noise of each pass."""
    noise = StepNoise(20 * epochs, 3, decay=0.7)
    model = nn.Linear(3, 2)
    engine = FastPrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epochs=epochs,
        data_loader=DataLoader(data(40), 2), target_epsilon=2.0, target_delta=1e-5,
        max_grad_norm=1.0, sampling=Allocation(times),
        clipping=replace(dp_sgd(), noise=noise),
    )  # fmt: skip
    planned = engine.mechanism().planned
    assert sum(count for *_, count in planned) == epochs
    assert planned[0][0] <= made[1].noise_multiplier
    assert 1.97 <= epsilon(planned, 1e-5) <= 2.0
