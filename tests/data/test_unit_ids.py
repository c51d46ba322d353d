"""Ids of units, of every kind that data sets have them in."""

from __future__ import annotations

import datetime
from collections import ChainMap
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.data.units import unit_numbers
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.refusal import refused

ROWS = TensorDataset(torch.zeros(5, 1))
DAY = datetime.date(2020, 1, 1)


class Series:
    """As pandas': a column that lists itself."""

    def __init__(self, values: list) -> None:
        self.values, self.shape = values, (len(values),)

    def tolist(self) -> list:
        return self.values


class Frame:
    """As a pandas DataFrame."""

    columns = ("patient", "age")

    def __init__(self, patients: list) -> None:
        self.patients = patients

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, name: str) -> Series:
        return Series(self.patients if name == "patient" else [30] * len(self))


class Table:
    """As a Hugging Face data set, rows and columns by []."""

    column_names = ("patient", "text")

    def __len__(self) -> int:
        return 5

    def __getitem__(self, key: Any) -> Any:
        return ["p", "q", "p", "r", "q"] if key == "patient" else {"text": key}


class Holding(Dataset):
    """A data set of the user's own around a DataFrame."""

    def __init__(self, frame: Frame, **more: Any) -> None:
        self.frame, self.cache = frame, frame
        self.__dict__.update(more)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> int:
        return row


SAME: dict[str, Any] = {
    "tensor": torch.tensor([7, 3, 7, 9, 3]),
    "list": ["p", "q", "p", "r", "q"],
    "tuple": ("p", "q", "p", "r", "q"),
    "pairs": [("a", 1), ("b", 1), ("a", 1), ("a", 2), ("b", 1)],
    "array": np.array([7, 3, 7, 9, 3], dtype=np.int16),
    "strings": np.array(["p", "q", "p", "r", "q"]),
    "objects": np.array(["p", DAY, "p", (1, 2), DAY], dtype=object),
    "floats": torch.tensor([0.5, 1.5, 0.5, 2.0, 1.5]),
    "series": Series(["p", "q", "p", "r", "q"]),
    "tensors": [*torch.tensor([7, 3, 7, 9, 3])],
    "tuples of two lengths": [("a",), (1, "b"), ("a",), (1, "c"), (1, "b")],
    "numbers of several types": [7, 3.0, np.float32(7), Decimal(9), np.int8(3)],
    "dates": [DAY, None, DAY, DAY.replace(day=2), None],
    "numpy's numbers": [*np.array([7, 3, 7, 9, 3])],
}
SAME["dates"][1] = SAME["dates"][4] = DAY.replace(day=3)


@pytest.mark.parametrize("name", SAME)
def test_ids_of_every_kind(name: str) -> None:
    """Equal ids are one unit, however they are held: tensors are equal by value, too."""
    found = unit_numbers(SAME[name], ROWS)
    assert found.tolist() == [0, 1, 0, 2, 1]
    assert found.dtype == torch.int64


def test_columns() -> None:
    expected = [0, 1, 0, 2, 1]
    assert unit_numbers("patient", Table()).tolist() == expected
    holding = Holding(Frame(["p", "q", "p", "r", "q"]))
    assert unit_numbers("patient", holding).tolist() == expected
    assert unit_numbers("age", holding).tolist() == [0] * 5
    assert unit_numbers("patient", Subset(Table(), [3, 0, 2])).tolist() == [0, 1, 1]
    assert unit_numbers("patient", Subset(holding, torch.tensor([4, 1, 0]))).tolist() == [0, 0, 1]


def dicts(ids: list) -> list[dict]:
    return [{"x": torch.zeros(1), "patient": unit} for unit in ids]


def test_columns_of_a_list_of_dicts() -> None:
    """The data set itself, a list that it holds, a part of it, and other mappings."""
    told = ["p", "q", "p", "r", "q"]
    expected = [0, 1, 0, 2, 1]
    assert unit_numbers("patient", dicts(told)).tolist() == expected
    assert unit_numbers("patient", tuple(dicts(told))).tolist() == expected
    assert unit_numbers("patient", [ChainMap(each) for each in dicts(told)]).tolist() == expected
    held = Holding(Frame([]), samples=dicts(told))
    assert unit_numbers("patient", held).tolist() == expected
    both = Holding(Frame(told), samples=dicts(told[::-1]))
    assert unit_numbers("patient", both).tolist() == expected  # a table comes first
    assert unit_numbers("patient", Subset(dicts(told), [3, 0, 2])).tolist() == [0, 1, 1]


def test_dicts_without_an_id() -> None:
    samples = dicts(["p", "q", "p", "r", "q"])
    del samples[3]["patient"]
    with refused(r"got none \(None\) for sample 3", ArgumentError):
        unit_numbers("patient", samples)
    with refused("names a column, but neither .* Pass the ids themselves", ArgumentError):
        unit_numbers("doctor", samples)
    with refused("names a column, but neither", ArgumentError):
        unit_numbers("patient", [*samples[:4], "r"])


