"""Rows that a data set has several times, where torch's own classes tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import date
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from fastclip.errors import ArgumentError
from tests.data.test_samplers import DATA, N, start
from tests.networks import mlp
from tests.oracle import make_private
from tests.refusal import refused

OTHER = TensorDataset(torch.arange(float(N))[:, None])
SAME = TensorDataset(*DATA.tensors)
TRAIN, TEST = random_split(DATA, [8, 4], torch.Generator().manual_seed(0))
ONCE_MORE = [*range(8), 0, 0, 0, 0]


class Keyed(Dataset):
    """Rows by number, whatever is asked for."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: Any) -> Any:
        return (torch.zeros(1),)


class OneBuffer(Keyed):
    """Returns the same memory for every sample."""

    buffer = torch.zeros(3)

    def __getitem__(self, row: Any) -> Any:
        return (self.buffer.fill_(row),)


class Windows(Keyed):
    """Windows of a series, as they are commonly read."""

    series = torch.zeros(N + 2)

    def __getitem__(self, row: Any) -> Any:
        return self.series[row : row + 3]


class Transformed(Subset):
    """A Subset of the user's own."""

    def __getitem__(self, row: Any) -> Any:
        return (2 * super().__getitem__(row)[0],)

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Held:
    """An object that holds what it is given."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slotted:
    """The same, in a slot."""

    __slots__ = ("__x",)

    def __init__(self, x: Any) -> None:
        self.__x = x


class Named(Keyed):
    """Samples by name; for any other key, one blank sample."""

    blank = torch.zeros(1)
    samples = {f"image {row}": torch.ones(1) for row in range(N)}

    def __getitem__(self, row: Any) -> Any:
        return self.samples.get(row, self.blank)


class Listed(Sampler):
    """A sampler of the user's own."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


TABLE = torch.eye(2)
ONE, OTHERS = torch.zeros(40), [Held(n=1) for _ in range(N)]
IMAGE, BUFFER = Random(0), bytearray(64)
"""Stands for any object that cannot be looked into."""
SPARSE = torch.eye(3).to_sparse()
RAGGED = torch.zeros(3, 5 * N).T
SHARED_VALUES = {"text": "a record"}
SERIES = torch.zeros(9, 9)
FORTRAN = torch.zeros(6, N).T
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N)


def pairs(rows: slice) -> TensorDataset:
    """Views of the rows of X and Y."""
    return TensorDataset(X[rows], Y[rows])


def stack(of_x: Any, of_y: Any) -> StackDataset:
    return StackDataset(Subset(X, of_x), Subset(Y, of_y))  # type: ignore[type-var]


