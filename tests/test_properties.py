"""Exactness over random shapes and arguments, and what a single sample can ever contribute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.oracle import backward, check_exact, make_private, summed

COMMON = settings(max_examples=25, deadline=None, derandomize=True, database=None)
SMALL = st.integers(1, 6)
DTYPE = st.sampled_from([torch.float64, torch.float32])
REDUCTION = st.sampled_from(["mean", "sum"])
SEED = st.integers(0, 2**16)


def check(seed: int, build: Any, shape: tuple, **kwargs: Any) -> None:
    """Exact at a threshold that clips about half of the samples."""
    torch.manual_seed(seed)
    x = torch.randint(kwargs.pop("ids"), shape) if "ids" in kwargs else torch.randn(shape)
    check_exact(build(), x, **kwargs)


@COMMON
@given(
    seed=SEED, b=st.integers(2, 5), inner=st.lists(SMALL, max_size=3), d=st.integers(1, 20),
    p=st.integers(1, 20), bias=st.booleans(), dtype=DTYPE, reduction=REDUCTION,
)  # fmt: skip
def test_linear(
    seed: int, b: int, inner: list, d: int, p: int, bias: bool, dtype: torch.dtype, reduction: str
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, p, bias=bias))

    check(seed, build, (b, *inner, d), dtype=dtype, loss_reduction=reduction)


@pytest.mark.slow
@COMMON
@given(
    seed=SEED, b=st.integers(2, 4), groups=st.integers(1, 3), c=st.integers(1, 4),
    p=st.integers(1, 4), kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.integers(1, 3), padding=st.integers(0, 3), dilation=st.integers(1, 2),
    extra=st.tuples(st.integers(0, 12), st.integers(0, 12)), bias=st.booleans(), dtype=DTYPE,
    mode=st.sampled_from(["zeros", "circular", "replicate", "reflect"]),
)  # fmt: skip
def test_conv2d(
    seed: int, b: int, groups: int, c: int, p: int, kernel: tuple, stride: int, padding: int,
    dilation: int, extra: tuple, bias: bool, dtype: torch.dtype, mode: str,
) -> None:  # fmt: skip
    """The map is the smallest that the kernel and the padding mode take, plus `extra`."""
    smallest = [max(dilation * (k - 1) + 1, padding + 1) for k in kernel]
    size = [s + e for s, e in zip(smallest, extra, strict=True)]
    for n, k in zip(size, kernel, strict=True):  # a stride may step from padding to padding
        starts = range(-padding, n + padding - dilation * (k - 1), stride)
        assume(any(0 <= start + dilation * j < n for start in starts for j in range(k)))

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, c * groups, 1),
            nn.Tanh(),
            nn.Conv2d(
                c * groups, p * groups, kernel, stride, padding, dilation, groups, bias, mode
            ),
        )

    check(seed, build, (b, 2, *size), dtype=dtype)


@COMMON
@given(
    seed=SEED, b=st.integers(2, 5), inner=st.lists(st.integers(1, 8), max_size=2),
    rows=st.integers(2, 12), d=st.integers(1, 9), pad=st.booleans(), dtype=DTYPE,
    reduction=REDUCTION,
)  # fmt: skip
def test_embedding(
    seed: int, b: int, inner: list, rows: int, d: int, pad: bool, dtype: torch.dtype,
    reduction: str,
) -> None:  # fmt: skip
    def build() -> nn.Module:
        table = nn.Embedding(rows, d, padding_idx=rows - 1 if pad else None)
        return nn.Sequential(table, nn.Linear(d, 3))

    check(seed, build, (b, *inner), ids=rows, dtype=dtype, loss_reduction=reduction, C=1.0)


@pytest.mark.slow
@COMMON
@given(
    seed=SEED, b=st.integers(2, 5), groups=st.integers(1, 4), per=st.integers(1, 4),
    space=st.lists(st.integers(2, 7), max_size=3), dtype=DTYPE, reduction=REDUCTION,
)  # fmt: skip
def test_group_norm(
    seed: int, b: int, groups: int, per: int, space: list, dtype: torch.dtype, reduction: str
) -> None:
    """A group of one value is constant, with no gradient left: two at least. One of one channel nearly
    takes away what the bias before it adds, which leaves float32 few digits: there, two channels."""
    c = groups * per if space and dtype == torch.float64 else groups * (per + 1)

    class Scaled(nn.Module):
        """Makes the input's gradient count, without a leading layer of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(1, c), nn.GroupNorm(groups, c)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.first(x[..., None])).movedim(-1, 1)).sin()

    check(seed, Scaled, (b, *space), dtype=dtype, loss_reduction=reduction, tol=loose(dtype))


def loose(dtype: torch.dtype) -> float:
    """Normalization divides by a deviation that random shapes can make small."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]


NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5)), (1, 24)),
    "positions": (lambda: nn.Sequential(nn.Linear(24, 16), nn.ReLU()), (1, 40, 24)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)),
        (1, 3, 8, 8),
    ),
    "large-map": (lambda: nn.Conv2d(3, 4, 3, padding=1), (1, 3, 24, 24)),
    "norms": (
        lambda: nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 6), nn.GroupNorm(2, 6)),
        (1, 24),
    ),
}
SCALES = {
    torch.float32: (1e-3, 1.0, 1e3),
    torch.bfloat16: (1e-3, 1.0, 1e3),
    torch.float16: (1e-3, 1.0, 30.0),  # of the inputs; activations must stay below 65504
}


def total_norm(sums: dict[str, torch.Tensor]) -> float:
    """L2 norm over all parameters, computed in float64."""
    return torch.stack([s.double().norm() for s in sums.values()]).norm().item()


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.one_in(10)
def test_no_sample_exceeds_the_threshold(network: str, dtype: torch.dtype, seed: int) -> None:
    """Not by one rounding: the computed contribution of one sample has norm <= C."""
    make, shape = NETWORKS[network]
    for scale in SCALES[dtype]:
        for C in (1.0, 0.37, 1e-2):
            torch.manual_seed(seed)
            model = make().to(dtype)
            params = dict(model.named_parameters())
            _, private, optimizer, _ = make_private(model, max_grad_norm=C)
            x = (torch.randn(shape) * scale).to(dtype)
            private(x).float().square().sum().backward()
            assert total_norm(summed(params)) <= C
            if optimizer.per_sample_norms.item() > C:  # and clipping is not mere suppression
                assert total_norm(summed(params)) >= 0.98 * C


@pytest.mark.one_in(1)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("removed", range(4))
def test_neighboring_batches(network: str, removed: int) -> None:
    """One row more or less moves the sum by at most C, in float64."""
    make, shape = NETWORKS[network]
    C = 0.5
    x = 3.0 * torch.randn(4, *shape[1:], dtype=torch.float64)
    torch.manual_seed(1)
    model = make().double()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    sums = []
    for rows in (range(4), [i for i in range(4) if i != removed]):
        optimizer.zero_grad()
        backward(private, x[list(rows)], loss_reduction="sum")
        sums.append(summed(params))
    difference = total_norm({n: sums[0][n] - sums[1][n] for n in params})
    assert 0.5 * C <= difference <= C * (1 + 1e-9)  # the sample's gradient is far beyond C
