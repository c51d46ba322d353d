"""What a draw without rows is handed out as, whatever collate_fn makes of the others."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.data_loader import wrap_collate_with_empty
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.data import DataLoader, default_collate

from fastclip import FastPrivacyEngine
from fastclip.data.collate import EmptyBatches
from fastclip.errors import ArgumentError
from tests.opacus_runs import needs_16


@dataclass(frozen=True)
class Kept:
    """A batch of a script's own."""

    x: Tensor
    names: list[str]


Pair = namedtuple("Pair", "x y")


class Grid:
    """An object of which nothing is known."""

    def __init__(self, rows: list[Any]) -> None:
        self.x = torch.stack([row["x"] for row in rows])


def rows(n: int = 12) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(5) + 7, "label": i % 2, "id": f"p{i}"} for i in range(n)]


def stacked(drawn: list[dict[str, Any]]) -> Tensor:
    return torch.stack([row["x"] for row in drawn])


def grid(drawn: list[Any]) -> Any:
    """It takes an empty list."""
    return Grid(drawn) if drawn else torch.zeros(0, 5)


COLLATED: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], bool]]] = {
    "default": (
        default_collate,
        lambda b: b["x"].shape == (0, 5) and b["label"].dtype == torch.int64 and b["id"] == [],
    ),
    "list": (lambda d: [stacked(d), [1 for _ in d]], lambda b: b[0].shape == (0, 5) and b[1] == []),
    "tuple": (lambda d: (stacked(d),), lambda b: type(b) is tuple and b[0].shape == (0, 5)),
    "namedtuple": (
        lambda d: Pair(stacked(d), tuple(r["id"] for r in d)),
        lambda b: type(b) is Pair and b.x.shape == (0, 5) and b.y == (),
    ),
    "dataclass": (
        lambda d: Kept(stacked(d), [r["id"] for r in d]),
        lambda b: type(b) is Kept and b.x.shape == (0, 5) and b.names == [],
    ),
    "array": (
        lambda d: {"x": stacked(d).numpy(), "id": np.array([r["id"] for r in d])},
        lambda b: b["x"].shape == (0, 5) and b["x"].dtype == np.float32 and b["id"].shape == (0,),
    ),
    "rows": (lambda d: [r["x"] for r in d], lambda b: b == []),
    "dicts": (lambda d: (stacked(d), d), lambda b: b[0].shape == (0, 5) and b[1] == []),
    "task": (lambda d: {"x": stacked(d), "task": "a"}, lambda b: b["task"] == "a"),
    "number": (lambda d: (stacked(d), torch.tensor(3)), lambda b: b[1].shape == ()),
    "own": (grid, lambda b: b.shape == (0, 5)),
}


def loader(collate: Callable[[list[Any]], Any], size: int = 1, **options: Any) -> Any:
    model = nn.Linear(5, 2)
    return FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(rows(), size, collate_fn=collate), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", COLLATED)
def test_batches_without_rows(name: str) -> None:
    collate, expected = COLLATED[name]
    torch.manual_seed(1)
    private = loader(collate)[2]
    private.batch_sampler.sample_rate = 0.0
    assert all(expected(batch) for batch in private)


@needs_16("its empty batches are lists of tensors")
@pytest.mark.parametrize("batch_first", [True, False])
def test_what_opacus_can_make_is_the_same(batch_first: bool) -> None:
    batch = {"x": torch.randn(1, 1, 5), "y": [torch.zeros(2, 1, dtype=torch.int32)]}
    theirs: Any = wrap_collate_with_empty(collate_fn=lambda rows: batch, batch_first=batch_first)
    ours = EmptyBatches(lambda rows: batch, batch_first)
    for collate in (theirs, ours):
        collate([0])
    a, b = theirs([]), ours([])
    assert a["x"].shape == b["x"].shape
    assert a["y"][0].shape == b["y"][0].shape
    assert a["y"][0].dtype == b["y"][0].dtype


