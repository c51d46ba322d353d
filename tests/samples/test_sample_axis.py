"""Where the samples are: found, or refused, whatever the sizes happen to be."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracle import (
    DTYPES,
    Batch,
    assert_sums,
    backward,
    check_exact,
    check_exact_or_refused,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)

B = 4
LENGTHS = [B, 5, 1]  # as many positions as samples; more; one


class TimeFirst(nn.Module):
    """A layer that sees [t, b, d] inside a model whose inputs are [b, t, d]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(6, 6), lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6)],
    ids=["linear", "layer-norm", "rms-norm"],
)  # fmt: skip
def test_samples_in_the_second_axis(make, length: int, dtype: torch.dtype) -> None:
    check_exact(TimeFirst(make()), torch.randn(B, length, 6), dtype=dtype)


class TimeFirstRoot(nn.Module):
    """Takes and returns [t, b, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("length", LENGTHS)
def test_not_batch_first(length: int, loss_reduction: str, dtype: torch.dtype) -> None:
    batch = Batch(
        (torch.randn(length, B, 6),), take=lambda batch, i: Batch((batch.args[0][:, i : i + 1],))
    )
    check_exact(
        TimeFirstRoot(),
        batch,
        lambda output, _: sample_loss(output.transpose(0, 1)),
        dtype=dtype,
        loss_reduction=loss_reduction,
        batch_first=False,
    )


class Folded(nn.Module):
    """Folds positions into rows, so that a layer sees [b * t, d]."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        self.time_first = time_first
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1) if self.time_first else x
        y = torch.tanh(self.layer(y.reshape(-1, 6))).view(y.shape)
        return self.head(y.transpose(0, 1) if self.time_first else y)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("time_first", [False, True])
def test_positions_folded_into_rows(time_first: bool, length: int) -> None:
    check_exact_or_refused(Folded(time_first), torch.randn(B, length, 6), dtype=torch.float64)


class Chosen(nn.Module):
    """A layer that sees the first two samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([torch.tanh(self.layer(x[:2])), x[2:]]))


def test_some_of_the_samples() -> None:
    """Without its row numbers a layer cannot tell which; the oracle's single row is sample 0."""
    batch = Batch((torch.randn(B, 6),), take=lambda batch, i: Batch((batch.args[0][[i, i, i]],)))

    def loss_fn(output: torch.Tensor, _) -> torch.Tensor:
        return sample_loss(output) if len(output) == B else sample_loss(output)[:1]

    check_exact_or_refused(Chosen(), batch, loss_fn, dtype=torch.float64)


class Keywords(nn.Module):
    """Inputs by keyword, in a nested structure, with a mask [1, t] that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, *, scale: torch.Tensor, data: dict) -> dict:
        x, mask = data["features"]
        return {"out": self.layer(x * mask[..., None]) * scale[:, None, None]}


@pytest.mark.parametrize("length", LENGTHS)
def test_nested_keyword_inputs(length: int) -> None:
    mask = torch.rand(1, length)

    def build(rows: slice, batch: Batch | None = None) -> Batch:
        data, scale = (batch.kwargs["data"], batch.kwargs["scale"]) if batch else (None, None)
        x, m = data["features"] if data else (torch.randn(B, length, 6), mask)
        scale = torch.linspace(0.5, 2.0, B) if scale is None else scale
        return Batch(
            kwargs={"scale": scale[rows], "data": {"features": (x[rows], m)}},
            take=lambda b, i: build(slice(i, i + 1), b),
        )

    check_exact(
        Keywords(), build(slice(None)), lambda out, _: sample_loss(out["out"]), dtype=torch.float64
    )


class Positions(nn.Module):
    """Adds an embedding of ids [t] or [1, t] to every sample."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        ids = torch.arange(x.shape[1]) if ids is None else ids
        ids = ids[None] if self.rank == 2 else ids
        return self.head(torch.tanh(x + self.table(ids)))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("first", [1, 3])
def test_the_batch_size_may_change(first: int, rank: int) -> None:
    """From step to step; what the first batch showed, even one of a single row, stays true."""
    model = nn.Sequential(Positions(rank), nn.Tanh(), nn.Linear(3, 2)).double()
    batches = [torch.randn(b, 5, 6, dtype=torch.float64) for b in (first, 7, 1, 5, 2)]
    expected = [clipped_sum(per_sample_gradients(model, x), 1.0) for x in batches]
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, lr=0.0)
    for x, sums in zip(batches, expected, strict=True):
        optimizer.zero_grad()
        backward(private, x)
        assert_sums(summed(params), sums, 1e-10)
        optimizer.step()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ids_first", [False, True])
def test_an_input_that_all_samples_share(ids_first: bool, length: int) -> None:
    """Ids [t] given to the model: with t == b they look like one id a sample."""
    model = PositionsFirst() if ids_first else Positions(1)

    def build(x: torch.Tensor) -> Batch:
        ids = torch.arange(length)
        args = (ids, x) if ids_first else (x, ids)
        return Batch(args, take=lambda batch, i: build(x[i : i + 1].double()))

    check_exact_or_refused(model, build(torch.randn(B, length, 6)), dtype=torch.float64)


class PositionsFirst(Positions):
    """The same, the shared input before the samples."""

    def __init__(self) -> None:
        super().__init__(rank=1)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids)


def test_random_numbers_are_left_alone() -> None:
    """Whatever the engine runs to find the axis, dropout masks are those of ordinary training."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    plain, x = copy.deepcopy(model), torch.randn(B, 6)
    private = make_private(model)[1]
    torch.manual_seed(5)
    first, second = private(x), private(x)
    torch.manual_seed(5)
    assert torch.equal(first, plain(x))
    assert torch.equal(second, plain(x))


@dataclass
class Fields:
    """A structure that torch's pytree does not know."""

    x: torch.Tensor


class OfFields(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, fields: Fields) -> Fields:
        return Fields(self.layer(fields.x))


def test_dataclasses() -> None:
    batch = Batch(
        (Fields(torch.randn(B, 6).double()),),
        take=lambda batch, i: Batch((Fields(batch.args[0].x[i : i + 1]),)),
    )
    check_exact(OfFields(), batch, lambda out, _: sample_loss(out.x), dtype=torch.float64)


class Padded(nn.Module):
    """Packs, runs an LSTM, pads to the longest of the batch: a row's length depends on others'."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 6), DPLSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def test_padding_to_the_longest_row() -> None:
    """Padding is not coupling: what two rows have in common must agree."""

    def loss_fn(output: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(output.shape[1]) < lengths[:, None]
        return (output.square().sum(2) * inside).sum(1)

    lengths = torch.tensor([2, 5, 3])
    batch = Batch((torch.randint(9, (3, 5)), lengths), target=lengths)
    check_exact(Padded(), batch, loss_fn, dtype=torch.float64)
