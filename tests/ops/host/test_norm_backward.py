"""Backward passes of LayerNorm and GroupNorm in fastclip._host on a CPU, against each sample alone, by
autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.ops import dispatch, norms
from tests.oracle import check_exact

_host = pytest.importorskip("fastclip._host", reason="fastclip._host is not built")
host = pytest.importorskip("fastclip.ops.host")
pytestmark = pytest.mark.skipif(
    not _host.product_lanes(), reason="sums in vectors ask for a processor with AVX2 and FMA"
)
ROWS = {  # b, t, c
    "one number": (3, 1, 1),
    "less than a vector": (3, 4, 7),
    "vectors": (3, 5, 64),
    "vectors and a rest": (3, 3, 77),
    "more rows than a block": (2, 150, 19),
}
CHANNELS = {  # b, c, t, k
    "one number a channel": (3, 6, 1, 2),
    "one group": (3, 5, 7, 1),
    "a group a channel": (2, 7, 33, 7),
    "less than a vector": (3, 6, 4, 3),
    "vectors": (3, 8, 64, 2),
    "vectors and a rest": (2, 4, 77, 2),
    "more than a block": (2, 4, 2100, 2),
}
CASES = [
    *(pytest.param(shape, id=f"layer, {name}") for name, shape in ROWS.items()),
    *(pytest.param(shape, id=f"group, {name}") for name, shape in CHANNELS.items()),
]
SMALL = [
    pytest.param((4, 5, 40), id="layer"),
    pytest.param((4, 6, 40, 2), id="group"),
]


def name_of(shape: tuple[int, ...]) -> str:
    return "layer_norm_backward" if len(shape) == 3 else "group_norm_backward"


def loop(shape: tuple[int, ...]) -> Callable[..., Any]:
    return getattr(host, name_of(shape))


def operands(shape: tuple[int, ...], centre: float = 0.0) -> tuple[Tensor, ...]:
    """x, g, mean, rstd and a weight."""
    torch.manual_seed(0)
    x, g = torch.randn(shape[:3]) + centre, torch.randn(shape[:3])
    if len(shape) == 3:
        _, mean, rstd = torch.native_layer_norm(x, [shape[2]], None, None, 1e-5)
        return x, g, mean.squeeze(2), rstd.squeeze(2), torch.randn(shape[2])
    _, mean, rstd = torch.native_group_norm(x, None, None, *shape, 1e-5)
    return x, g, mean, rstd, torch.randn(shape[1])


def alone(shape: tuple[int, ...], x: Tensor, g: Tensor, weight: Tensor | None) -> list[Tensor]:
    """Gradients of the input, and of each sample's weight and bias, in float64."""
    found = []
    affine = shape[2 if len(shape) == 3 else 1]
    for row, gradient in zip(x.double()[:, None], g.double()[:, None], strict=True):
        one = row.clone().requires_grad_()
        scale = torch.ones(affine).double() if weight is None else weight.double()
        scale, shift = scale.clone().requires_grad_(), torch.zeros_like(scale, requires_grad=True)
        if len(shape) == 3:
            out = F.layer_norm(one, [affine], scale, shift)
        else:
            out = F.group_norm(one, shape[3], scale, shift)
        out.backward(gradient)
        found.append((one.grad[0], scale.grad, shift.grad))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("centre", [0.0, 50.0])
@pytest.mark.parametrize("shape", CASES)
def test_each_sample_alone(
    shape: tuple[int, ...], centre: float, weighted: bool, lanes: int, threads: int
) -> None:
    x, g, mean, rstd, weight = operands(shape, centre)
    own = weight if weighted else None
    exact = alone(shape, x, g, own)
    room = 1e-5 * (1 + centre * rstd.max())  # x and its mean are rounded, whoever subtracts them
    laid = (
        (x, g, mean, rstd),
        tuple(y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x, g, mean, rstd)),
    )
    for operand in laid:
        found = loop(shape)(*operand, own, True)
        for ours, right in zip(found, exact, strict=True):
            assert ours.dtype == torch.float32
            assert (ours.double() - right).abs().max() <= room * max(1, right.abs().max())
        without = loop(shape)(*operand, own, False)
        assert without[0] is None
        assert all(map(torch.equal, without[1:], found[1:]))


