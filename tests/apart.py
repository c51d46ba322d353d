"""A network in which something may stand between two layers, and one step of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.oracle import (
    Grads,
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    sample_loss,
    summed,
)

B, T, D = 4, 3, 6
Use = Callable[[nn.Module, Tensor], Tensor]


class Hidden(nn.Module):
    """Something between two layers, behind a gate, a scale or a head that lets nothing through yet."""

    def __init__(self, use: Use, behind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.raw = nn.Parameter(torch.zeros(1, T, D))
        scale = {"zero gate": 0.0, "layer scale": 1e-6}.get(behind)
        self.scale = None if scale is None else nn.Parameter(torch.full((1, 1, D), scale))
        if behind == "zero head":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        if behind == "small head":
            nn.init.normal_(self.head.weight, std=1e-8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.use(self, h) if self.scale is None else h + self.scale * self.use(self, h)
        return self.head(h.mean(1))


def own_gradients(
    model: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> Grads:
    """Gradients of every row alone, of this very model: what reaches it past its arguments counts too.

    Args:
        model: not private; left untouched.
        call: from the model and rows to the rows' losses; half squares of the output if None.
    """
    call = call or (lambda m, rows: sample_loss(m(rows)))
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {n: [] for n in params}
    for i in range(len(x)):
        losses = call(model, x[i : i + 1])
        assert losses.shape == (1,)
        grads = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
        for (name, p), g in zip(params.items(), grads, strict=True):
            found[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(rows) for name, rows in found.items()}


def check_exact_as_it_is(
    model: nn.Module, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> None:
    """One backward pass in float64 against every row alone, without a copy of the model.

    Args:
        model: becomes private. x: the batch. call: as for `own_gradients`.
    """
    model, x = model.double(), x.double() if x.is_floating_point() else x
    call = call or (lambda m, rows: sample_loss(m(rows)))
    grads = own_gradients(model, x, call)
    own = norms(grads)
    C = own.median().item() * 0.9  # some rows are clipped
    params = {n: p for n, p in model.named_parameters() if n in grads}
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    call(private, x).mean().backward()
    assert [n for n, p in params.items() if p.grad is not None] == []
    torch.testing.assert_close(optimizer.per_sample_norms, own, rtol=1e-10, atol=1e-12)
    assert_sums(summed(params), clipped_sum(grads, C), 1e-10)


def check_exact_of_one_draw(model: nn.Module, x: Tensor) -> None:
    """A model that draws random numbers: each row's loss by itself, all of one forward pass.

    Args:
        model: in float64; becomes private. Its rows must be apart. x: the batch.
    """
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def draw(m: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return sample_loss(m(x))

    rows = [
        torch.autograd.grad(loss, list(params.values()), retain_graph=True) for loss in draw(model)
    ]
    grads = {
        n: torch.stack(column) for n, column in zip(params, zip(*rows, strict=True), strict=True)
    }
    C = norms(grads).median().item() * 0.9
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    draw(private).mean().backward()
    torch.testing.assert_close(optimizer.per_sample_norms, norms(grads), rtol=1e-10, atol=1e-12)
    assert_sums(summed(params), clipped_sum(grads, C), 1e-10)


def step(private: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    backward(private, x)
    optimizer.step()


class LatePositions(nn.Module):
    """A position table in a branch that is reached later."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.head, self.rank, self.calls = nn.Linear(D, D), nn.Linear(D, 2), rank, 0
        self.table, self.on = nn.Embedding(9, D), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.on:
            ids = torch.arange(x.shape[1])
            h = h + self.table(ids if self.rank == 1 else ids[None])
        return self.head(torch.tanh(h)).mean(1)
