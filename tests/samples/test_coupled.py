"""Models whose rows are not apart, or not to be found: refused at the first step, every time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastclip.errors import BatchSizeError, FastclipError, GraphError, StepError
from fastclip.rules.records import LinearRecord
from fastclip.samples.probing import Runs
from tests.oracle import (
    Batch,
    check_exact,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
)

B, T, D = 4, 4, 4


class Model(nn.Module):
    """A Linear, a position table of raw parameters, an embedding, and a chosen way to use them."""

    def __init__(self, use) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(D, D), nn.Embedding(T, D)
        self.raw = nn.Parameter(torch.randn(1, T, D))
        self.register_buffer("mean", torch.zeros(D))
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def moving_mean(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.mean = 0.9 * model.mean + x.mean((0, 1))
    return model.layer(x - model.mean)


def in_place_mean(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.mean.mul_(0.9).add_(x.mean((0, 1)))
    return model.layer(x - model.mean)


def overwritten(model: Model, x: torch.Tensor) -> torch.Tensor:
    """No gradient tells of the mean where everything lies above; in another batch something may not."""
    h = model.layer(x + x.mean(0))
    return h.masked_fill(h > -100.0, 0.0) + model.raw


REFUSED = {
    "mean under a mask": overwritten,
    "mean over the batch": lambda m, x: m.layer(x - x.mean(0)),
    "layer over the mean": lambda m, x: x + m.layer(x.mean(0, keepdim=True)),
    "buffer in place": in_place_mean,
    "buffer replaced": moving_mean,
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Each call of it: the first refusal must not leave half an answer behind."""
    _, private, _, _ = make_private(Model(REFUSED[case]))
    for _ in range(2):
        with pytest.raises(FastclipError):
            private(torch.randn(B, T, D))


APART = {
    "first row of an expanded parameter": lambda m, x: m.layer(x + m.raw[0]),
    "mean of an expanded parameter": lambda m, x: m.layer(x + m.raw.mean(0)),
    "first row of an embedding": lambda m, x: m.layer(x + m.table(torch.arange(T)[None])[0]),
    "first row, then a norm": lambda m, x: nn.functional.layer_norm(m.layer(x) + m.raw[0], (D,)),
    "two axes": lambda m, x: m.layer(m.layer(x).transpose(0, 1)).transpose(0, 1),
    "folded rows": lambda m, x: m.layer(x.reshape(-1, D)).view(x.shape),
}


@pytest.mark.parametrize("b", [1, B, 6])
@pytest.mark.parametrize("case", APART)
def test_exact(case: str, b: int) -> None:
    """Parameters without samples, and layers whose rows are folded or lie along another axis."""
    C = 0.3 if b == 1 else None
    check_exact(Model(APART[case]), torch.randn(b, T, D), dtype=torch.float64, C=C)


def test_samples_that_cannot_be_found() -> None:
    _, private, _, _ = make_private(Model(lambda m, rows: m.layer(torch.cat(rows).sum(0))))
    with pytest.raises(FastclipError, match=r"either may be the samples|depends on another sample"):
        private([torch.randn(6, D) for _ in range(3)])


