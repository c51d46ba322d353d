"""Gradients that a forward pass takes: of hidden values exact, of parameters refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import UnsupportedLayerError
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    sample_loss,
    summed,
)
from tests.refusal import refused

B, D, K = 4, 6, 3
Does = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two layers and a gain; what a test does with the hidden values and the output."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.does, self.on = does, True
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, K)
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.gain
        out = self.head(hidden)
        return self.does(self, hidden, out) if self.on else out


def gradient(out: Tensor, of: object) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), of, retain_graph=True, allow_unused=True)


def without_a_graph(m: Net, hidden: Tensor, out: Tensor) -> Tensor:
    total = out.sum()
    with torch.no_grad():
        torch.autograd.grad(outputs=total, inputs=[m.gain], retain_graph=True)
    return out


def halved(m: Net, hidden: Tensor, out: Tensor) -> Tensor:
    weight = m.head.weight / 2
    own = hidden @ weight.T
    gradient(own, weight)
    return out + own


REFUSED: dict[str, tuple[Does, str]] = {
    "a weight": (lambda m, h, out: out + 0 * gradient(out, m.head.weight)[0].sum(), "head.weight"),
    "all": (lambda m, h, out: (gradient(out, list(m.parameters())), out)[1], "gain, first.weight"),
    "beside others": (lambda m, h, out: (gradient(out, [h, m.gain]), out)[1], "gain"),
    "without a graph": (without_a_graph, "gain"),
    "a value of a weight": (halved, "head.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("later", [False, True])
def test_of_parameters(name: str, later: bool) -> None:
    does, parameter = REFUSED[name]
    model = Net(does)
    private, x = make_private(model)[1], torch.randn(B, D)
    model.on = not later
    if later:
        backward(private, x)
        model.on = True
    told = rf"^torch\.autograd\.grad inside forward takes gradients of {parameter}"
    with refused(told, UnsupportedLayerError):
        private(x)


EXACT: dict[str, Does] = {
    "hidden values": lambda m, h, out: out + gradient(out, h)[0].detach()[:, :K],
    "both": lambda m, h, out: out * gradient(out, (out, h))[1].detach().mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_of_hidden_values(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net(EXACT[name]).double(), torch.randn(B, D).double()
    rows = []
    for i in range(B):
        model.zero_grad()
        sample_loss(model(x[i : i + 1])).sum().backward()
        rows.append({n: p.grad.clone() for n, p in model.named_parameters()})
    model.zero_grad()
    grads = {n: torch.stack([row[n] for row in rows]) for n in rows[0]}
    private = make_private(model, max_grad_norm=0.5)[1]
    backward(private, x)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 0.5), 1e-10)
