"""Opacus' recurrent layers: parameters used once a time step, rows in any order and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracle import DTYPES, Batch, check_exact, sample_loss

KINDS = {"lstm": DPLSTM, "gru": DPGRU, "rnn": DPRNN}
STEPS = 5


def rnn(kind: str, **arguments: Any) -> nn.Module:
    """Three features, four hidden."""
    return KINDS[kind](3, 4, **{"batch_first": True, **arguments})


def loss_over(batch_dim: int) -> Callable[[Any, Any], torch.Tensor]:
    """Loss of the output sequence and of every final state."""

    def loss_fn(output: tuple, _: Any) -> torch.Tensor:
        sequence, final = output
        states = final if isinstance(final, tuple) else (final,)  # [layers, b, h] each
        rows = [sequence.transpose(0, batch_dim), *(s.transpose(0, 1) for s in states)]
        return sample_loss(torch.cat([r.flatten(1) for r in rows], dim=1))

    return loss_fn


def columns(batch: Batch, i: int) -> Batch:
    """Sample i where the batch is dimension 1."""
    return Batch(tuple(x[:, i : i + 1] for x in batch.args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(18)
def test_as_the_root(
    kind: str, layers: int, bidirectional: bool, batch_first: bool, dtype: torch.dtype
) -> None:
    model = rnn(kind, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn(4, STEPS, 3)
    batch = Batch((x,)) if batch_first else Batch((x.transpose(0, 1),), take=columns)
    loss_fn = loss_over(0 if batch_first else 1)
    check_exact(model, batch, loss_fn, dtype=dtype, batch_first=batch_first)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_bias_and_reduction(bias: bool, loss_reduction: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, STEPS, 3)
    model = rnn("lstm", bias=bias)
    check_exact(model, x, loss_over(0), dtype=dtype, loss_reduction=loss_reduction)


class TimeFirst(nn.Module):
    """A batch-first model around a layer that wants time first; the last step is classified."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)
        self.rnn = rnn(kind, batch_first=False, num_layers=2)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids).transpose(0, 1))[0][-1])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_time_first_inside(kind: str, steps: int, dtype: torch.dtype) -> None:
    """With steps == 4 there are as many time steps as samples."""
    check_exact(TimeFirst(kind), torch.randint(9, (4, steps)), dtype=dtype)


class WithState(nn.Module):
    """Starts from a state that another layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(3, 4)
        self.rnn = rnn("gru")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x, self.start(x[:, 0])[None])[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_state(dtype: torch.dtype) -> None:
    check_exact(WithState(), torch.randn(4, STEPS, 3), dtype=dtype)


LENGTHS = {"sorted": [5, 4, 4, 1], "unsorted": [2, 5, 1, 4]}


def padded_loss(output: tuple, _: Any) -> torch.Tensor:
    """Loss of a packed output sequence; the padding's share is constant."""
    sequence, _ = pad_packed_sequence(output[0], batch_first=True, total_length=STEPS)
    return sample_loss(sequence)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(12)
def test_packed_root(kind: str, bidirectional: bool, order: str, dtype: torch.dtype) -> None:
    """The rows of a packed sequence are sorted by length and shrink over time."""
    x, lengths = torch.randn(4, STEPS, 3), LENGTHS[order]

    def pack(rows: slice, to: torch.dtype) -> Batch:
        packed = pack_padded_sequence(
            x[rows].to(to), lengths[rows], batch_first=True, enforce_sorted=order == "sorted"
        )
        return Batch((packed,), take=lambda _, i: pack(slice(i, i + 1), torch.float64))

    model = rnn(kind, num_layers=2, bidirectional=bidirectional)
    check_exact(model, pack(slice(None), dtype), padded_loss, dtype=dtype)


class Packing(nn.Module):
    """Packs what an embedding made, as text classifiers do."""

    def __init__(self, kind: str, enforce_sorted: bool) -> None:
        super().__init__()
        self.enforce_sorted = enforce_sorted
        self.embedding = nn.Embedding(9, 3)
        self.rnn = rnn(kind, bidirectional=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        sequence, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=STEPS)
        return self.head(sequence.sum(1))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_inside(kind: str, order: str, dtype: torch.dtype) -> None:
    batch = (torch.randint(9, (4, STEPS)), torch.tensor(LENGTHS[order]))
    check_exact(Packing(kind, enforce_sorted=order == "sorted"), batch, dtype=dtype)
