"""Parameters that do not train: by requires_grad, or because the optimizer lacks them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import DTYPES, backward, check_exact, make_private


class Small(nn.Module):
    """One layer of every common kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.middle = nn.Linear(6, 6)
        self.layer_norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(self.embedding(ids).transpose(1, 2)))
        x = torch.tanh(self.middle(x.transpose(1, 2)))
        return self.head(self.layer_norm(x))


IDS = (4, 5)
FROZEN = {
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "first-layers": lambda name: name.startswith(("embedding", "conv")),
    "middle-layer": lambda name: name.startswith("middle"),
    "norms": lambda name: "norm" in name,
    "head": lambda name: name.startswith("head"),
    "all-but-the-head": lambda name: not name.startswith("head"),
    "all-but-one-bias": lambda name: name != "conv.bias",
    "half-of-each-norm": lambda name: name in ("norm.weight", "layer_norm.bias"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", FROZEN)
def test_requires_no_gradient(which: str, dtype: torch.dtype) -> None:
    model = Small()
    for name, p in model.named_parameters():
        p.requires_grad_(not FROZEN[which](name))
    check_exact(model, torch.randint(7, IDS), dtype=dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("which", FROZEN)
def test_not_in_the_optimizer(which: str, loss_reduction: str, dtype: torch.dtype) -> None:
    """Norms cover the optimizer's parameters only; the others receive no gradient either."""
    model = Small()
    names = [n for n, _ in model.named_parameters() if not FROZEN[which](n)]
    check_exact(
        model,
        torch.randint(7, IDS),
        dtype=dtype,
        loss_reduction=loss_reduction,
        optimizer_names=names,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_weight_frozen_bias_trained(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    check_exact(model, torch.randn(4, 6), dtype=dtype)


class Adapted(nn.Module):
    """A frozen layer and a trained low-rank correction (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters(dtype: torch.dtype) -> None:
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Tanh(), Adapted())
    check_exact(model, torch.randn(4, 5, 6), dtype=dtype)


def test_frozen_parameters_stay_as_they_were() -> None:
    model = Small()
    model.middle.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    _, private, optimizer, _ = make_private(model)
    backward(private, torch.randint(7, IDS))
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if not n.startswith("middle")}
    assert model.middle.weight.grad is None
