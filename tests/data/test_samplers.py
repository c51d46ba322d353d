"""Samplers whose rows are not those that epsilon is stated for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError
from tests.refusal import refused

N = 12
DATA = TensorDataset(torch.arange(float(N))[:, None])
MODES = ("fast", "hooks")


def start(
    loader: DataLoader, *, poisson: bool = True, mode: str = "fast", secure: bool = False
) -> tuple:
    """(engine, model, optimizer, loader)."""
    net = nn.Linear(1, 1)
    engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
    return engine, *engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=poisson, grad_sample_mode=mode,
    )  # fmt: skip


def train(model: nn.Module, optimizer: Any, loader: DataLoader) -> list[Tensor]:
    seen = []
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        seen.append(x)
    return seen


class Own(Sampler):
    """The user's rows, in this order."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class OwnBatches(BatchSampler):
    """Batches by its own draws, whatever its sampler says."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3], [4, 5, 0, 6])

    def __len__(self) -> int:
        return 2


HELD_OUT: dict[str, Any] = {
    "one's own": {"sampler": Own(list(range(6))), "batch_size": 4},
    "batches": {"batch_sampler": OwnBatches(SequentialSampler(DATA), 4, False)},
    "listed batches": {"batch_sampler": [[0, 1], [2, 3]]},
    "a shorter order": {"sampler": RandomSampler(range(6)), "batch_size": 4},
    "a shorter sequence": {"sampler": SequentialSampler(range(6)), "batch_size": 4},
    "a share": {"sampler": DistributedSampler(DATA, num_replicas=2, rank=0), "batch_size": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HELD_OUT)
def test_poisson_sampling_does_not_take_the_place_of_a_choice_of_rows(name: str, mode: str) -> None:
    loader = DataLoader(DATA, **HELD_OUT[name])
    before = type(loader.batch_sampler)
    with refused(r"torch.utils.data.Subset\(dataset, indices\)", ArgumentError):
        start(loader, mode=mode)
    assert type(loader.batch_sampler) is before


KEPT: dict[str, Any] = {
    "a subset": SubsetRandomSampler(range(6)),
    "weights": WeightedRandomSampler([1.0] * 6 + [0.0] * 6, 6),
}


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KEPT)
def test_poisson_sampling_keeps_a_choice_of_rows(name: str, mode: str, secure: bool) -> None:
    """Six rows of twelve, in three batches: each at the rate 1/3, with B = 2, and no other row."""
    loader = DataLoader(DATA, batch_size=2, sampler=KEPT[name])
    engine, model, optimizer, loader = start(loader, mode=mode, secure=secure)
    assert optimizer.expected_batch_size == 2
    drawn = [x for _ in range(8) for x in train(model, optimizer, loader)]
    assert engine.accountant.history == [(1.0, pytest.approx(1 / 3), 24)]
    seen = torch.cat(drawn).flatten().tolist()
    assert set(seen) == set(range(6))


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_accounted_at_the_largest_rate(mode: str) -> None:
    """Also where a budget is planned: a row of rate 1/2 among rows of 1/6."""
    sampler = WeightedRandomSampler([3.0, 1.0] * 6, N)
    engine, net = FastPrivacyEngine(accountant="rdp"), nn.Linear(1, 1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), grad_sample_mode=mode,
        data_loader=DataLoader(DATA, 4, sampler=sampler), target_epsilon=2.0, target_delta=1e-3,
        epochs=2, max_grad_norm=1.0, epsilon_tolerance=1e-4,
    )  # fmt: skip
    for _ in range(2):
        train(model, optimizer, loader)
    assert [(q, steps) for _, q, steps in engine.accountant.history] == [(0.5, 6)]
    assert engine.get_epsilon(1e-3) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_the_way_out_of_it(mode: str) -> None:
    _, model, optimizer, loader = start(DataLoader(Subset(DATA, range(6)), 2), mode=mode)
    assert all(len(x) == 0 or x.max() < 6 for x in train(model, optimizer, loader))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_loaders_that_draw_from_all_rows(mode: str, shuffle: bool) -> None:
    first = DataLoader(DATA, 4, shuffle=shuffle)
    *_, again = start(first, mode=mode)
    engine, model, optimizer, loader = start(again, mode=mode)  # a Poisson loader already
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 1 / 3, 3)]
    everything = DistributedSampler(DATA, num_replicas=1, rank=0)
    start(DataLoader(DATA, 4, sampler=everything), mode=mode)


TWICE = {
    "weights": (WeightedRandomSampler([1.0] * N, N), "some samples more often"),
    "weights, each once": (WeightedRandomSampler([1.0] * N, 6, False), "some samples more often"),
    "replacement": (RandomSampler(DATA, replacement=True), "a sample twice into one batch"),
    "a longer pass": (RandomSampler(DATA, num_samples=20), "20 samples in a pass from 12"),
    "a repeated row": (SubsetRandomSampler([1, 2, 1]), "sample 1 twice"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWICE)
def test_known_samplers_that_repeat_rows(name: str, mode: str) -> None:
    sampler, message = TWICE[name]
    with refused(f"{message}.*poisson_sampling=True", ArgumentError):
        start(DataLoader(DATA, 4, sampler=sampler), poisson=False, mode=mode)
    within = BatchSampler(sampler, 4, drop_last=False)
    with refused(f"{message}.*poisson_sampling=True", ArgumentError):
        start(DataLoader(DATA, batch_sampler=within), poisson=False, mode=mode)


REPEATING: dict[str, Any] = {
    "in a batch": {"sampler": Own([0, 1, 1, 2, 3]), "batch_size": 4},
    "in a pass": {"sampler": Own([0, 1, 2, 3, 1]), "batch_size": 4},
    "from behind": {"sampler": Own([1, 2, -11]), "batch_size": 4},
    "as tensors": {"sampler": Own([*torch.tensor([3, 4, 3])]), "batch_size": 4},
    "batches": {"batch_sampler": OwnBatches(SequentialSampler(DATA), 4, False)},
    "listed batches": {"batch_sampler": [[0, 1], [2, 0]]},
    "tuples": {"batch_sampler": [(0, 1), (1, 2)]},
}


@pytest.mark.parametrize("name", REPEATING)
def test_samplers_of_the_users_own_are_seen_to_repeat(name: str) -> None:
    loader = DataLoader(DATA, **REPEATING[name])
    _, model, optimizer, loader = start(loader, poisson=False)
    with refused("twice in one pass", ArgumentError):
        train(model, optimizer, loader)


def test_samplers_of_the_users_own_that_do_not() -> None:
    """Orders, subsets and batches of any kind, pass after pass."""
    for options in (
        {"sampler": Own([5, 3, 1]), "batch_size": 2},
        {"sampler": Own([*torch.tensor([5, 3, -1])]), "batch_size": 2},
        {"sampler": SubsetRandomSampler([3, 5, 7]), "batch_size": 2},
        {"batch_sampler": [[0, 1], [7]]},
        {"batch_sampler": BatchSampler(Own([8, 2, 4]), 2, drop_last=False)},
        {"sampler": RandomSampler(DATA, num_samples=3), "batch_size": 2},
    ):
        engine, model, optimizer, loader = start(DataLoader(DATA, **options), poisson=False)
        for _ in range(2):
            assert sum(len(x) for x in train(model, optimizer, loader)) == 3
        assert engine.accountant.history == [(1.0, 1.0, 2)]


class Keyed(torch.utils.data.Dataset):
    """Rows by name."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> tuple[Tensor]:
        return (torch.tensor([float(len(name))]),)