class Language(nn.Module):
    """Tokens [b, t] and positions [t]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(7, D), nn.Embedding(64, D)
        self.head = nn.Linear(D, 2)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.token(ids) + self.position(positions))).mean(1)


@pytest.mark.parametrize("b", [1, 2, 16])
def test_positions_beside_a_batch_of_any_size(b: int) -> None:
    """With one row, t looks like the batch size; the row would count t times."""
    batch = Batch(
        (torch.randint(7, (b, 16)), torch.arange(16)),
        take=lambda batch, i: Batch((batch.args[0][i : i + 1], batch.args[1])),
    )
    check_exact(Language(), batch, dtype=torch.float64, C=1e-3)


def test_an_empty_first_batch_with_positions() -> None:
    _, private, optimizer, _ = make_private(Language())
    private(torch.zeros(0, 5, dtype=torch.long), torch.arange(5)).sum().backward()
    optimizer.step()
    assert len(optimizer.per_sample_norms) == 0


@pytest.mark.parametrize("held", [False, True])
def test_a_failure_between_the_sums(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-written sums cannot be added to: the sample would count twice."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double()
    _, private, optimizer, _ = make_private(model)
    x = 10 * torch.randn(1, D).double()
    if held:
        optimizer.signal_skip_step(True)
        sample_loss(private(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    calls = iter(range(9))
    original = LinearRecord.clipped_sum

    def fails_once(self: LinearRecord, scale: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError
        return original(self, scale)

    loss = sample_loss(private(x)).sum()
    monkeypatch.setattr(LinearRecord, "clipped_sum", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    monkeypatch.undo()
    with pytest.raises(StepError, match=r"zero_grad\(\)"):
        sample_loss(private(x)).sum().backward()
    with pytest.raises(StepError, match=r"zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    sample_loss(private(x)).sum().backward()
    total = sum(p.summed_grad.square().sum() for p in model.parameters())
    assert total.sqrt() == pytest.approx(1.0, abs=1e-9)


def test_the_whole_model_checkpointed() -> None:
    """Not reentrant: exact. Reentrant and alone: refused, for its parts would be clipped alone."""
    model, x = nn.Linear(D, 3).double(), torch.randn(B, D).double()
    reference = norms(per_sample_gradients(model, x))
    _, private, optimizer, _ = make_private(model)
    sample_loss(checkpoint(private, x, use_reentrant=False)).mean().backward()
    assert relative_error(optimizer.per_sample_norms, reference) < 1e-10
    optimizer.zero_grad()
    with pytest.raises(GraphError, match="use_reentrant=False"):
        sample_loss(checkpoint(private, x.requires_grad_(), use_reentrant=True)).mean().backward()


REPLACED = {
    "table": lambda m: setattr(m, "raw", nn.Parameter(torch.randn(1, T, D))),
    "weight": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.randn(D, D))),
    "layer": lambda m: setattr(m, "layer", nn.Linear(D, D)),
    "wrapped": lambda m: setattr(m, "layer", nn.Sequential(m.layer, nn.Linear(D, D))),
    "added": lambda m: m.add_module("head", nn.Linear(D, D)),
}


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("case", REPLACED)
def test_a_parameter_that_came_later(case: str, looked_at: bool) -> None:
    """Nothing would train it, nor clip it."""
    model = Model(lambda m, x: m.layer(x + m.raw) + m.table(torch.arange(T))[None])
    _, private, _, _ = make_private(model)
    if looked_at:
        private(torch.randn(B, T, D))
    REPLACED[case](model)
    for _ in range(2):
        with pytest.raises(StepError, match=r"were added to the model after make_private"):
            private(torch.randn(B, T, D))


@pytest.mark.parametrize("all_frozen", [False, True])
def test_nothing_but_private_gradients_reaches_the_inner_step(all_frozen: bool) -> None:
    """A stale gradient of a frozen parameter is dropped, not applied."""
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3))
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.ones(D, D)
    before = model[0].weight.clone()
    _, private, optimizer, _ = make_private(model, optimizer_params=list(model.parameters()))
    sample_loss(private(torch.randn(B, D))).mean().backward()
    model[1].requires_grad_(not all_frozen)
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_copy_with_a_frozen_layer() -> None:
    """The copy arms its own guard, over what is still trainable."""
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3))
    _, private, _, _ = make_private(model)
    copied = copy.deepcopy(private)
    copied._module[0].requires_grad_(False)
    sample_loss(copied(torch.randn(B, D))).mean().backward()
    assert copied._module[1].weight.summed_grad is not None
    assert copied._module[0].weight.grad is None


def test_paused_pauses_every_model_of_the_engine() -> None:
    first, second = nn.Linear(D, 3), nn.Linear(D, 3)
    engine, private, _, loader = make_private(first)
    engine.make_private(
        module=second, optimizer=torch.optim.SGD(second.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    with engine.paused():
        sample_loss(private(torch.randn(B, D))).mean().backward()
    assert getattr(first.weight, "summed_grad", None) is None


def test_an_embedding_bag_elsewhere_does_not_hide_coupling() -> None:
    """Only flat ids excuse inputs that cannot be cut; a bag over [b, t] is like any layer."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.layer = nn.EmbeddingBag(9, D), nn.Linear(D, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = self.bag(ids)
            return self.layer(rows - rows.mean(0))

    _, private, _, _ = make_private(Bags())
    with pytest.raises(FastclipError, match="depends on another sample"):
        private(torch.randint(9, (B, T)))


def steeper_below(h: torch.Tensor) -> torch.Tensor:
    return torch.cat([h[:2], 1.5 * h[2:] - 0.5 * h[2:].detach()])


class Backwards(torch.autograd.Function):
    """The identity; from the third row on its gradient is larger."""

    @staticmethod
    def forward(ctx, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> torch.Tensor:
        return torch.cat([g[:2], 1.5 * g[2:]])


@pytest.mark.parametrize("coupling", [steeper_below, Backwards.apply], ids=["detached", "backward"])
def test_gradients_that_follow_from_the_place_of_a_row(coupling) -> None:
    """Their values are the same everywhere."""
    _, private, _, _ = make_private(Model(lambda m, x: m.layer(coupling(m.layer(x)))))
    with pytest.raises(FastclipError, match=r"its position in the batch|another sample"):
        private(torch.randn(B, T, D))


class InLargeBatches(nn.Module):
    """Rows meet where there are more of them than a second attempt would look at."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inside(x)
        return hidden * (1 + hidden.mean(0)) if len(x) > 5 else hidden


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("can't allocate memory: 8 bytes")]
)
@pytest.mark.parametrize("name", ["cut", "once"])
def test_no_memory_for_a_look_is_no_look(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the model's refusal of those rows, after which fewer of them would do."""
    call, calls, left = getattr(Runs, name), 0, 0

    def fails_once(self: Runs, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Runs, name, fails_once)
    for calls in range(1, 100):
        _, private, _, _ = make_private(InLargeBatches())
        left = calls
        with pytest.raises((BatchSizeError, type(error))):
            private(torch.randn(8, D))
        if left > 0:  # refused before there was a call to fail
            break
        with pytest.raises(BatchSizeError):
            private(torch.randn(8, D))
    assert calls > 2
