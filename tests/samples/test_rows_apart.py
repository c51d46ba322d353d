"""Rows that are not apart are found whatever weights hide them, in whatever precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.apart import B, D, Hidden, T, Use
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    summed,
)
from tests.refusal import refused


def batch_norm(h: Tensor) -> Tensor:
    return F.batch_norm(h.flatten(1), None, None, training=True).view_as(h)


def routed(m: nn.Module, h: Tensor) -> Tensor:
    """An expert with room for two thirds of the rows: those with the largest first entry."""
    score = h[:, 0, 0]
    chosen = score.argsort(descending=True)[: max(1, 2 * len(h) // 3)]
    return h.index_put((chosen,), h[chosen] * score[chosen].sigmoid()[:, None, None])


class ByNumbers(torch.autograd.Function):
    """The identity, whose gradient is scaled by a statistic of the batch."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.scale = h.square().sum()
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.scale


def straight_through(h: Tensor, scale: Tensor | float) -> Tensor:
    """`h`, with a gradient that many times as large."""
    return h * scale + (h - h * scale).detach()


def hooked(h: Tensor) -> Tensor:
    out = h * 1
    if out.requires_grad:
        out.register_hook(lambda g: g * h.detach().square().sum())
    return out


COUPLINGS: dict[str, Use] = {
    "batch norm": lambda m, h: batch_norm(h),
    "centred": lambda m, h: h - h.mean(0),
    "one per cent": lambda m, h: h - 0.01 * h.mean(0),
    "one in ten thousand": lambda m, h: h + 1e-4 * h.mean(0),
    "detached statistics": lambda m, h: h / (1 + h.detach().std(0)),
    "before a layer": lambda m, h: m.second(h - h.mean(0)),
    "after a layer": lambda m, h: (y := m.second(h)) - 0.1 * y.mean(0),
    "sorted": lambda m, h: m.second(h.sort(0).values),
    "mixup": lambda m, h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "routing with capacity": routed,
    "number of rows": lambda m, h: h / len(h),
    "gradient by a statistic": lambda m, h: straight_through(h, h.detach().square().sum()),
    "gradient by the number of rows": lambda m, h: straight_through(h, len(h)),
    "autograd function": lambda m, h: ByNumbers.apply(h),
    "hook": lambda m, h: hooked(h),
    "gradient of another row": lambda m, h: h + 0.01 * (h.roll(1, 0) - h.roll(1, 0).detach()),
}
BEHIND = ["nothing", "zero head", "small head", "zero gate", "layer scale"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_hidden_by_weights(coupling: str, behind: str, dtype: torch.dtype) -> None:
    model = Hidden(COUPLINGS[coupling], behind).to(dtype)
    x = torch.randn(6, T, D, dtype=dtype)
    private = make_private(model, optimizer_params=used(model))[1]
    for _ in range(2):  # and not half known after the first refusal
        with refused("independently of the others|batch dimension"):
            private(x)


def used(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


APART: dict[str, Use] = {
    "nothing": lambda m, h: h,
    "gate": lambda m, h: m.second(h) * torch.sigmoid(h),
    "parameter": lambda m, h: h + m.raw,
    "largest of its own": lambda m, h: h - h.detach().amax(-1, keepdim=True),
    "mean of its own": lambda m, h: h * h.mean((1, 2), keepdim=True),
    "straight through": lambda m, h: straight_through(h, 3.0) + (h.sign() - h).detach(),
    "layer in another order": lambda m, h: m.second(h[(o := h[:, 0, 0].argsort())])[o.argsort()],
    "layer in a random order": lambda m, h: m.second(h[(o := torch.randperm(len(h)))])[o.argsort()],
    "first row of a parameter": lambda m, h: h + m.raw[0],
    "mean of a parameter": lambda m, h: h * m.raw.mean(0) + m.raw.flip(0)[0],
    "norm of a parameter": lambda m, h: h + m.raw / m.raw.norm(),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("use", APART)
def test_what_is_apart_is_exact(use: str, behind: str) -> None:
    """The same models, without a coupling: rows in another order that are put back, too."""
    model = Hidden(APART[use], behind).double()
    x = torch.randn(B, T, D).double()
    if "of a parameter" in use:
        model.raw.data.normal_()
    grads = per_sample_gradients(model, x)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    backward(private, x)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert relative_error(optimizer.per_sample_norms, norms(grads)) < 1e-10
    assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """A coupling of 0.1%, below the rounding of the values, shows in the gradients."""
    x = torch.randn(6, T, D).to(dtype)
    make_private(model := Hidden(lambda m, h: m.second(h), "nothing").to(dtype))[1](x)
    assert model is not None
    private = make_private(Hidden(lambda m, h: h + 1e-3 * h.roll(1, 0), "nothing").to(dtype))[1]
    with refused("independently of the others"):
        private(x)


class Masked(Hidden):
    """Scales by a statistic of the batch, and then rules the first class out."""

    def __init__(self, value: float) -> None:
        super().__init__(lambda m, h: h, "nothing")
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y / y.detach().abs().mean()).masked_fill(torch.tensor([True, False]), self.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_beside_what_a_mask_has_written(value: float, dtype: torch.dtype) -> None:
    private = make_private(Masked(value).to(dtype))[1]
    with refused("independently of the others"):
        private(torch.randn(6, T, D, dtype=dtype))