@pytest.mark.parametrize("name", ["default", "dataclass", "array", "dicts", "namedtuple"])
def test_placeholder_rows_are_of_ones(name: str) -> None:
    private = loader(COLLATED[name][0], rand_on_empty=True)[2]
    private.batch_sampler.sample_rate = 0.0
    batch = next(iter(private))
    if name == "default":
        assert torch.equal(batch["x"], torch.ones(1, 5))
        assert batch["label"].tolist() == [1]
        assert batch["id"] == ["1"]
    elif name == "array":
        assert batch["x"].tolist() == [[1.0] * 5]
        assert batch["id"].tolist() == ["1"]
    elif name == "dicts":
        assert torch.equal(batch[1][0]["x"], torch.ones(5))
        assert batch[1][0]["id"] == "1"
    else:
        assert torch.equal(batch.x, torch.ones(1, 5))
        assert list(batch[1] if name == "namedtuple" else batch.names) == ["1"]


def test_what_cannot_be_made_is_refused_before_training() -> None:
    with pytest.raises(ArgumentError, match=r"Grid.*Let collate_fn accept an empty list"):
        loader(Grid)
    with pytest.raises(ArgumentError, match=r"PackedSequence.*empty list"):
        loader(lambda drawn: pack_sequence([row["x"] for row in drawn]))
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    private = FastPrivacyEngine().make_private(  # of 40 rows a draw: none is empty in any run
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(rows(80), 40, collate_fn=Grid),
    )[2]  # fmt: skip
    assert all(isinstance(batch, Grid) for batch in private)
    private.batch_sampler.sample_rate = 0.0
    with pytest.raises(ArgumentError, match=r"Grid"):
        next(iter(private))


class Names(nn.Module):
    """Padded names of given lengths in a packed LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.r, self.o = (
            nn.Embedding(30, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.e(x), n, batch_first=True, enforce_sorted=False)
        return self.o(self.r(packed)[1][0][-1])


def names(rand_on_empty: bool) -> Any:
    torch.manual_seed(3)
    x, n, y = torch.randint(1, 30, (40, 6)), torch.randint(1, 7, (40,)), torch.randint(3, (40,))
    model = Names()
    return FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0,
        max_grad_norm=1.0, rand_on_empty=rand_on_empty,
        data_loader=DataLoader(list(zip(x, n, y, strict=True)), 1),
    )  # fmt: skip


def test_a_packed_rnn_takes_a_placeholder() -> None:
    model, optimizer, private = names(rand_on_empty=True)
    empty = 0
    for x, n, y in private:
        optimizer.zero_grad()
        F.cross_entropy(model(x, n), y).backward()
        if x.eq(1).all():
            empty += 1
            assert all((p.summed_grad == 0).all() for p in model.parameters())
        optimizer.step()
    assert empty > 5


class Flat(nn.Module):
    """A view that cannot be of 0 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.view(len(x), -1))


@pytest.mark.parametrize("make", [Flat, lambda: nn.Sequential(Flat())])
def test_a_model_that_cannot_take_no_rows_is_told_the_way_out(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    model = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(rows(), 4, collate_fn=stacked),
        poisson_sampling=False,
    )[0]  # fmt: skip
    model(torch.ones(3, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot reshape.*rand_on_empty=True"):
        model(torch.ones(0, 5))
    with pytest.raises(RuntimeError) as told:
        model(torch.ones(3, 4))
    assert "rand_on_empty" not in str(told.value)


def test_an_rnn_that_packs_is_told_the_way_out() -> None:
    model = names(rand_on_empty=False)[0]
    x, n = torch.ones(3, 6, dtype=torch.int64), torch.tensor([2, 3, 1])
    with pytest.raises(RuntimeError, match=r"Cannot pack empty tensors.*rand_on_empty=True"):
        model(x[:0], n[:0])
