"""Streams: a batch holds at most the rows that were drawn, once; each worker may bring every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from fastclip import FastPrivacyEngine
from fastclip.data.design import readers_of
from fastclip.errors import BatchSizeError, StepError
from tests.refusal import refused

N = 16


class Stream(IterableDataset):
    """Rows in their order."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(float(N))[:, None]

    def __len__(self) -> int:
        return N


class Shared(Stream):
    """Each worker brings rows of its own."""

    sharded_by_worker = True

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        yield from torch.arange(float(N))[info.id :: info.num_workers, None]


def step(dataset: Any, workers: int, joined: int, mode: str = "fast") -> tuple[list[float], list]:
    """(rows of the first step, what was recorded)."""
    engine, net = FastPrivacyEngine(accountant="rdp"), nn.Linear(1, 1)
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), poisson_sampling=False,
        data_loader=DataLoader(dataset, 4, num_workers=workers), noise_multiplier=1.0,
        max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    seen = []
    for _, x in zip(range(joined), loader, strict=False):
        model(x).mean().backward()
        seen += x[:, 0].tolist()
    optimizer.step()
    return seen, engine.accountant.history


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_a_row_twice_in_a_step(mode: str) -> None:
    """Two workers of one stream: the two batches of a step are the same rows."""
    with refused(
        "joins 2 batches of a stream that 2 workers .* sharded_by_worker = True", StepError
    ):
        step(Stream(), 2, 2, mode)


@pytest.mark.parametrize(("workers", "joined"), [(0, 2), (1, 2), (2, 1)])
def test_steps_that_hold_no_row_twice(workers: int, joined: int) -> None:
    seen, history = step(Stream(), workers, joined)
    assert len(set(seen)) == len(seen) == 4 * joined
    assert history == [(1.0, 1.0, 1)]


def test_a_stream_that_is_shared_out() -> None:
    seen, history = step(Shared(), 2, 2)
    assert len(set(seen)) == len(seen) == 8
    assert history == [(1.0, 1.0, 1)]


def test_how_many_read() -> None:
    """Rows that are drawn by number come once, whoever reads them."""
    rows = TensorDataset(torch.zeros(N, 1))
    both: Any = ChainDataset([Shared(), Shared()])
    one: Any = ChainDataset([Shared(), Stream()])
    hugging = type("IterableDataset", (Stream,), {"__module__": "datasets.iterable_dataset"})()
    for dataset, readers in ((rows, 1), (Stream(), 3), (both, 1), (one, 3), (hugging, 1)):
        assert readers_of(DataLoader(dataset, 4, num_workers=3)) == readers


def start(dataset: Any = None, mode: str = "fast", size: int = 4, **options: Any) -> tuple:
    """(engine, model, optimizer, loader) of a stream."""
    engine, net = FastPrivacyEngine(accountant="rdp"), nn.Linear(1, 1)
    made = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), poisson_sampling=False,
        data_loader=DataLoader(Stream() if dataset is None else dataset, size, **options),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    return engine, *made


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_two_rows_of_one(workers: int, mode: str) -> None:
    engine, model, optimizer, loader = start(mode=mode, num_workers=workers)
    with refused("at most 4 samples .*4 drawn.* got 8, .* collate_fn", BatchSizeError):
        model(next(iter(loader)).repeat(2, 1)).mean().backward()
        optimizer.step()
    assert engine.accountant.history == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
