"""Rows that are NaN, infinite, very large, shorter or with gaps: a first batch may hold none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.samples.outputs import _stopped
from tests.oracle import Batch, check_exact, make_private, sample_loss, summed
from tests.refusal import refused

B, T, D, K = 6, 5, 4, 3
Mix = Callable[[nn.Module, Tensor], Tensor]


def packed(m: nn.Module, x: Tensor) -> Tensor:
    """All rows are one sequence, in which each attends to itself."""
    q, k, v = m.layer(x.flatten(0, 1)).chunk(3, -1)
    own = torch.arange(len(x)).repeat_interleave(x.shape[1])
    apart = own[:, None] != own
    return ((q @ k.mT).masked_fill(apart, -1e30).softmax(-1) @ v).view(*x.shape).tanh().mean(1)


def fused(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.layer(x.flatten(0, 1))[None, None].chunk(3, -1)
    own = torch.arange(len(x)).repeat_interleave(x.shape[1])
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=own[:, None] == own)
    return y.view(*x.shape).tanh().mean(1)


def added(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.layer(x.flatten(0, 1)).chunk(3, -1)
    own = torch.arange(len(x)).repeat_interleave(x.shape[1])
    scores = q @ k.mT + (own[:, None] != own) * -1e4
    return (scores.softmax(-1) @ v).view(*x.shape).tanh().mean(1)


def dispatched(m: nn.Module, x: Tensor) -> Tensor:
    return torch.eye(len(x), dtype=x.dtype) @ m.layer(x)[..., :D].mean(1)


def graphs(m: nn.Module, x: Tensor) -> Tensor:
    adjacency = torch.block_diag(*[torch.ones(T, T, dtype=x.dtype)] * len(x))
    h = adjacency @ m.layer(x.flatten(0, 1))[:, :D]
    return h.tanh().view(*x.shape).mean(1)


def stabilised(m: nn.Module, x: Tensor) -> Tensor:
    h = m.layer(x)
    e = (h[..., :1] - h[..., :1].max()).exp()
    return (e / (e.sum(1, keepdim=True) + 1e-16) * h[..., D : 2 * D]).sum(1).tanh()


def rescaled(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(x / 255 if x.max() > 10 else x)[..., :D].tanh().mean(1)


def trimmed(m: nn.Module, x: Tensor) -> Tensor:
    length = int((x.abs().sum(-1) > 0).sum(1).max())
    return m.layer(x[:, :length])[..., :D].tanh().mean(1)


def filled(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(torch.where(x.isnan(), x.nanmean(0), x))[..., :D].tanh().mean(1)


def filled_alike(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(torch.where(x.isnan(), 0.5, x))[..., :D].tanh().mean(1)


def attended(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.layer(x).chunk(3, -1)
    lower = torch.ones(T, T, dtype=torch.bool).tril()
    return ((q @ k.mT).masked_fill(~lower, -torch.inf).softmax(-1) @ v).tanh().mean(1)


def own_length(m: nn.Module, x: Tensor) -> Tensor:
    inside = (x.abs().sum(-1, keepdim=True) > 0).to(x.dtype)
    return (m.layer(x) * inside)[..., :D].tanh().sum(1) / inside.sum(1).clamp_min(1)


def chosen(m: nn.Module, x: Tensor) -> Tensor:
    """Experts of whole rows, put back by their numbers."""
    h = m.layer(x).mean(1)
    out = torch.zeros_like(h[:, :D])
    for part in range(2):
        at = (h[:, :2].argmax(1) == part).nonzero()[:, 0]
        out = out.index_add(0, at, h[at, part * D : (part + 1) * D].tanh())
    return out


def bounded(mix: Mix) -> Mix:
    return lambda m, x: mix(m, x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3))


COUPLED = (packed, fused, added, dispatched, graphs, stabilised, rescaled, trimmed, filled)
APART = {
    "nothing": lambda m, x: m.layer(x)[..., :D].mean(1),
    **{f.__name__: f for f in (filled_alike, attended, own_length, chosen)},
    **{f"bounded {f.__name__}": bounded(f) for f in (packed, fused, dispatched, graphs)},
}


class Mixed(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.layer, self.head, self.mix = nn.Linear(D, 3 * D), nn.Linear(D, K), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self, x))


@pytest.mark.parametrize("mix", COUPLED)
def test_what_special_rows_change_is_refused(mix: Mix) -> None:
    """Rows of the first batch are ordinary."""
    private = make_private(Mixed(mix).double())[1]
    with refused("independently"):
        private(torch.randn(B, T, D, dtype=torch.float64))


@pytest.mark.parametrize("name", APART)
def test_what_keeps_special_rows_apart_is_exact(name: str) -> None:
    x = torch.randn(B, T, D, dtype=torch.float64)
    check_exact(Mixed(APART[name]), Batch((x,)), dtype=torch.float64)


@pytest.mark.parametrize("name", ["nothing", "attended"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_models_in_other_types(name: str, dtype: torch.dtype) -> None:
    private = make_private(Mixed(APART[name]).to(dtype))[1]
    private(torch.randn(B, T, D, dtype=dtype))


class Words(Mixed):
    def __init__(self) -> None:
        super().__init__(packed)
        self.table = nn.Embedding(9, D)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.table(ids))


@pytest.mark.parametrize("ids", [False, True])
def test_a_row_whose_loss_is_not_finite_adds_nothing(ids: bool) -> None:
    """Though rows are mixed with weights of 0: the sum is that of the other rows."""
    model = Words() if ids else Mixed(bounded(packed))
    x = torch.randint(9, (B, T)) if ids else torch.randn(B, T, D, dtype=torch.float64)
    y = torch.randn(B, K, dtype=torch.float64)
    model = model.double()
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    params = dict(model.named_parameters())

    def sums(rows: list[int], target: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        (private(x[rows]) - target).square().mean(1).mean().backward()
        return {n: g.clone() for n, g in summed(params).items()}

    sums([*range(B)], y)
    others = [i for i in range(B) if i != 2]
    without = sums(others, y[others])
    for value in (torch.nan, torch.inf, 1e300):
        broken = y.clone()
        broken[2, 1] = value
        for name, g in sums([*range(B)], broken).items():
            torch.testing.assert_close(g, without[name])


class Loss(nn.Module):
    """Computes it inside."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(D, K), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(F.cross_entropy(self.layer(x), y, reduction="none"))