@pytest.mark.parametrize(("shape", "roundings"), [
    ((2, 20_000, 3), 64 + 20_000 / 64),  # a block's, and of the blocks' sums
    ((2, 3, 20_001, 3), 64),  # a vector's of a block
])  # fmt: skip
def test_terms_of_one_sign(shape: tuple[int, ...], roundings: float, lanes: int) -> None:
    """Roundings that all go one way: no sum is off by more than some of its own."""
    g = torch.full(shape[:3], 1.1)
    of_statistics = (2, 20_000) if len(shape) == 3 else (2, 3)
    x, mean, rstd = (
        torch.full_like(g, 1.3),
        torch.zeros(of_statistics),
        torch.full(of_statistics, 0.7),
    )
    _, dw, db = loop(shape)(x, g, mean, rstd, None, False)
    terms, normal = max(shape), (x[0, 0, 0] * rstd[0, 0]).double()
    for found, term in ((dw, g[0, 0, 0].double() * normal), (db, g[0, 0, 0].double())):
        off = (found.double() / (terms * term) - 1).abs().max()
        assert off <= roundings * ops.unit_roundoff(torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", SMALL)
def test_samples_that_are_not_finite_stay_alone(
    shape: tuple[int, ...], value: float, lanes: int, threads: int
) -> None:
    x, g, mean, rstd, weight = operands(shape)
    right = loop(shape)(x, g, mean, rstd, weight, True)
    for spoilt in (x, g):
        kept = spoilt[1, 2, 3].clone()
        spoilt[1, 2, 3] = value
        found = loop(shape)(x, g, mean, rstd, weight, True)
        for own in found if spoilt is g else found[:2]:  # x is not in the bias's
            assert not own[1].isfinite().all()
        for own, other in zip(found, right, strict=True):
            assert torch.equal(own[[0, 2, 3]], other[[0, 2, 3]])
        spoilt[1, 2, 3] = kept


@pytest.mark.parametrize("shape", SMALL)
def test_what_is_declined(shape: tuple[int, ...], lanes: int) -> None:
    x, g, mean, rstd, weight = given = operands(shape)
    twice = (
        x,
        g,
        mean.repeat(1, 2),
        rstd.repeat(1, 2),
        weight,
    )  # 4 groups of 6 channels, or 10 rows
    others: list[tuple] = [
        tuple(y.double() for y in given), tuple(y.to("meta") for y in given),
        (x.bfloat16(), g.bfloat16(), mean, rstd, weight), (x[:0], g[:0], mean[:0], rstd[:0], weight),
        (x, g[:, :4], mean, rstd, weight), (x, g, mean[:, :1], rstd, weight), twice,
        (x, g, mean, rstd.unsqueeze(2), weight), (x, g, mean.unsqueeze(2), rstd, weight),
        (x, g, mean, rstd, weight[:5]), (x[0], g[0], mean[0], rstd[0], weight),
    ]  # fmt: skip
    for other in others:
        assert loop(shape)(*other, True) is NotImplemented


@pytest.mark.parametrize("kind", ["LayerNorm", "GroupNorm", "InstanceNorm2d"])
def test_a_step_is_exact(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one sample at a time in float64; and the loop has served."""
    served = []

    def heard(own: Callable) -> Callable:
        def spy(*args: object) -> object:
            found = own(*args)
            served.append(found is not NotImplemented)
            return found

        return spy

    for name in ("layer_norm_backward", "group_norm_backward"):
        monkeypatch.setitem(dispatch._load("host"), name, heard(getattr(host, name)))
    torch.manual_seed(0)
    if kind == "LayerNorm":
        first, second = nn.LayerNorm(9), nn.LayerNorm(9, bias=False)
    else:
        own = {
            "GroupNorm": nn.GroupNorm(3, 12),
            "InstanceNorm2d": nn.InstanceNorm2d(12, affine=True),
        }
        first, second = own[kind], nn.GroupNorm(4, 12, affine=False)
    layers = nn.Conv2d(2, 12, 3), first, nn.Tanh(), second, nn.Conv2d(12, 3, 3)
    check_exact(nn.Sequential(*layers), torch.randn(6, 2, 11, 11), dtype=torch.float32)
    assert served
    assert all(served)


@pytest.mark.parametrize("shape", [(4, 70, 33), (4, 8, 70, 2)], ids=["layer", "group"])
def test_the_reference_agrees(shape: tuple[int, ...]) -> None:
    given = operands(shape)
    reference = getattr(norms, name_of(shape)).reference
    for found, other in zip(loop(shape)(*given, True), reference(*given, True), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
