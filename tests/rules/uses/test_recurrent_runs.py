"""Recurrent layers under autocast, checkpointed, compiled, copied, wrapped or not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.oracle import (
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.rules.uses.test_packed import IDS, LENGTHS, Packing
from tests.rules.uses.test_recurrent import STEPS, Loop, kinds, rnn

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


class Between(nn.Module):
    """Two layers deep, between products."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.rnn = rnn(kind, num_layers=2, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(8, 2)
        self.reentrant: bool | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.head(self.run(x))
        return self.head(checkpoint(self.run, x, use_reentrant=self.reentrant))


X = torch.linspace(-2, 3, 4 * STEPS * 3).sin().mul(2).view(4, STEPS, 3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reentrant", [True, False])
@kinds
def test_checkpointed(kind: str, reentrant: bool) -> None:
    model = Between(kind)
    model.reentrant = reentrant
    check_exact(model, X, dtype=torch.float64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_with_dropout(reentrant: bool) -> None:
    """What is computed again draws the same random numbers."""
    found = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = Between("gru", 0.5).double()
        model.reentrant = kind
        _, private, _, _ = make_private(model, max_grad_norm=0.5)
        private(X.double())
        torch.manual_seed(7)
        backward(private, X.double())
        found.append(summed(dict(model.named_parameters())))
    assert relative_error(found[1], found[0]) <= 1e-12


@pytest.mark.one_in(2)
@kinds
def test_packed_and_checkpointed(kind: str) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Embedding(9, 2), Packing(kind, False)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            out = checkpoint(self.inner, ids, lengths, use_reentrant=False)
            return out + self.first(ids).sum(1)

    check_exact(Whole(), (IDS, torch.tensor(LENGTHS["unsorted"])), dtype=torch.float64)


class Cells(Loop):
    def __init__(self, kind: str) -> None:
        cells = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
        super().__init__(cells.get(kind, nn.RNNCell)(3, 4), given=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [Between, Cells])
@kinds
def test_autocast(kind: str, make: type) -> None:
    """The numbers are those of the model as it was; gradients within what bfloat16 rounds."""
    model = make(kind)

    def losses(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        return sample_loss(out.float())

    plain = losses(model, X)
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in plain]
    grads = {
        n: torch.stack(c).double() for n, c in zip(named, zip(*rows, strict=True), strict=True)
    }
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    found = losses(private, X)
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=0)
    found.sum().backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-2
    assert_sums(summed(named), clipped_sum(grads, C), 2e-2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@kinds
def test_the_model_as_it_was(kind: str, dtype: torch.dtype) -> None:
    """Outputs and their types are those of torch's own kernel, under autocast and without."""
    model = Between(kind).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    x = X.to(next(model.parameters()).dtype)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        expected = model.run(model.first(x))
        private = make_private(model)[1]
        private(x)
        seen: list[torch.Tensor] = []
        model.rnn.register_forward_hook(lambda *a: seen.append(a[-1][0].detach()))
        private(x)
    assert seen[-1].dtype == expected.dtype
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(seen[-1], expected, rtol=0, atol=rounding)


@pytest.mark.one_in(2)
@kinds
def test_copied_and_not_wrapped(kind: str) -> None:
    model = Between(kind).double()
    exact = per_sample_gradients(model, X)
    C = norms(exact).median().item()
    twin = copy.deepcopy(model)
    make_private(model, max_grad_norm=C, wrap_model=False)
    backward(model, X.double())
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(exact, C), 1e-10)
    again = copy.deepcopy(model)
    assert all(map(torch.equal, again.parameters(), twin.parameters()))
    assert again.rnn._flat_weights[0] is again.rnn.weight_ih_l0


@pytest.mark.one_in(2)
@kinds
def test_compiled(kind: str) -> None:
    model = Between(kind).double()
    exact = per_sample_gradients(model, X)
    C = norms(exact).median().item()
    named = dict(model.named_parameters())
    _, private, _, _ = make_private(
        torch.compile(model, backend="aot_eager"), max_grad_norm=C,
        optimizer_params=list(named.values()),
    )  # fmt: skip
    backward(private, X.double())
    assert_sums(summed(named), clipped_sum(exact, C), 1e-10)