@pytest.mark.parametrize("names", [["a", "bb", "ccc"], ["a", "bb", "a"]])
def test_rows_by_name(names: list[str]) -> None:
    loader = DataLoader(Keyed(), batch_size=2, sampler=Own(names))
    _, model, optimizer, loader = start(loader, poisson=False)
    if names[2] == "a":
        with refused("sample 'a' twice", ArgumentError):
            train(model, optimizer, loader)
    else:
        assert len(train(model, optimizer, loader)) == 2


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return ((torch.ones(1),) for _ in range(6))


class Measured(Stream):
    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("mode", MODES)
def test_streams(mode: str) -> None:
    """Without Poisson sampling and with a length they train: their rows are theirs to answer for."""
    for data in (Stream(), Measured()):
        with refused("__len__|poisson_sampling=False", ArgumentError):
            start(DataLoader(data, batch_size=2), mode=mode)
    if mode != "fast":
        with refused("__len__", ArgumentError):
            start(DataLoader(Stream(), batch_size=2), poisson=False, mode=mode)
    _, model, optimizer, loader = start(
        DataLoader(Measured(), batch_size=2), poisson=False, mode=mode
    )
    assert len(train(model, optimizer, loader)) == 3


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_loaders_without_batches(mode: str, poisson: bool) -> None:
    with refused("batch_size=None", ArgumentError):
        start(DataLoader(DATA, batch_size=None), poisson=poisson, mode=mode)
    with refused("drop_last", ArgumentError):
        start(DataLoader(DATA, batch_size=20, drop_last=True), poisson=poisson, mode=mode)


