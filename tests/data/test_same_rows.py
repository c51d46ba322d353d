"""A data set whose rows change places after make_private: unit_ids would be those of other rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastclip.data.dataset import SameSamples
from fastclip.errors import StepError
from tests.networks import mlp
from tests.oracle import make_private
from tests.refusal import refused

N = 24
UNIT = torch.arange(N) // 4


def values() -> Tensor:
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


class Held(Dataset):
    """Rows by what it holds."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> Any:
        return (self.rows[row],)


class Shuffled(Held):
    """As a data set that shuffles itself at the end of an epoch."""

    def anew(self) -> None:
        random.Random(0).shuffle(self.order)


def attribute(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(dataset: Any) -> None:
        setattr(dataset, name, change(getattr(dataset, name)))

    return apply


def table() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"text": [f"row {i}" for i in range(N)], "age": [30] * N})


def shuffle(rows: list) -> None:
    random.Random(1).shuffle(rows)


PERM = torch.randperm(N, generator=torch.Generator().manual_seed(3))
MOVED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a list": (lambda: list(values()), shuffle),
    "a list that is held": (lambda: Held(rows=list(values())), lambda d: shuffle(d.rows)),
    "another list": (
        lambda: Held(rows=list(values())),
        attribute("rows", lambda r: [*r[5:], *r[:5]]),
    ),
    "files": (lambda: Held(rows=[f"{i}.png" for i in range(N)]), lambda d: d.rows.reverse()),
    "tensors": (
        lambda: TensorDataset(values(), torch.zeros(N)),
        attribute("tensors", lambda t: tuple(x[PERM] for x in t)),
    ),
    "in place": (lambda: Held(rows=values()), lambda d: d.rows.copy_(d.rows.flip(0))),
    "an array": (
        lambda: Held(rows=values().numpy()),
        lambda d: np.random.default_rng(0).shuffle(d.rows),
    ),
    "strings": (
        lambda: Held(rows=np.array([str(i) for i in range(N)], dtype=object)),
        attribute("rows", lambda r: r[::-1]),
    ),
    "a table": (
        lambda: Held(frame=table()),
        attribute("frame", lambda f: f.iloc[PERM.tolist()].reset_index(drop=True)),
    ),
    "an order": (lambda: Shuffled(rows=values(), order=list(range(N))), lambda d: d.anew()),
    "around another": (
        lambda: Held(inner=Held(rows=list(values()))),
        lambda d: shuffle(d.inner.rows),
    ),
    "of a subset": (
        lambda: Subset(Held(rows=list(values())), range(N)),
        lambda d: shuffle(d.dataset.rows),
    ),
    "its indices": (lambda: Subset(values(), list(range(N))), lambda d: shuffle(d.indices)),
    "of a part": (
        lambda: ConcatDataset([values()[: N // 2], list(values()[N // 2 :])]),
        lambda d: shuffle(d.datasets[1]),
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_rows_that_have_moved(name: str) -> None:
    make, move = MOVED[name]
    dataset = make()
    same = SameSamples(dataset, UNIT)
    same.check()
    move(dataset)
    with refused("Samples of the data set .* moved after make_private.* Keep the order", StepError):
        same.check()
    SameSamples(dataset, UNIT).check()


def cached(dataset: Any) -> None:
    dataset.cache[: N - 1] = list(values())[1:]


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "scaled in place": (lambda: Held(rows=values()), lambda d: d.rows.mul_(2)),
    "augmented": (
        lambda: Held(rows=list(values())),
        attribute("rows", lambda r: [x + 1 for x in r]),
    ),
    "cached but for one": (lambda: Held(rows=values(), cache=[None] * N), cached),
    "labeled anew": (
        lambda: Held(rows=values(), label=[i % 3 for i in range(N)]),
        attribute("label", lambda label: [(y + 1) % 3 for y in label]),
    ),
    "labels of a tensor": (
        lambda: Held(rows=values(), label=torch.arange(N) % 5),
        attribute("label", lambda label: label[PERM]),
    ),
    "counted": (
        lambda: Held(rows=values(), seen=np.zeros(N, dtype=int)),
        attribute("seen", lambda seen: seen + np.random.default_rng(0).integers(0, 3, N)),
    ),
    "within their units": (
        lambda: Held(rows=list(values())),
        attribute("rows", lambda r: [r[i ^ 1] for i in range(N)]),
    ),
    "of another length": (
        lambda: Held(rows=values(), order=list(range(N + 1))),
        lambda d: shuffle(d.order),
    ),
    "longer": (lambda: list(values()), lambda d: d.append(torch.ones(4))),
    "a longer subset": (
        lambda: Subset(TensorDataset(torch.ones(N + 4)), list(range(N))),
        lambda d: d.indices.append(N),
    ),
    "missing values": (lambda: Held(rows=torch.full((N, 2), float("nan"))), lambda d: None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_rows_that_are_where_they_were(name: str) -> None:
    make, change = CHANGED[name]
    dataset = make()
    same = SameSamples(dataset, UNIT)
    change(dataset)
    same.check()


def test_large_rows_by_some_of_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastclip.data.dataset._BYTES", 64)
    for rows in (values(), values().numpy()):
        dataset = Held(rows=rows)
        same = SameSamples(dataset, UNIT)
        same.check()
        dataset.rows = rows[PERM.tolist()]
        with refused("moved after make_private.* Keep the order", StepError):
            same.check()


@pytest.mark.parametrize("unit_ids", [UNIT, None])
def test_passes_of_an_engine(unit_ids: Any) -> None:
    """A row alone is protected wherever it stands."""
    rows = [(x,) for x in values()]
    *_, loader = make_private(
        mlp(), dataset=rows, unit_ids=unit_ids, batch_size=2, poisson_sampling=True
    )
    assert len(list(loader)) == len(loader)
    shuffle(rows)
    if unit_ids is None:
        assert len(list(loader)) == len(loader)
    else:
        with refused("moved after make_private", StepError):
            next(iter(loader))
    del rows[5:]
    with refused(r"\(list\) has 5 samples, and had 24 .* Call make_private again", StepError):
        next(iter(loader))


def test_rows_that_other_ranks_draw() -> None:
    """Whose they are is not known here; one that was drawn here has moved."""
    rows = list(values())
    same = SameSamples(rows, UNIT.where(UNIT % 2 == 0, -1))
    shuffle(rows)
    with refused("moved after make_private", StepError):
        same.check()
