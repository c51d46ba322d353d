"""What ranks compare of their data sets: order and entries, bounded where there are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastclip.data import dataset
from fastclip.data.dataset import digest_of

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
    assert digest_of(rows) == digest_of(list(rows))
    assert digest_of(rows) != digest_of(moved)
    assert digest_of(Held(rows=rows)) != digest_of(Held(rows=moved))


def test_what_a_data_set_holds() -> None:
    """Entries for each row alone, without the folder of files, and no rows are read."""
    array = np.arange(40)
    assert digest_of(Held(x=array)) != digest_of(Held(x=array[::-1]))
    assert digest_of(Held(x=torch.arange(40))) != digest_of(Held(x=torch.arange(40).flip(0)))
    here, there = ([f"{folder}/{i}.png" for i in range(40)] for folder in ("/a", "/b"))
    assert digest_of(Held(files=here)) == digest_of(Held(files=there))
    assert digest_of(Held(cache=[0] * 39)) == digest_of(Held(cache=[1] * 39))
    assert digest_of([]) == digest_of([])
    assert digest_of([object() for _ in range(3)]) == digest_of([object() for _ in range(3)])
