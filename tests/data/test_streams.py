"""Streams that several workers read: each of them may bring every row."""

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
from fastclip.data.streams import readers_of
from fastclip.errors import StepError
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
    with refused("joins 2 backward passes .* 2 workers .* num_workers=1 or 0", StepError):
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
