"""Backward of normalization layers: the reference against autograd, the kernels against both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.ops import norms as reference
from fastclip.ops.triton import layer_norm as kernels
from tests.ops.triton.oracle import (
    DEVICE,
    DTYPES,
    NORM_TOLERANCE,
    SUM_TOLERANCE,
    normal,
    relative_error,
    strided,
)

EPS = 1e-5
ROWS = [(1, 1, 5), (3, 7, 31), (2, 130, 65), (1, 33, 768), (2, 300, 7)]  # b, t, c
GROUPS = [  # b, c, t, k
    (1, 4, 1, 1),
    (3, 6, 7, 2),
    (2, 31, 65, 31),  # InstanceNorm
    (2, 12, 130, 3),
    (1, 6, 5000, 2),  # a group of more than one tile of positions
    (2, 700, 7, 1),  # more than one tile of channels
]


def layer(b: int, t: int, c: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, g, mean, rstd, weight; the mean is not small."""
    x = (normal(b, t, c, seed=1) + 2).to(dtype)
    mean = x.float().mean(2)
    rstd = (x.float().var(2, correction=0) + EPS).rsqrt()
    return x, normal(b, t, c, dtype=dtype, seed=2), mean, rstd, normal(c, dtype=dtype, seed=3)


def rms(b: int, t: int, c: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, g, rstd, weight."""
    x, g, _, _, weight = layer(b, t, c, dtype)
    return x, g, (x.float().square().mean(2) + EPS).rsqrt(), weight


def group(b: int, c: int, t: int, k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, g, mean, rstd, weight."""
    x = (normal(b, c, t, seed=1) + 2).to(dtype)
    rows = x.float().reshape(b, k, -1)
    mean, rstd = rows.mean(2), (rows.var(2, correction=0) + EPS).rsqrt()
    return x, normal(b, c, t, dtype=dtype, seed=2), mean, rstd, normal(c, dtype=dtype, seed=3)


def exact(name: str, *tensors: Tensor | None, need_input: bool = True) -> Any:
    """The reference in float64, on the CPU."""
    moved = [None if x is None else x.double().cpu() for x in tensors]
    return getattr(reference, name)(*moved, need_input)


def check(name: str, *tensors: Tensor | None, need_input: bool = True) -> Any:
    """The kernel's results, once they were compared."""
    x = tensors[0]
    assert x is not None
    found = getattr(kernels, name)(*tensors, need_input)
    expected = exact(name, *tensors, need_input=need_input)
    assert len(found) == len(expected)
    if need_input:
        assert found[0].dtype == x.dtype
        assert found[0].shape == x.shape
        assert relative_error(found[0], expected[0]) < SUM_TOLERANCE[x.dtype]
    else:
        assert found[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        assert relative_error(one, other) < NORM_TOLERANCE[x.dtype]
    return found


def per_sample(function: Callable[..., Tensor], x: Tensor, g: Tensor, *params: Tensor) -> tuple:
    """Gradients by autograd, one sample at a time: of x, and of each parameter, [b, c]."""
    leaf = x.clone().requires_grad_()
    leaves = [p.clone().requires_grad_() for p in params]
    rows = []
    for one, upstream in zip(leaf, g, strict=True):
        out = function(one[None], *leaves)
        rows.append(torch.autograd.grad(out, [leaf, *leaves], upstream[None]))
    grads = list(zip(*rows, strict=True))
    return sum(grads[0]), *(torch.stack(grad) for grad in grads[1:])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms", "group", "instance"])
def test_reference_is_autograd(kind: str, affine: bool) -> None:
    b, t, c = 3, 4, 6
    k = {"group": 2, "instance": c}.get(kind, 1)
    if kind in ("layer", "rms"):
        x, g, mean, rstd, w = (y.double().cpu() for y in layer(b, t, c, torch.float64))
        mean, variance = x.mean(2), x.var(2, correction=0)
    else:
        x, g, mean, rstd, w = (y.double().cpu() for y in group(b, c, t, k, torch.float64))
        rows = x.reshape(b, k, -1)
        mean, variance = rows.mean(2), rows.var(2, correction=0)
    w = w if affine else torch.ones_like(w)
    weight, bias = w if affine else None, torch.zeros_like(w)
    if kind == "rms":
        rstd = (x.square().mean(2) + EPS).rsqrt()
        expected = per_sample(lambda x, w: F.rms_norm(x, [c], w, EPS), x, g, w)
        found = reference.rms_norm_backward(x, g, rstd, weight, True)
    elif kind == "layer":
        rstd = (variance + EPS).rsqrt()
        expected = per_sample(lambda x, w, y: F.layer_norm(x, [c], w, y, EPS), x, g, w, bias)
        found = reference.layer_norm_backward(x, g, mean, rstd, weight, True)
    else:
        rstd = (variance + EPS).rsqrt()
        expected = per_sample(lambda x, w, y: F.group_norm(x, k, w, y, EPS), x, g, w, bias)
        found = reference.group_norm_backward(x, g, mean, rstd, weight, True)
    torch.testing.assert_close(found, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_rows(shape: tuple, dtype: torch.dtype) -> None:
    check("layer_norm_backward", *layer(*shape, dtype))
    check("rms_norm_backward", *rms(*shape, dtype))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GROUPS)
def test_groups(shape: tuple, dtype: torch.dtype) -> None:
    check("group_norm_backward", *group(*shape, dtype))


@pytest.mark.parametrize("need_input", [True, False])
def test_forms(need_input: bool) -> None:
    """Without a weight, without the input's gradient, statistics and weight of another type."""
    for name, tensors in (
        ("layer_norm_backward", layer(2, 33, 20, torch.float32)),
        ("rms_norm_backward", rms(2, 33, 20, torch.float32)),
        ("group_norm_backward", group(2, 20, 33, 5, torch.float32)),
        ("group_norm_backward", group(1, 4, 3000, 2, torch.float32)),
    ):
        check(name, *tensors[:-1], None, need_input=need_input)
        check(name, *tensors, need_input=need_input)
        check(name, *(y.bfloat16() for y in tensors[:2]), *tensors[2:], need_input=need_input)


def test_strides() -> None:
    """Time before samples, gaps between channels, channels-last maps, expanded gradients."""
    x, g, mean, rstd, w = layer(3, 40, 17, torch.float32)
    moved = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x, g, mean, rstd)]
    check("layer_norm_backward", *moved, strided(w))
    check("layer_norm_backward", strided(x), g[:, :1].expand_as(x), strided(mean), strided(rstd), w)
    x, g, mean, rstd, w = group(2, 12, 35, 3, torch.float32)
    last = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x, g)]
    dx, *_ = check("group_norm_backward", *last, mean, rstd, w)
    assert dx.stride() == last[0].stride()
    check("group_norm_backward", strided(x), g[..., :1].expand_as(x), strided(mean), rstd, w)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4)])