@pytest.mark.parametrize("size", [4, 3, 64])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_several_passes_over_a_batch(workers: int, size: int, mode: str) -> None:
    """Of any batch, that in which the stream ends too, though it holds fewer rows than were drawn."""
    engine, model, optimizer, loader = start(mode=mode, num_workers=workers, size=size)
    taken = 0
    for x in loader:
        with refused("a stream .* a second backward pass", BatchSizeError):
            for _ in range(2):
                model(x).mean().backward()
            optimizer.step()
        optimizer.discard_logical_batch()
        taken += 1
    assert taken
    assert engine.accountant.history == []


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_drawn_at_the_end_and_never_came_leaves_no_room(workers: int, mode: str) -> None:
    """The last batch joined with one that was kept; alone in a step of its own it may be used again."""
    engine, model, optimizer, loader = start(mode=mode, num_workers=workers)
    batches = list(loader)
    assert len(batches) == 4
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(batches[0]).mean().backward()
    optimizer.step()
    assert engine.accountant.history == [(1.0, 1.0, 5)]
    optimizer.zero_grad()
    for x in loader:
        model(x).mean().backward()
    with refused("a stream .* a second backward pass", BatchSizeError):
        model(batches[0]).mean().backward()
        optimizer.step()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), (1, True), (2, False), (2, True), (3, False)]
)
def test_loops_over_a_stream(workers: int, persistent: bool, drop_last: bool, mode: str) -> None:
    """Every batch a step, and (where no two workers bring a row) several joined; pass after pass."""
    dataset = Shared() if workers else Stream()
    options: Any = {"num_workers": workers, "drop_last": drop_last, "mode": mode, "size": 3}
    options["persistent_workers"] = persistent
    for joined in (1, 2):
        engine, model, optimizer, loader = start(dataset, **options)
        steps = 0
        for _ in range(2):
            ahead = list(loader) if joined == 2 else loader  # a list: all of it drawn ahead
            for i, x in enumerate(ahead):
                if not i % joined:
                    optimizer.zero_grad()
                model(x).mean().backward()
                if i % joined == joined - 1:
                    optimizer.step()
                    steps += 1
            if i % joined != joined - 1:
                optimizer.step()
                steps += 1
        assert engine.accountant.history == [(1.0, 1.0, steps)]


def test_two_calls_under_one_loss() -> None:
    """The batch in which the stream ends is shorter than its draw, as honest loops have it."""
    engine, model, optimizer, loader = start(size=3)
    for x in loader:
        optimizer.zero_grad()
        (model(x) + model(x)).mean().backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1.0, 6)]


def test_batches_that_the_stream_makes_itself() -> None:
    """How many rows are in them is known to nobody."""
    with refused("batch_size=None"):
        start(size=None)  # type: ignore[arg-type]


class Endless(IterableDataset):
    """Says nothing of its length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from 9 * torch.eye(N)[:, :, None]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_a_length(workers: int) -> None:
    """Every step is one of q = 1, however many there are; B is what a batch is asked for."""
    engine, model, optimizer, loader = start(Endless(), num_workers=workers, size=3)
    assert optimizer.expected_batch_size == 3
    steps = 0
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            model(x[:, 0]).mean().backward()
            optimizer.step()
            steps += 1
    assert engine.accountant.history == [(1.0, 1.0, steps)] == [(1.0, 1.0, 12)]
    assert "N, the length of the stream" in str(engine.mechanism())


def test_what_a_stream_without_a_length_cannot_be_asked() -> None:
    net = nn.Linear(1, 1)
    options: dict[str, Any] = {
        "module": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.0), "max_grad_norm": 1.0,
        "data_loader": DataLoader(Endless(), 4), "poisson_sampling": False,
    }  # fmt: skip
    with refused("epochs .* IterableDataset without one"):
        FastPrivacyEngine().make_private_with_epsilon(
            target_epsilon=1.0, target_delta=1e-5, epochs=1, **options
        )
    with refused("IterableDataset .* __len__"):
        FastPrivacyEngine().make_private(noise_multiplier=1.0, grad_sample_mode="hooks", **options)
    _, optimizer, _ = FastPrivacyEngine().make_private(
        noise_multiplier=1.0, expected_batch_size=7, **options
    )
    assert optimizer.expected_batch_size == 7


class Wrong(Endless):
    """Says another length than it has."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("length", [1, 8, 1000])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_wrong_length_changes_no_record(length: int) -> None:
    engine, model, optimizer, loader = start(Wrong(length))
    for x in loader:
        optimizer.zero_grad()
        model(x[:, 0]).mean().backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 1.0, 4)]