COPIES: dict[str, Dataset] = {
    "a row five times": Subset(DATA, ONCE_MORE),
    "as a tensor": Subset(DATA, torch.tensor(ONCE_MORE)),  # type: ignore[arg-type]
    "as an array": Subset(DATA, np.array(ONCE_MORE)),  # type: ignore[arg-type]
    "a mask for numbers": Subset(DATA, [True] * 6 + [False] * 6),
    "negative": Subset(DATA, [*range(6), -12]),
    "joined with itself": ConcatDataset([DATA] * 4),
    "the same tensors": ConcatDataset([DATA, SAME]),
    "overlapping": ConcatDataset([Subset(DATA, range(7)), Subset(DATA, range(6, 12))]),
    "a part again": ConcatDataset([TRAIN, TEST, Subset(TEST, [2])]),
    "nested": Subset(ConcatDataset([OTHER, Subset(DATA, [3, 4, 3])]), [0, 12, 13, 14]),
    "negative, of joined": Subset(ConcatDataset([OTHER, DATA]), [23, 0, -1]),
    "of a subclass": Transformed(DATA, ONCE_MORE),
    "a name twice": Subset({"a": (torch.zeros(1),), "b": (torch.ones(1),)}, ["a", "b", "a"]),  # type: ignore
    "of the user's own": Subset(Keyed(), [0, 1, 2, 3, -12]),
    "stacked": stack([0, 0, 1, 2], [0, 0, 1, 2]),
    "stacked by name": StackDataset(x=Subset(DATA, [5, 1, -7]), y=Subset(OTHER, [3, 4, 3])),
    "of a stack": Subset(StackDataset(DATA, OTHER), [*range(6), -12]),
    "joined stacks": ConcatDataset([stack([1, 2], [1, 2]), stack([3, 2], [3, 2])]),
    "stacked stacks": StackDataset(stack([0, 1, 0], [1, 2, 1]), Subset(DATA, [4, 5, 4])),
    "overlapping views": ConcatDataset([pairs(slice(0, 8)), pairs(slice(4, 12))]),
    "every second row again": Subset(
        ConcatDataset([pairs(slice(None)), pairs(slice(6, 7))]), [6, 12]
    ),
    "a tensor and its part": ConcatDataset([X, X[5:]]),  # type: ignore[list-item]
    "a list of one tensor": ConcatDataset([[(torch.zeros(1),)] * 3]),
    "one input for several labels": stack([0, 0, 1, 2], [0, 1, 2, 3]),
    "pairs crossed": ConcatDataset([stack([1, 2], [1, 2]), stack([1, 2], [2, 1])]),
    "views of other labels": ConcatDataset(
        [TensorDataset(X[:4], Y[:4]), TensorDataset(X[:4], Y[4:8])]
    ),
    "expanded": TensorDataset(X[:1].expand(N, 3)),
    "expanded, with labels": TensorDataset(X[:1].expand(N, 3), Y),
    "one object in dicts": [{"x": X[0]}, {"x": X[0]}],  # type: ignore[dict-item]
    "an array, broadcast": np.broadcast_to(np.zeros((1, 3)), (N, 3)),  # type: ignore[dict-item]
    "a list of views": [X[0], X[1], X[0]],  # type: ignore[dict-item]
    "the user's own, one buffer": OneBuffer(),
    "beside a string": [(ONE, "cat")] * N,  # type: ignore[dict-item]
    "beside a string, in tuples of their own": [(ONE, "cat" * 20) for _ in range(N)],  # type: ignore
    "beside captions": [{"image": ONE, "caption": f"{row}"} for row in range(N)],  # type: ignore
    "beside numbers": [(ONE, [0] * 64) for _ in range(N)],  # type: ignore[dict-item]
    "beside an object": [(ONE, Held(n=row)) for row in range(N)],  # type: ignore[dict-item]
    "one dict of strings": [SHARED_VALUES] * N,  # type: ignore[dict-item]
    "one list of numbers": [(SERIES.tolist(), 1)] * N,  # type: ignore[dict-item]
    "one list in tuples": [([1, 2, 3], 1) for _ in range(1)] * N,  # type: ignore[dict-item]
    "an image and labels": [(IMAGE, row) for row in range(N)],  # type: ignore[dict-item]
    "a buffer": [(BUFFER, row) for row in range(N)],  # type: ignore[dict-item]
    "a sparse tensor": [(SPARSE, row) for row in range(N)],  # type: ignore[dict-item]
    "held by objects": [Held(x=ONE) for _ in range(N)],  # type: ignore[dict-item]
    "held by objects in objects": [Held(x=Held(x=[ONE]), n=n) for n in range(N)],  # type: ignore
    "held in slots": [Slotted(ONE) for _ in range(N)],  # type: ignore[dict-item]
    "one object of numbers": OTHERS[:1] * N,  # type: ignore[dict-item]
    "in sets": [{ONE} for _ in range(N)],  # type: ignore[dict-item]
    "in deques": [deque([ONE]) for _ in range(N)],  # type: ignore[dict-item]
    "in an array of objects": list(np.array([[ONE, None]] * N, dtype=object)),  # type: ignore
    "stacked views": StackDataset(ConcatDataset([X[:3], X[2:4]]), ConcatDataset([Y[:3], Y[2:4]])),  # type: ignore
}