def test_nothing(shape: tuple) -> None:
    b, t, c = shape
    x, mean, w = normal(*shape), normal(b, t), normal(c)
    for dx, *affine in (
        kernels.layer_norm_backward(x, x, mean, mean, w, True),
        kernels.rms_norm_backward(x, x, mean, w, True),
        kernels.group_norm_backward(x.mT, x.mT, normal(b, 2), normal(b, 2), w, True),
    ):
        assert dx.numel() == 0
        assert all(torch.equal(y, torch.zeros(b, c, device=DEVICE)) for y in affine)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite(value: float) -> None:
    """A bad gradient spoils its own sample's affine gradients, and no other sample."""
    for name, tensors in (
        ("layer_norm_backward", layer(3, 20, 9, torch.float32)),
        ("rms_norm_backward", rms(3, 20, 9, torch.float32)),
        ("group_norm_backward", group(3, 20, 9, 4, torch.float32)),
    ):
        expected = exact(name, *tensors)
        tensors[1][1, 5, 3] = value
        found = getattr(kernels, name)(*tensors, True)
        for one, other in zip(found, expected, strict=True):
            assert not one[1].isfinite().all()
            assert relative_error(one[::2], other[::2]) < 1e-5


def test_repeatable() -> None:
    for name, tensors in (
        ("layer_norm_backward", layer(2, 150, 30, torch.bfloat16)),
        ("group_norm_backward", group(2, 30, 150, 5, torch.bfloat16)),
    ):
        once, again = (getattr(kernels, name)(*tensors, True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_out_of_reach() -> None:
    x, mean = normal(1, 1, kernels.MAX_FEATURES + 1), normal(1, 1)
    assert kernels.layer_norm_backward(x, x, mean, mean, None, True) is NotImplemented
    assert kernels.rms_norm_backward(x.double(), x.double(), mean, None, True) is NotImplemented
    x = normal(1).expand(1, 2, kernels.MAX_GROUP)
    assert kernels.group_norm_backward(x, x, mean, mean, None, True) is NotImplemented
