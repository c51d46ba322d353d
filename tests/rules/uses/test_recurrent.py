"""torch's own recurrent layers and cells, as they are: of any length, direction and depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle import DTYPES, Batch, backward, check_exact, make_private, sample_loss
from tests.refusal import refused

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **given: nn.RNN(*sizes, nonlinearity="relu", **given),
}
STEPS = 5
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


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


@pytest.mark.one_in(6)
@dtypes
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@kinds
def test_as_the_root(kind: str, bidirectional: bool, batch_first: bool, dtype: torch.dtype) -> None:
    model = rnn(kind, num_layers=2, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn(4, STEPS, 3)
    batch = Batch((x,)) if batch_first else Batch((x.transpose(0, 1),), take=columns)
    check_exact(
        model, batch, loss_over(0 if batch_first else 1), dtype=dtype, batch_first=batch_first
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@kinds
def test_without_biases(kind: str, loss_reduction: str) -> None:
    check_exact(
        rnn(kind, bias=False, bidirectional=True), torch.randn(4, STEPS, 3), loss_over(0),
        dtype=torch.float64, loss_reduction=loss_reduction,
    )  # fmt: skip


class TimeFirst(nn.Module):
    """A batch-first model around a layer that wants time first; the last step is classified."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)
        self.rnn = rnn(kind, batch_first=False, num_layers=2)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids).transpose(0, 1))[0][-1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [1, 3, 4])
@kinds
def test_time_first_inside(kind: str, steps: int) -> None:
    """With steps == 4 there are as many time steps as samples."""
    ids = 2 * torch.arange(4 * steps).view(4, steps) % 9
    check_exact(TimeFirst(kind), ids, dtype=torch.float64)


class WithStates(nn.Module):
    """Starts from states that another layer made, or from learned ones."""

    def __init__(self, kind: str, learned: bool) -> None:
        super().__init__()
        self.rnn = rnn(kind, num_layers=2)
        self.learned = nn.Parameter(torch.randn(2, 1, 4)) if learned else None
        self.start = None if learned else nn.Linear(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.start is None:
            h = self.learned.expand(-1, len(x), -1).contiguous()
        else:
            h = self.start(x[:, 0]).unflatten(1, (2, 4)).transpose(0, 1).contiguous()
        given = (h, h.cos()) if isinstance(self.rnn, nn.LSTM) else h
        out, last = self.rnn(x, given)
        last = last[0] if isinstance(last, tuple) else last
        return torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("learned", [True, False])
@kinds
def test_given_states(kind: str, learned: bool) -> None:
    check_exact(WithStates(kind, learned), torch.randn(4, STEPS, 3), dtype=torch.float64)


class Last(nn.Module):
    """Only the final state is used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn, self.head = rnn(kind, bidirectional=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.rnn(x)[1]
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


@kinds
def test_final_states_alone(kind: str) -> None:
    check_exact(Last(kind), torch.randn(4, STEPS, 3), dtype=torch.float64)


class Folded(nn.Module):
    """Words of characters: every sample has several sequences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn, self.head = rnn(kind), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, words, t, d]
        b, words = x.shape[:2]
        last = self.rnn(x.flatten(0, 1))[0][:, -1]
        return self.head(last.view(b, words, -1).tanh().sum(1))


@kinds
def test_several_sequences_of_one_sample(kind: str) -> None:
    check_exact(Folded(kind), torch.randn(4, 3, STEPS, 3), dtype=torch.float64)


class Twice(nn.Module):
    """One layer called twice, whose uses add up."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(3, 4), KINDS[kind](4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = self.rnn(self.first(x))[0]
        return self.rnn(once.flip(1))[0]


@kinds
def test_called_twice(kind: str) -> None:
    check_exact(Twice(kind), torch.randn(4, STEPS, 3), dtype=torch.float64)


@kinds
def test_tied_directions(kind: str) -> None:
    model = rnn(kind, bidirectional=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(model, f"{name}_l0_reverse", getattr(model, f"{name}_l0"))
    check_exact(model, torch.randn(4, STEPS, 3), loss_over(0), dtype=torch.float64)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("trained", ["ih", "hh", "weight", "bias", "weight_hh_l0_reverse", "l1"])
@kinds
def test_partly_frozen(kind: str, trained: str) -> None:
    model = rnn(kind, bidirectional=True, num_layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    check_exact(model, torch.randn(4, STEPS, 3), loss_over(0), dtype=torch.float64)


class Prompt(nn.Module):
    """A recurrent layer over parameters alone: no sample comes in."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.rnn = nn.Parameter(torch.randn(1, STEPS, 3)), rnn(kind)
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.rnn(self.table)[0]


@kinds
def test_over_parameters_alone(kind: str) -> None:
    check_exact(Prompt(kind), torch.randn(4, STEPS, 3), dtype=torch.float64)