OVERLAPPING: dict[str, Dataset] = {
    "windows": TensorDataset(X.view(-1).unfold(0, 6, 3)),
    "windows of a random split": random_split(TensorDataset(X.view(-1).unfold(0, 6, 1)), [28, 3])[
        0
    ],
    "windows and their next value": TensorDataset(
        X.view(-1)[:-1].unfold(0, 5, 5), X.view(-1)[5::5]
    ),
    "shifted tokens": TensorDataset(X.view(-1)[:-1].view(5, 7), X.view(-1)[1:].view(5, 7)),
    "windows with holes": TensorDataset(X.view(-1).as_strided((8, 3), (2, 4))),
    "overlapping columns": TensorDataset(X.T.unfold(1, 4, 2).flatten(0, 0).transpose(0, 1)),
    "shifted views": ConcatDataset(
        [TensorDataset(X[:8]), TensorDataset(X.view(-1)[1:25].view(8, 3))]
    ),
    "arrays": np.lib.stride_tricks.sliding_window_view(np.zeros(20), 4),  # type: ignore[dict-item]
    "a list of slices": [SERIES[0, i : i + 3] for i in range(6)],  # type: ignore[dict-item]
    "images and their patches": [(SERIES, SERIES[:2]), (SERIES[2:4], SERIES[5])],  # type: ignore
    "the user's own": Windows(),
    "slices of a buffer": [memoryview(BUFFER)[i : i + 3] for i in range(6)],  # type: ignore
    "ragged, transposed": [RAGGED[5 * i : 5 * i + 5 + (i == 3)] for i in range(N)],  # type: ignore
    "held by objects": [Held(x=SERIES[0, i : i + 3]) for i in range(6)],  # type: ignore[dict-item]
    "a subset of the user's own": Subset(Windows(), range(3, 9)),
}

