"""Keys that say which sample is drawn, and lists of them, for which a data set is asked at once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from fastclip.data.dataset import Distinct
from fastclip.errors import ArgumentError, BatchSizeError
from tests.data.test_draws import N, Run, start
from tests.data.test_samplers import Own
from tests.refusal import refused


class Identity:
    """Equal to itself alone."""


@dataclass(frozen=True)
class Named:
    name: Any


@dataclass
class Unhashable:
    name: str


Color = Enum("Color", "RED GREEN")
ALIKE: dict[str, tuple[Any, Any]] = {
    "from behind": (-1, N - 1),
    "a tensor": (torch.tensor(3), 3),
    "an array": (np.array(3), np.int32(3)),
    "a float": (3.0, 3),
    "a float tensor": (torch.tensor(3.0), np.float64(3)),
    "a bool": (True, 1),
    "text": ("ab", "".join(["a", "b"])),
    "tuples": ((1, torch.tensor(2)), (1, 2)),
    "a dataclass": (Named("a"), Named("a")),
    "an enum": (Color.RED, Color["RED"]),
    "lists": ([0, 1], [2, 1]),
    "a range": (range(3), 2),
    "a slice": (slice(2, 4), [5, 3]),
    "an array of numbers": (np.array([1, 2]), torch.tensor([4, 2])),
    "a mask": ([True] + [False] * (N - 1), 0),
}


@pytest.mark.parametrize("name", ALIKE)
def test_keys_of_one_sample(name: str) -> None:
    one, other = ALIKE[name]
    Distinct(N, "Sampler").check([one, 7])
    with refused("twice in one pass", ArgumentError):
        Distinct(N, "Sampler").check([one, other])


def test_keys_of_several_samples() -> None:
    keys = [0, 1.5, "0", (0,), (0, 1), Named(1), Color.RED, None, b"0", frozenset("ab")]
    assert Distinct(N, "Sampler").check(keys) == len(keys) + 1  # of a set each member is a key
    assert Distinct(N, "Sampler").check([[1, 2], slice(3, 6), range(6, 8), np.array([8])]) == 8


@pytest.mark.parametrize(
    "key", [Identity(), (0, Identity()), Named(Identity()), Unhashable("a"), {"a": 1}, object]
)
def test_keys_that_do_not_compare_by_value(key: Any) -> None:
    with refused("do not compare by value.*give .* __eq__", ArgumentError):
        Distinct(N, "Sampler").check([key])


class ByKey(Dataset):
    """Samples by objects."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: Any) -> Tensor:
        return torch.eye(N)[0]


@pytest.mark.parametrize("poisson", [True, False])
def test_a_subset_of_objects(poisson: bool) -> None:
    with refused("The data set's Subset has keys of type Identity", ArgumentError):
        start(data=Subset(ByKey(), [Identity() for _ in range(N)]), poisson=poisson)  # type: ignore


def test_a_sampler_of_objects() -> None:
    keys = [Identity() for _ in range(N)]
    with refused("The data loader's Own draws keys of type Identity", ArgumentError):
        next(iter(start(data=ByKey(), sampler=Own(keys), poisson=False).loader))
    with refused("SubsetRandomSampler draws keys of type Identity", ArgumentError):
        start(data=ByKey(), sampler=SubsetRandomSampler(keys), poisson=False)  # type: ignore


class Bulk(Dataset):
    """Returns as many samples as it is asked for, with the gradients of OneHot."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, numbers: Any) -> Tensor:
        return 9 * torch.eye(N)[numbers]


def first(given: list[Tensor]) -> Tensor:
    return given[0]


BULK: dict[str, dict[str, Any]] = {
    "a batch of one list": {"batch_size": 1, "collate_fn": first},
    "a batch of lists": {"batch_size": 2, "collate_fn": torch.cat},
    "no batch size": {"batch_size": None},
}


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("name", BULK)
def test_a_sampler_of_batches(name: str, mode: str) -> None:
    """Each sample once in a pass, with at most C; the pass is accounted as of single numbers."""
    dataset = Bulk()
    sampler = BatchSampler(RandomSampler(dataset), 3, False)
    run = start(data=dataset, sampler=sampler, poisson=False, mode=mode, **BULK[name])
    total = torch.zeros(N)
    for x in run.loader:
        run.optimizer.zero_grad()
        run.model(x).mean().backward()
        run.optimizer.step()
        total += run.released()
    assert total.tolist() == [1.0] * N
    assert [q for _, q, _ in run.engine.accountant.history] == [1.0]
    assert run.optimizer.expected_batch_size == (6 if "lists" in name else 3)


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_samples_that_the_model_takes_for_one(mode: str) -> None:
    """Three samples under one number of the batch axis would be clipped as one."""
    dataset = Bulk()
    sampler = BatchSampler(SequentialSampler(dataset), 3, False)
    run = start(data=dataset, sampler=sampler, poisson=False, batch_size=1, mode=mode)
    with refused("drew 3 samples by one key, and the model got 1", BatchSizeError):
        for x in run.loader:
            run.one_pass(x)
    assert run.engine.accountant.history == []


def test_a_list_that_repeats_a_sample() -> None:
    for keys in ([[0, 1], [2, 1]], [[0, 1, 0]], [[0, N - 1], [-1]]):
        run = start(data=Bulk(), sampler=Own(keys), poisson=False, batch_size=1, collate_fn=first)
        with refused("twice in one pass", ArgumentError):
            for x in run.loader:
                run.one_pass(x)
    twice = BatchSampler(RandomSampler(range(N), replacement=True), 3, False)
    with refused("may draw a sample twice", ArgumentError):
        start(data=Bulk(), sampler=twice, poisson=False, batch_size=1, collate_fn=first)


@pytest.mark.parametrize("name", BULK)
def test_a_sampler_of_batches_is_not_poisson(name: str) -> None:
    dataset = Bulk()
    sampler = BatchSampler(RandomSampler(dataset), 3, False)
    with refused("replaces the data loader's BatchSampler.*Pass batch_size", ArgumentError):
        start(data=dataset, sampler=sampler, poisson=True, **BULK[name])


class AtOnce(Dataset):
    """Reads all samples of a batch at once."""

    def __init__(self, takes_none: bool) -> None:
        self.takes_none = takes_none

    def __len__(self) -> int:
        return N

    def __getitem__(self, number: int) -> Tensor:
        return 9 * torch.eye(N)[number]

    def __getitems__(self, numbers: list[int]) -> list[Tensor]:
        assert numbers or self.takes_none
        return [self[i] for i in numbers]


@pytest.mark.parametrize("poisson", [True, False])
def test_a_data_set_that_reads_at_once(poisson: bool) -> None:
    """With Poisson sampling it is asked for no samples at times."""
    run: Run = start(data=AtOnce(True), batch_size=1, poisson=poisson)
    for _ in range(3):
        for x in run.loader:
            assert float(run.one_pass(x).max()) <= 1
    if poisson:
        with refused("AtOnce.__getitems__ .* an empty list", ArgumentError):
            start(data=AtOnce(False), batch_size=1, poisson=True)
    else:
        start(data=AtOnce(False), batch_size=1, poisson=False)
