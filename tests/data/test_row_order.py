"""Collate functions that change the order of rows would give them to another unit."""

from __future__ import annotations

import copy
import random
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from fastclip.data.collate import check_sample_order
from fastclip.errors import ArgumentError
from tests.refusal import refused

N = 30


class Texts(Dataset):
    """Rows of several lengths, as dictionaries that a collator may take apart."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": torch.full((1 + i * 7 % 5,), i), "label": i % 2, "name": f"row {i}"}


def padded(rows: list[dict]) -> dict[str, Any]:
    return {
        "ids": torch.nn.utils.rnn.pad_sequence([r["ids"] for r in rows], batch_first=True),
        "labels": torch.tensor([r.pop("label") for r in rows]),
        "names": [r["name"] for r in rows],
        "longest": max(len(r["ids"]) for r in rows),
    }


def by_length(rows: list[dict]) -> dict[str, Any]:
    return padded(sorted(rows, key=lambda r: -len(r["ids"])))


def labels_apart(rows: list[dict]) -> dict[str, Any]:
    """The labels stay where they were: worse."""
    batch = padded(rows)
    batch["ids"] = batch["ids"].sort(0).values
    return batch


def backwards(rows: list[dict]) -> dict[str, Any]:
    return padded(rows[::-1])


def shuffled(rows: list[dict]) -> dict[str, Any]:
    random.shuffle(rows)
    return padded(rows)


def masked(rows: list[dict]) -> dict[str, Any]:
    batch = padded(rows)
    return {**batch, "ids": batch["ids"] * (torch.rand(batch["ids"].shape) < 0.5)}


def filtered(rows: list[dict]) -> dict[str, Any]:
    return padded([r for r in rows if r["ids"][0] % 4])


def doubled(rows: list[dict]) -> dict[str, Any]:
    return padded([*rows, *copy.deepcopy(rows)])


def ragged(rows: list[dict]) -> list[Tensor]:
    return [r["ids"] for r in rows]


def summed(rows: list[dict]) -> Tensor:
    return torch.stack([r["ids"].sum() for r in rows]).sum()


class Batch:
    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows


def as_arrays(rows: list[dict]) -> tuple:
    return np.stack([r["ids"][0].numpy() for r in rows]), np.array([r["name"] for r in rows])


def check(collate: Any, data: Any = None, **options: Any) -> None:
    data = Texts() if data is None else data
    check_sample_order(DataLoader(data, 4, collate_fn=collate), list(range(len(data))), **options)


@pytest.mark.parametrize("collate", [padded, as_arrays, lambda rows: [r["name"] for r in rows]])
def test_collate_functions_that_keep_the_order(collate: Any) -> None:
    check(collate)


@pytest.mark.parametrize(
    "collate",
    [
        by_length,
        labels_apart,
        backwards,
        shuffled,
        masked,
        filtered,
        doubled,
        ragged,
        summed,
        Batch,
    ],
)
def test_collate_functions_that_may_not(collate: Any) -> None:
    with refused("collate_fn .*Keep the order", ArgumentError):
        check(collate)


class Locked(Texts):
    """Rows that no copy can be made of."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**super().__getitem__(i), "lock": threading.Lock()}


def test_rows_that_cannot_be_copied() -> None:
    check(padded, Locked())
    with refused("collate_fn .*Keep the order", ArgumentError):
        check(by_length, Locked())


def test_the_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    check(padded)
    with refused("random numbers"):
        check(masked)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def along_axis_1(rows: list[tuple]) -> tuple:
    return torch.stack([x for (x,) in rows], dim=1), torch.tensor([float(x[0]) for (x,) in rows])


def test_batches_along_axis_1() -> None:
    data = TensorDataset(torch.randn(N, 3))
    check(along_axis_1, data, batch_first=False)
    with refused("Keep the order"):
        check(lambda rows: along_axis_1(rows[::-1]), data, batch_first=False)


class AtOnce(Texts):
    """Reads many rows at once, in the order of its file."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered

    def __getitems__(self, rows: list[int]) -> list[dict]:
        return [self[i] for i in (sorted(rows) if self.ordered else rows)]


@pytest.mark.parametrize("collate", [padded, default_collate])
def test_data_sets_that_read_many_rows_at_once(collate: Any) -> None:
    class Plain(AtOnce):
        def __getitem__(self, i: int) -> Any:
            return super().__getitem__(i) if collate is padded else torch.tensor(i)

    check(collate, Plain(ordered=False))
    for data in (Plain(ordered=True), Subset(Plain(ordered=True), range(20))):
        with refused("__getitems__.*Keep the order"):
            check(collate, data)


class Once(Dataset):
    """A data set that draws random numbers (augmentation) is no matter of the collate function."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": torch.randint(9, (3,)) + i, "label": 0, "name": str(i)}


def test_random_rows_are_read_once() -> None:
    check(padded, Once())
    with refused("Keep the order"):
        check(lambda rows: padded(sorted(rows, key=lambda r: int(r["ids"].sum()))), Once())


def test_the_collate_function_of_a_poisson_loader() -> None:
    """Opacus wraps it; what is inside counts."""
    zeros = DataLoader(TensorDataset(torch.zeros(N, 2)), 4)
    check_sample_order(DPDataLoader.from_data_loader(zeros), list(range(N)))
    for collate, way_out in ((padded, None), (by_length, "Keep the order")):
        loader = DPDataLoader.from_data_loader(DataLoader(Texts(), 4, collate_fn=collate))
        with refused(way_out) if way_out else nullcontext():
            check_sample_order(loader, list(range(N)))


def test_rows_that_are_all_alike_tell_nothing() -> None:
    with refused("returns the same batch .* in any order", ArgumentError):
        check(lambda rows: default_collate(rows), TensorDataset(torch.zeros(N, 2)))
    check(default_collate, TensorDataset(torch.zeros(N, 2)))
