"""Layers without a rule of their own: each use of their parameters by itself, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.apart import check_exact_of_one_draw
from tests.oracle import DTYPES, backward, check_exact, make_private
from tests.refusal import refused


class Affine(nn.Module):
    """x * gamma + beta over the last dimension."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.randn(d)), nn.Parameter(torch.randn(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma + self.beta


class Gated(nn.Module):
    """Two inputs, one of them by keyword, two outputs, a buffer and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor) -> tuple:
        y = (x + self.shift) @ self.weight
        return y * torch.sigmoid(gate * self.temperature), y.sum(-1, keepdim=True)


class GatedModel(nn.Module):
    """Feeds `Gated` from two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gated = nn.Linear(6, 6), nn.Linear(6, 6), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.gated(self.a(x), gate=self.b(x))
        return y * z


class OwnForward(nn.Linear):
    """A Linear that is not one: the rule of Linear would be wrong for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.sin(), self.weight * 2.0, self.bias).sum(1)


class SameForward(nn.Linear):
    """A subclass that inherits its forward."""


class TwoInputs(nn.Module):
    """A bilinear form of two inputs of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.form(x, y)


CASES = {
    "affine": (lambda: nn.Sequential(nn.Linear(6, 6), Affine(), nn.Tanh()), [(4, 6)]),
    "affine-positions": (lambda: nn.Sequential(nn.Linear(6, 6), Affine()), [(4, 5, 6)]),
    "affine-alone": (Affine, [(4, 6)]),
    "own-forward": (lambda: nn.Sequential(nn.Linear(6, 6), OwnForward(6, 3)), [(4, 5, 6)]),
    "same-forward": (lambda: nn.Sequential(nn.Linear(6, 6), SameForward(6, 3)), [(4, 5, 6)]),
    "prelu": (lambda: nn.Sequential(nn.Conv1d(6, 6, 1), nn.PReLU(6)), [(4, 6, 7)]),
    "prelu-one-slope": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU()), [(4, 5, 6)]),
    "transposed-conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 4, 3, stride=2)),
        [(4, 3, 5, 5)],
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_without_a_rule(case: str, loss_reduction: str, dtype: torch.dtype) -> None:
    make, shapes = CASES[case]
    inputs = tuple(torch.randn(shape) for shape in shapes)
    check_exact(make(), inputs, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.parametrize("dtype", DTYPES)
def test_called_twice(dtype: torch.dtype) -> None:
    layer = Affine()
    check_exact(nn.Sequential(layer, nn.Tanh(), layer), torch.randn(4, 6), dtype=dtype)


class Noisy(Affine):
    """Draws a mask in its forward, after its parameters were used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


class Counting(Affine):
    """Changes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Dropped(Affine):
    """Draws a mask for its parameter, one for all samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.dropout(self.gamma, 0.5, training=True) + self.beta


class Jittered(Affine):
    """Draws for every sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.randn_like(x)) * self.gamma + torch.rand_like(x) * x * self.beta


@pytest.mark.parametrize("layer", [Noisy, Dropped, Jittered])
def test_random_numbers(layer: type) -> None:
    """What is kept for the backward pass is what was drawn."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(layer()), nn.Tanh()).double()
    check_exact_of_one_draw(model, torch.randn(4, 6).double())


def test_buffers_that_change() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Counting()))
    with refused(r"1\.0\.calls"):
        backward(make_private(model)[1], torch.randn(4, 6))


class ScaledRoot(nn.Module):
    """A raw parameter without a leading 1, beside layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(x * self.scale))


def weight_normalized() -> nn.Module:
    """A weight made of two parameters at every forward."""
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "widths"),
    [(ScaledRoot, [6]), (weight_normalized, [6]), (GatedModel, [6]), (TwoInputs, [6, 5])],
)
def test_several_tensors(make, widths: list, dtype: torch.dtype) -> None:
    inputs = tuple(torch.randn(4, width) for width in widths)
    check_exact(make(), inputs, dtype=dtype)