ORDINARY: dict[str, Dataset] = {
    "a split": TRAIN,
    "a part of a split": Subset(TRAIN, [-1, 0, 3]),
    "a permutation": Subset(DATA, torch.randperm(N).tolist()),
    "joined": ConcatDataset([DATA, OTHER]),
    "joined splits": ConcatDataset([TEST, TRAIN]),
    "one row of each": Subset(ConcatDataset([DATA, OTHER]), [0, 12, 1, 13, -1]),
    "an empty part": ConcatDataset([Subset(DATA, []), Subset(DATA, range(3))]),
    "a list": ConcatDataset([[(torch.zeros(1),) for _ in range(3)], [(torch.ones(1),)]]),
    "a list of numbers": [3, 1, 3, 3],  # type: ignore[dict-item]
    "names": Subset({"a": (torch.zeros(1),), "b": (torch.ones(1),)}, ["a", "b"]),  # type: ignore
    "a subclass": Transformed(DATA, range(5)),
    "a stack": StackDataset(DATA, OTHER),
    "a stack with one label for several inputs": stack([0, 1, 2, 3], [0, 0, 1, 2]),
    "views apart": ConcatDataset([pairs(slice(0, 4)), pairs(slice(4, 12))]),
    "halves of the columns": ConcatDataset([X[:, :1], X[:, 1:2]]),  # type: ignore[list-item]
    "transposed": TensorDataset(X.T.contiguous().T, Y),
    "channels last": TensorDataset(
        X[:, :, None, None].contiguous(memory_format=torch.channels_last)
    ),
    "every second column": TensorDataset(FORTRAN[:, ::2], FORTRAN[:, 1::2]),
    "windows side by side": TensorDataset(X.view(-1).unfold(0, 6, 6)),
    "every second window": Subset(TensorDataset(X.view(-1).unfold(0, 6, 3)), range(0, 10, 2)),
    "windows of each sample": TensorDataset(SERIES.unfold(1, 3, 1)),
    "windows of each column": TensorDataset(SERIES.unfold(0, 3, 1).transpose(0, 1)),
    "windows with holes, between each other": TensorDataset(X.view(-1).as_strided((4, 3), (1, 4))),
    "one label": TensorDataset(X, torch.zeros(1).expand(N)),
    "a mask for all": TensorDataset(X, torch.ones(3, dtype=torch.bool).expand(N, 3)),
    "positions for all": [(X[i], torch.arange(3)) for i in range(N)],  # type: ignore[dict-item]
    "one-hot labels of a table": [(X[i], TABLE[i % 2]) for i in range(N)],  # type: ignore[dict-item]
    "a sample and a view of it": TensorDataset(X, X[:, :2], X[:, 0]),
    "one sample": TensorDataset(torch.zeros(3).expand(1, 3)),
    "an array from behind": np.arange(36.0)[::-1].reshape(N, 3),  # type: ignore[dict-item]
    "strings": ["good", "bad"] * N,  # type: ignore[dict-item]
    "strings and labels of a table": [("good", TABLE[0, :1]) for _ in range(N)],  # type: ignore
    "constants": [("cat", 1, None, torch.float32, date(2000, 1, 1))] * N,  # type: ignore[dict-item]
    "lists of equal numbers": [[1, 2, 3] for _ in range(N)],  # type: ignore[dict-item]
    "nothing": [torch.zeros(0)] * N,  # type: ignore[dict-item]
    "objects": [Held(x=X[i], label="cat", kind=Held) for i in range(N)],  # type: ignore[dict-item]
    "objects of numbers": OTHERS,  # type: ignore[dict-item]
    "an object for all": [(X[i], OTHERS[0], len) for i in range(N)],  # type: ignore[dict-item]
    "images and one word": [(Random(0), "cat") for _ in range(N)],  # type: ignore
    "ragged, transposed": [RAGGED[5 * i : 5 * i + 5 - i % 2] for i in range(N)],  # type: ignore
    "rows of nothing": Subset(TensorDataset(torch.zeros(N, 0)), range(4)),
}


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_refused(name: str, poisson: bool) -> None:
    with refused("Leave out the copies, or pass unit_ids", ArgumentError):
        start(DataLoader(COPIES[name], 2, shuffle=True), poisson=poisson)


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_samples_that_overlap(name: str, poisson: bool) -> None:
    with refused("overlap in memory.*unit_ids", ArgumentError):
        start(DataLoader(OVERLAPPING[name], 2, shuffle=True), poisson=poisson)


@pytest.mark.parametrize("poisson", [True, False])
def test_copies_in_opacus_modes(poisson: bool) -> None:
    with refused(
        r"Samples 0 and 12 of the data set \(ConcatDataset\) are the same sample", ArgumentError
    ):
        start(
            DataLoader(COPIES["joined with itself"], 2, shuffle=True), poisson=poisson, mode="hooks"
        )
    start(DataLoader(TRAIN, 2, shuffle=True), poisson=poisson, mode="hooks")


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_data_sets(name: str, poisson: bool) -> None:
    start(DataLoader(ORDINARY[name], 2, shuffle=True), poisson=poisson)


def test_copies_of_which_one_may_be_drawn() -> None:
    """A sampler that leaves the others out."""
    copies = Subset(DATA, ONCE_MORE)
    weights = torch.tensor([1.0] * 8 + [0.0] * 4)
    for sampler in (SubsetRandomSampler(range(8)), WeightedRandomSampler(weights.tolist(), 12)):
        start(DataLoader(copies, 2, sampler=sampler))
    start(DataLoader(copies, 2, sampler=SubsetRandomSampler(range(1, 9))), poisson=False)
    with refused(r"Samples 0 and 11 of the data set \(Subset\)", ArgumentError):
        start(DataLoader(copies, 2, sampler=SubsetRandomSampler([0, 5, -1])))