class Constant(Prompt):
    """The same over numbers that are the same in every step."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        del self.table
        self.register_buffer("table", torch.randn(1, STEPS, 3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("trained", ["ih", "hh", "bias_hh", "weight"])
@kinds
def test_over_a_constant(kind: str, trained: str) -> None:
    model = Constant(kind)
    for name, parameter in model.rnn.named_parameters():
        parameter.requires_grad_(trained in name)
    check_exact(model, torch.randn(4, STEPS, 3), dtype=torch.float64)


class Decoder(nn.Module):
    """The samples come in by the states; the input is nothing, or learned."""

    def __init__(self, kind: str, learned: bool) -> None:
        super().__init__()
        self.rnn, self.start, self.lstm = rnn(kind), nn.Linear(3, 4), kind == "lstm"
        self.go = nn.Parameter(torch.randn(1, STEPS, 3)) if learned else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.start(x)[None]
        none = x.new_zeros(len(x), STEPS, 3)
        given = none if self.go is None else self.go.expand(len(x), -1, -1)
        return self.rnn(given, (h, h.cos()) if self.lstm else h)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("trained", ["ih", "hh", "i"])
@kinds
def test_decoder(kind: str, trained: str, learned: bool) -> None:
    model = Decoder(kind, learned)
    for name, parameter in model.rnn.named_parameters():
        parameter.requires_grad_(trained in name)
    check_exact(model, torch.randn(4, 3), dtype=torch.float64)


def check_in_one_forward(model: nn.Module, x: torch.Tensor, loss_fn: Any) -> None:
    """Against the losses of one pass over all samples, with its random numbers, one by one."""
    torch.manual_seed(3)
    losses = loss_fn(model(x), None)
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    exact = [torch.stack(column) for column in zip(*rows, strict=True)]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in exact]).sum(0).sqrt()
    threshold = norms.median()
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=threshold.item(), loss_reduction="sum"
    )
    private(x)  # which looks at the samples
    torch.manual_seed(3)
    loss_fn(private(x), None).sum().backward()
    torch.testing.assert_close(optimizer.per_sample_norms, norms, rtol=1e-10, atol=0)
    scale = (threshold / norms).clamp(max=1)
    for parameter, own in zip(named.values(), exact, strict=True):
        expected = torch.einsum("b,b...->...", scale, own)
        torch.testing.assert_close(parameter.summed_grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [True, False])
@kinds
@pytest.mark.one_in(9)
def test_dropout_between_layers(kind: str, bidirectional: bool) -> None:
    """The random numbers are torch's own."""
    model = rnn(kind, num_layers=3, dropout=0.4, bidirectional=bidirectional).double()
    check_in_one_forward(model, torch.randn(4, STEPS, 3, dtype=torch.float64), loss_over(0))


@kinds
def test_weight_norm(kind: str) -> None:
    """The states' weight is computed from other parameters."""
    model = torch.nn.utils.parametrizations.weight_norm(rnn(kind).double(), "weight_hh_l0")
    check_in_one_forward(model, torch.randn(4, STEPS, 3, dtype=torch.float64), loss_over(0))


class Loop(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module, given: bool) -> None:
        super().__init__()
        self.cell, self.start = cell, nn.Linear(3, 4) if given else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(len(x), 4) if self.start is None else self.start(x[:, 0])
        state = (h, h.cos()) if isinstance(self.cell, nn.LSTMCell) else h
        steps = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            steps.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(steps, 1)


CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **given: nn.RNNCell(*sizes, nonlinearity="relu", **given),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, bias: bool, given: bool) -> None:
    model = Loop(CELLS[kind](3, 4, bias=bias), given)
    check_exact(model, torch.randn(4, STEPS, 3), dtype=torch.float64)


class ByHand(nn.Module):
    """A loop of one's own, which begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.own = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), 4, dtype=x.dtype)
        for step in self.inward(x).unbind(1):
            h = (step + F.linear(h, self.own)).tanh()
        return h


def test_a_loop_that_begins_with_zeros() -> None:
    check_exact(ByHand(), torch.randn(4, STEPS, 3), dtype=torch.float64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("b", [0, 1])
@kinds
def test_few_samples(kind: str, b: int) -> None:
    """After a batch of four, one of one sample, or of none."""
    model = rnn(kind, bidirectional=True).double()
    _, private, optimizer, _ = make_private(model, loss_reduction="sum", max_grad_norm=0.1)
    x = torch.randn(4, STEPS, 3, dtype=torch.float64)
    backward(private, x, loss_over(0), "sum")
    optimizer.zero_grad()
    backward(private, x[:b], loss_over(0), "sum")
    assert optimizer.per_sample_norms.shape == (b,)
    total = torch.cat([p.summed_grad.flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(total, torch.tensor(0.1 * b, dtype=torch.float64))


def test_one_sequence_without_a_batch() -> None:
    """[t, d] is one sample, not t of them."""
    _, private, _, _ = make_private(rnn("lstm"))
    with refused("batch axis of the model|samples"):
        private(torch.randn(STEPS, 3))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_projected_states(bidirectional: bool, batch_first: bool, bias: bool) -> None:
    model = nn.LSTM(
        3, 4, 2, proj_size=2, bidirectional=bidirectional, batch_first=batch_first, bias=bias
    )
    x = torch.randn(4, STEPS, 3)
    batch = Batch((x,)) if batch_first else Batch((x.transpose(0, 1),), take=columns)
    loss_fn = loss_over(0 if batch_first else 1)
    check_exact(model, batch, loss_fn, dtype=torch.float64, batch_first=batch_first)