LOSSES = {
    "mean": (Tensor.mean, True),
    "with 0 times what is coupled": (lambda x: x.mean() + 0 * x.logsumexp(0), False),
    "by its mean and times it": (lambda x: (x / x.mean().item()).mean() * x.mean().item(), False),
    "of the largest": (lambda x: x.topk(max(1, len(x) // 2))[0].mean(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_inside(name: str) -> None:
    loss, apart = LOSSES[name]
    x, y = torch.randn(B, D, dtype=torch.float64), torch.randint(K, (B,))
    _, private, _, _ = make_private(Loss(loss).double())
    if apart:
        private(x, y).backward()
        return
    with refused("return one loss per sample|independently"):
        private(x, y).backward()


def test_what_stops() -> None:
    g = torch.ones(3, 2, 2)
    g[1, 0, 1] = torch.nan
    assert torch.equal(_stopped(0, g).sum((1, 2)), torch.tensor([4.0, 0.0, 4.0]))
    assert torch.equal(_stopped(1, g).sum((0, 2)), torch.tensor([0.0, 6.0]))
    assert _stopped(-1, g).sum() == 11
    assert torch.equal(_stopped(0, torch.tensor([1e30, 1.0])), torch.tensor([0.0, 1.0]))
    half = torch.tensor([6e4, torch.inf], dtype=torch.float16)
    assert torch.equal(_stopped(0, half), torch.tensor([6e4, 0.0], dtype=torch.float16))


class _OwnGradient(torch.autograd.Function):
    """Of which only values can say whose it is."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clone()


@pytest.mark.parametrize("k", [0, 1, -1])
def test_one_sample_chooses_the_way_of_all(k: int) -> None:
    """A way that it takes for nearly any data: what the others give must not follow from the answer."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(D, D), nn.Linear(D, K)

        def forward(self, x: Tensor) -> Tensor:
            h = _OwnGradient.apply(self.layer(x - x.mean(1, keepdim=True)) * 9)
            return self.head(h + 1 if bool((h[k].abs() > 0.1).any()) else h)

    torch.manual_seed(0)
    _, private, _, _ = make_private(Chooses().double())
    with refused("independently"):
        sample_loss(private(3 * torch.randn(B, D, dtype=torch.float64))).mean().backward()