def test_samplers_of_the_users_own() -> None:
    """Which samples they draw is not known ahead, nor whether their keys are numbers."""
    windows = TensorDataset(X.view(-1).unfold(0, 6, 3))
    for loader in (
        DataLoader(windows, 2, sampler=Listed([0, 2, 4])),
        DataLoader(windows, batch_sampler=Listed([[0, 2], [4]])),
    ):
        with refused(
            r"sampler \(Listed\) may draw .* Pass a torch.utils.data.Subset", ArgumentError
        ):
            start(loader, poisson=False)
    start(DataLoader(Subset(windows, [0, 2, 4]), 2), poisson=False)
    start(DataLoader(Named(), 2, sampler=Listed([*Named.samples])), poisson=False)


def test_constants_larger_than_samples() -> None:
    """They cannot be told from a record that is in all samples, but there is a way out."""
    mask = torch.ones(3, 3)
    with refused(r"share more than each .* out of the data set, or clone\(\) it", ArgumentError):
        start(DataLoader([(x, mask) for x in X], 2))  # type: ignore[arg-type]
    start(DataLoader([(x, mask.clone()) for x in X], 2))  # type: ignore[arg-type]


def test_pieces_that_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that do not lie in one step of each other's dimensions are compared by their runs."""
    holes = [X.view(-1).as_strided((3,), (2,), start) for start in (0, 5, 12, 17)]
    start(DataLoader(holes, 2))  # type: ignore[arg-type]
    monkeypatch.setattr("fastclip.data.sample_memory._MOST_RUNS", 3)
    with refused(r"pieces, too many to check for overlaps. Call contiguous\(\)", ArgumentError):
        start(DataLoader([X.view(-1).as_strided((3,), (4,), k) for k in (0, 5)], 2))  # type: ignore


def test_copies_of_one_unit() -> None:
    """They are drawn as one, and clipped as one; of two units they would contribute with both."""
    data = TensorDataset(torch.randn(6, 4))
    chosen = [0, 1, 2, 3, 4, 5, 0, 0]
    make_private(
        mlp(), dataset=Subset(data, chosen), unit_ids=chosen, batch_size=2, poisson_sampling=True
    )
    with refused("two units to samples 0 and 6 ", ArgumentError):
        make_private(
            mlp(), dataset=Subset(data, chosen), unit_ids=range(8), batch_size=2,
            poisson_sampling=True,
        )  # fmt: skip


def test_windows_of_one_unit() -> None:
    """Two patients' windows: of one series each they overlap, of both they do not."""
    windows = TensorDataset(torch.zeros(2, 20).unfold(1, 5, 1).flatten(0, 1), torch.zeros(32))
    series = torch.zeros(40)
    views = ConcatDataset(
        [TensorDataset(part.unfold(0, 5, 1)) for part in (series[:20], series[20:])]
    )
    ids = [0] * 16 + [1] * 16
    for data in (windows, views):
        make_private(mlp(5), dataset=data, unit_ids=ids, batch_size=8, poisson_sampling=True)
    with refused("unit_ids gives two units to samples 1[45] and 1[56] .* overlap", ArgumentError):
        make_private(
            mlp(5),
            dataset=views,
            unit_ids=[*ids[:15], 2, *ids[16:]],
            batch_size=8,
            poisson_sampling=True,
        )


def test_many_rows() -> None:
    """No loop over rows in Python: a million are resolved in the time of a few array operations."""
    rows = TensorDataset(torch.zeros(10**6, 1))
    joined = ConcatDataset([Subset(rows, range(0, 10**6, 2)), Subset(rows, range(1, 10**6, 2))])
    start(DataLoader(joined, 1000, shuffle=True))
    with refused("Samples 0 and 1000000 of the data set", ArgumentError):
        start(DataLoader(ConcatDataset([joined, Subset(rows, [0])]), 1000, shuffle=True))
