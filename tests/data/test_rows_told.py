"""What ranks compare of their data sets: order and entries, bounded where there are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastclip.data import dataset
from fastclip.data.dataset import told_of

TOKENS = [{"input_ids": [i, i + 1, i + 2], "label": i % 3} for i in range(40)]


class Held(Dataset):
    """Rows by what it holds."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        raise AssertionError("reading a row may change it")


@pytest.mark.parametrize("most", [2**21, 16])
@pytest.mark.parametrize(
    "rows",
    [
        TOKENS,
        [(f"/data/{i}.png", i % 10) for i in range(40)],
        [(torch.full((3, 4), float(i)), i) for i in range(40)],
        [f"report {i}" for i in range(40)],
        [np.full(5, i) for i in range(40)],
    ],
    ids=["tokens", "files", "tensors", "texts", "arrays"],
)
def test_another_order(rows: list, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen also where only some of the rows are looked at."""
    monkeypatch.setattr(dataset, "_MOST", most)
    monkeypatch.setattr(dataset, "_MOST_BYTES", 64 * most)
    moved = rows[1:] + rows[:1]
    assert told_of(rows) == told_of(list(rows))
    assert told_of(rows) != told_of(moved)
    assert told_of(Held(rows=rows)) != told_of(Held(rows=moved))


def test_what_a_data_set_holds() -> None:
    """Entries for each row alone, without the folder of files, and no rows are read."""
    array = np.arange(40)
    assert told_of(Held(x=array)) != told_of(Held(x=array[::-1]))
    assert told_of(Held(x=torch.arange(40))) != told_of(Held(x=torch.arange(40).flip(0)))
    here, there = ([f"{folder}/{i}.png" for i in range(40)] for folder in ("/a", "/b"))
    assert told_of(Held(files=here)) == told_of(Held(files=there))
    assert told_of(Held(cache=[0] * 39)) == told_of(Held(cache=[1] * 39))
    assert told_of([]) == told_of([])
    assert told_of([object() for _ in range(3)]) == told_of([object() for _ in range(3)])
