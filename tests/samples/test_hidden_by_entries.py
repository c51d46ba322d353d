"""Rows that follow from others where some entries of a weight hide it, or where the batch is larger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.apart import D, Hidden, T
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(0, keepdim=True).expand_as(h),
    "largest": lambda h: h.amax(0, keepdim=True).expand_as(h),
    "the row before": lambda h: h.roll(1, 0),
    "sum so far": lambda h: h.cumsum(0),
    "rank": lambda h: h.argsort(0).argsort(0).to(h.dtype),
}


class Widened(nn.Module):
    """A head that is given a statistic of the batch beside each row, with weights of `size` for it."""

    def __init__(self, statistic: str, size: float, detached: bool, raw: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(16, 3)
        self.statistic, self.detached, self.raw = STATISTICS[statistic], detached, raw
        with torch.no_grad():
            self.head.weight[:, 8:] *= size

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        beside = self.statistic(h)
        both = torch.cat([h, beside.detach() if self.detached else beside], 1)
        return both @ self.head.weight.T if self.raw else self.head(both)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("raw", [False, True], ids=["layer", "raw"])
@pytest.mark.parametrize("detached", [False, True], ids=["", "detached"])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-6, 1e-4])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_columns_that_say_nothing_yet(
    statistic: str, size: float, detached: bool, raw: bool, dtype: torch.dtype
) -> None:
    model = Widened(statistic, size, detached, raw).to(dtype)
    used = [p for name, p in model.named_parameters() if not (raw and name == "head.bias")]
    private = make_private(model, optimizer_params=used)[1]
    with refused("independently of the others"):
        private(torch.randn(16, 6, dtype=dtype))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.head(torch.cat([h[:, :4], (h - h.mean(0))[:, 4:]], 1) * self.scale)


class Deviation(nn.Module):
    """A channel of the batch's deviation, whose weights start at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(4, 2, 3)
        with torch.no_grad():
            self.second.weight[:, 3:] = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.second(torch.cat([h, h.std(0).mean().expand(len(h), 1, *h.shape[2:])], 1))


@pytest.mark.parametrize(("model", "shape"), [(Scaled, (6,)), (Deviation, (1, 5, 5))])
def test_scales_and_channels(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    private = make_private(model())[1]
    with refused("independently of the others"):
        private(torch.randn(6, *shape))


def test_parameters_are_as_before() -> None:
    """To the bit, whichever of their entries were stirred."""
    model = Widened("mean", 0.0, False, False)
    model.head.weight.data[0, 0] = 1e-30
    with torch.no_grad():
        model.first.weight[2] = 0
        model.first.bias.zero_()
    before = [p.detach().clone() for p in model.parameters()]
    private = make_private(model)[1]
    with refused("independently of the others"):
        private(torch.randn(6, 6))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def groups(h: Tensor) -> Tensor:
    """Normalized in groups of 16 rows; fewer stay as they are."""
    if len(h) < 16:
        return h
    whole, rest = h[: len(h) // 16 * 16], h[len(h) // 16 * 16 :]
    split = whole.view(-1, 16, *h.shape[1:])
    return torch.cat([(split - split.mean(1, keepdim=True)).view_as(whole), rest])


def capacity(h: Tensor) -> Tensor:
    """The first twelve rows that go one way are scaled."""
    chosen = h.flatten(1)[:, 0] > 0
    kept = chosen & (chosen.cumsum(0) <= 12)
    return torch.where(kept.view(-1, 1, 1), 2 * h, h)


def late(h: Tensor) -> Tensor:
    """Rows from number 20 on take another way."""
    return torch.cat([h[:20], h[20:].tanh()])


LARGE = {"groups": groups, "capacity": capacity, "late": late}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("behind", ["nothing", "zero head"])
@pytest.mark.parametrize("way", LARGE)
def test_what_only_larger_batches_show(way: str, behind: str, dtype: torch.dtype) -> None:
    model = Hidden(lambda m, h: LARGE[way](h), behind).to(dtype)
    used = [p for name, p in model.named_parameters() if not name.startswith("second")]
    private = make_private(model, optimizer_params=used)[1]
    with refused("independently of the others"):
        private(torch.randn(96, T, D, dtype=dtype))


@pytest.mark.parametrize("way", LARGE)
def test_what_a_later_batch_shows(way: str) -> None:
    """The first batch is too small for it."""
    model = Hidden(lambda m, h: LARGE[way](h), "nothing")
    used = [p for name, p in model.named_parameters() if not name.startswith("second")]
    private = make_private(model, optimizer_params=used)[1]
    private(torch.randn(10, T, D)).sum().backward()
    with refused("independently of the others"):
        private(torch.randn(96, T, D))


def test_rows_apart_in_a_large_batch() -> None:
    """More than are looked at, of unequal sizes, some of them copies."""
    model = nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(600, D, dtype=torch.float64) * torch.logspace(-3, 3, 600).unsqueeze(1)
    x[100:200] = x[:100]
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    backward(private, x, loss_reduction="sum")
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, C), 1e-10)
    assert optimizer.per_sample_norms.shape == (600,)