def test_batches_out_of_order() -> None:
    loader = DataLoader(DATA, 4, num_workers=2, in_order=False)
    with refused("in_order=True", ArgumentError):
        start(loader, poisson=False)


# The number of steps


@pytest.mark.one_in(6)
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("batches", [1, 3, 49, 93, 99, 105, 107])
def test_a_pass_has_as_many_steps_as_the_loader(batches: int, secure: bool) -> None:
    """int(1 / (1 / n)) is n - 1 for some n; the budget is planned for n."""
    data = TensorDataset(torch.zeros(2 * batches, 1))
    for mode in ("fast", "hooks", "functorch"):
        engine, model, optimizer, loader = start(DataLoader(data, 2), mode=mode, secure=secure)
        assert len(loader) == batches
        assert loader.batch_sampler.sample_rate == 1 / batches
        assert optimizer.expected_batch_size == 2
        if mode == "functorch":
            continue
        train(model, optimizer, loader)
        assert engine.accountant.history == [(1.0, 1 / batches, batches)]


@pytest.mark.parametrize("mode", MODES)
def test_the_budget_of_a_pass_is_spent_by_it(mode: str) -> None:
    engine, net = FastPrivacyEngine(accountant="rdp"), nn.Linear(1, 1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), grad_sample_mode=mode,
        data_loader=DataLoader(TensorDataset(torch.zeros(198, 1)), 2), target_epsilon=2.0,
        target_delta=1e-3, epochs=2, max_grad_norm=1.0, epsilon_tolerance=1e-4,
    )  # fmt: skip
    for _ in range(2):
        train(model, optimizer, loader)
    assert engine.accountant.history[0][2] == 198
    assert engine.get_epsilon(1e-3) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_secure_mode_draws_no_order_that_can_be_foreseen(mode: str) -> None:
    with refused(r"shuffle=False.*poisson_sampling=True.*shuffle=True", ArgumentError):
        start(DataLoader(DATA, 4), poisson=False, secure=True, mode=mode)
    _, model, optimizer, loader = start(
        DataLoader(DATA, 4, shuffle=True), poisson=False, secure=True, mode=mode
    )
    assert sorted(torch.cat(train(model, optimizer, loader)).flatten().tolist()) == [*range(N)]


@pytest.mark.parametrize("mode", MODES)
def test_a_distributed_sampler_of_fewer_rows(mode: str) -> None:
    fewer = DistributedSampler(Subset(DATA, range(8)), num_replicas=1, rank=0)
    with refused(r"DistributedSampler draws from 8\. .*Subset\(dataset, indices\)", ArgumentError):
        start(DataLoader(DATA, 4, sampler=fewer), mode=mode)


class Consenting(DataLoader):
    """Leaves rows out of its batches."""

    def __iter__(self) -> Iterator[Any]:
        for (x,) in super().__iter__():
            yield (x[x[:, 0] < 6],)


class Named(DataLoader):
    """A loader of the user's own that makes torch's batches."""


@pytest.mark.parametrize("mode", MODES)
def test_a_loader_that_makes_its_own_batches(mode: str) -> None:
    """A Poisson loader takes its place, without what it does."""
    with refused("own __iter__ would not run.*Pass a DataLoader over", ArgumentError):
        start(Consenting(DATA, 4, shuffle=True), mode=mode)
    start(Named(DATA, 4, shuffle=True), mode=mode)
    _, model, optimizer, loader = start(Consenting(DATA, 4), poisson=False, mode=mode)
    assert type(loader) is Consenting
    assert sum(len(x) for x in train(model, optimizer, loader) if len(x)) == 6


@pytest.mark.parametrize("mode", MODES)
def test_poisson_sampling_of_rows_with_names(mode: str) -> None:
    named: Any = {name: (torch.ones(1),) for name in "abcdef"}
    with refused(r"\(dict\) has no sample 0\. .*Subset", ArgumentError):
        start(DataLoader(named, 2), mode=mode)
    start(DataLoader(Subset(named, list(named)), 2), mode=mode)  # the way out