def test_a_list_of_dicts_is_trained_by_patient() -> None:
    samples: Any = [{"x": torch.ones(2), "patient": f"p{i // 2}"} for i in range(12)]
    model = torch.nn.Linear(2, 1)
    engine = FastPrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(samples, batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0,
        unit_ids="patient",
    )  # fmt: skip
    for batch in loader:
        optimizer.zero_grad()
        private(batch["x"]).mean().backward()
        optimizer.step()
    assert (engine.sampling.unit, engine.sampling.units) == ("unit", 6)


class Transformed(Subset):
    """A Subset of the user's own."""

    def __getitem__(self, row: Any) -> Any:
        return [super().__getitem__(row)]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


def test_columns_of_subsets_of_all_rows() -> None:
    """As many rows as the whole, in another order."""
    order = [4, 2, 0, 1, 3]
    for whole in (Table(), Holding(Frame(["p", "q", "p", "r", "q"]))):
        for kind in (Subset, Transformed):
            assert unit_numbers("patient", kind(whole, order)).tolist() == [0, 1, 1, 0, 2]
            some = Subset(kind(whole, order), [4, 0, 3])
            assert unit_numbers("patient", some).tolist() == [0, 1, 1]
    own = Transformed(Table(), order)
    own.frame = Frame(["a", "a", "b", "b", "c"])  # type: ignore[attr-defined]  # as users set it
    assert unit_numbers("patient", own).tolist() == [0, 0, 1, 1, 2]


def test_columns_that_are_not_clear() -> None:
    two = Holding(Frame(["p"] * 5), other=Frame(["q"] * 5))
    other_length = Holding(Frame(["p"] * 4))
    for dataset in (two, other_length, ROWS, [0] * 5):
        with refused("Pass the ids themselves", ArgumentError):
            unit_numbers("patient", dataset)


def test_ids_that_can_be_read_once_only() -> None:
    """Plans are made before the draws are, from the same ids."""
    with pytest.raises(
        ArgumentTypeError, match=r"one id per sample of the data set.*got generator"
    ):
        unit_numbers((row for row in range(5)), ROWS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3], r"\(5\), got 3"),
        (torch.zeros(6), r"\(5\), got 6"),
        (torch.zeros(5, 1), r"of shape \[samples\], got shape \[5, 1\]"),
        ([1, None, 1, 2, 2], "got none .* for sample 1"),
        ([1, 2, float("nan"), 2, 2], "got none .* for sample 2"),
        ([("a", 1), ("a", None), ("b", 1), ("b", 1), ("b", 1)], "for sample 1"),
        ([torch.zeros(2)] * 5, r"a tensor of shape \[2\] for sample 0"),
    ],
)
def test_ids_that_are_missing(ids: Any, message: str) -> None:
    """A row without an id would be a unit of its own, and its patient would have several."""
    with refused(message, ArgumentError):
        unit_numbers(ids, ROWS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([12, 7, 7, "12", 12], "got 12 for sample 0 and '12' for sample 3 .numbers and strings"),
        (np.array(["p", "q", 3, "p", 3], dtype=object), "'p' for sample 0 and 3 for sample 2"),
        ([b"1", b"2", "1", "2", "2"], "bytes and strings.*as several"),
        ([torch.tensor(1), "1", "2", "3", "2"], "numbers and strings"),
        ([("a", 1), ("a", 2), ("a", "1"), ("b", 1), ("b", 1)], r"\('a', 1\) for sample 0 and"),
    ],
)
def test_ids_of_two_kinds(ids: Any, message: str) -> None:
    """As pandas reads a long file in parts: 12 in one part is "12" in another."""
    with refused(f"{message}.*Make all of them strings", ArgumentError):
        unit_numbers(ids, ROWS)


class Missing:
    """As pandas' NA: comparisons have no truth value."""

    def __eq__(self, other: object) -> Any:
        return self

    __ne__ = __eq__

    def __hash__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


def test_pandas_missing_values() -> None:
    with refused("got none .* for sample 4", ArgumentError):
        unit_numbers([1, 1, 2, 2, Missing()], ROWS)


@pytest.mark.parametrize(
    "ids",
    [
        [[1], [2], [1], [2], [1]],
        [object() for _ in range(5)],
        [{1}] * 5,
        5,
        {1: 2},
        b"abcde",
        map(str, range(5)),
    ],
)
def test_ids_that_cannot_be_compared(ids: Any) -> None:
    """Objects are equal to themselves alone: each row would be a unit of its own."""
    with pytest.raises(
        ArgumentTypeError, match=r"unit_ids expects (one id|ids that can be hashed and compared)"
    ):
        unit_numbers(ids, ROWS)
