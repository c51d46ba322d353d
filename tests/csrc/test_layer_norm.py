"""The backward pass of LayerNorm in fastclip._C on a CPU, against each sample alone, by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.ops import dispatch, norm_backward
from tests.oracle import check_exact

_C = pytest.importorskip("fastclip._C", reason="fastclip._C is not built")
host = pytest.importorskip("fastclip.cuda.host_products")
pytestmark = pytest.mark.skipif(
    not _C.product_lanes(), reason="rows in vectors ask for a processor with AVX2 and FMA"
)
SHAPES = {  # b, t, c
    "one number": (3, 1, 1),
    "less than a vector": (3, 4, 7),
    "vectors": (3, 5, 64),
    "vectors and a rest": (3, 3, 77),
    "more rows than a block": (2, 150, 19),
}


def operands(shape: tuple[int, int, int], centre: float = 0.0) -> tuple[Tensor, ...]:
    """x, g, mean, rstd and a weight."""
    torch.manual_seed(0)
    x, g = torch.randn(shape) + centre, torch.randn(shape)
    _, mean, rstd = torch.native_layer_norm(x, [shape[2]], None, None, 1e-5)
    return x, g, mean.squeeze(2), rstd.squeeze(2), torch.randn(shape[2])


def alone(x: Tensor, g: Tensor, weight: Tensor | None) -> list[Tensor]:
    """Gradients of the input, and of each sample's weight and bias, in float64."""
    found = []
    for row, gradient in zip(x.double(), g.double(), strict=True):
        one = row.clone().requires_grad_()
        scale = torch.ones(x.shape[2]).double() if weight is None else weight.double()
        scale, shift = scale.clone().requires_grad_(), torch.zeros_like(scale, requires_grad=True)
        F.layer_norm(one, [x.shape[2]], scale, shift).backward(gradient)
        found.append((one.grad, scale.grad, shift.grad))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("centre", [0.0, 50.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_sample_alone(
    shape: str, centre: float, weighted: bool, lanes: int, threads: int
) -> None:
    x, g, mean, rstd, weight = operands(SHAPES[shape], centre)
    own = weight if weighted else None
    exact = alone(x, g, own)
    room = 1e-5 * (1 + centre * rstd.max())  # x and its mean are rounded, whoever subtracts them
    laid = (
        (x, g, mean, rstd),
        tuple(y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x, g, mean, rstd)),
    )
    for operand in laid:
        found = host.layer_norm_backward(*operand, own, True)
        for ours, right in zip(found, exact, strict=True):
            assert ours.dtype == torch.float32
            assert (ours.double() - right).abs().max() <= room * max(1, right.abs().max())
        without = host.layer_norm_backward(*operand, own, False)
        assert without[0] is None
        assert all(map(torch.equal, without[1:], found[1:]))


def test_terms_of_one_sign(lanes: int) -> None:
    """Roundings that all go one way: no sum is off by more than some of its own."""
    g = torch.full((1, 20_000, 3), 1.1)
    x, mean, rstd = torch.full_like(g, 1.3), torch.zeros(1, 20_000), torch.full((1, 20_000), 0.7)
    _, dw, db = host.layer_norm_backward(x, g, mean, rstd, None, False)
    normal = (x[0, 0, 0] * rstd[0, 0]).double()
    for found, term in ((dw, g[0, 0, 0].double() * normal), (db, g[0, 0, 0].double())):
        off = (found.double() / (20_000 * term) - 1).abs().max()
        assert off <= (64 + 20_000 / 64) * ops.unit_roundoff(torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_stay_alone(value: float, lanes: int, threads: int) -> None:
    x, g, mean, rstd, weight = operands((4, 5, 40))
    right = host.layer_norm_backward(x, g, mean, rstd, weight, True)
    for spoilt in (x, g):
        kept = spoilt[1, 2, 3].clone()
        spoilt[1, 2, 3] = value
        found = host.layer_norm_backward(x, g, mean, rstd, weight, True)
        for own in found if spoilt is g else found[:2]:  # x is not in the bias's
            assert not own[1].isfinite().all()
        for own, other in zip(found, right, strict=True):
            assert torch.equal(own[[0, 2, 3]], other[[0, 2, 3]])
        spoilt[1, 2, 3] = kept


def test_what_is_declined(lanes: int) -> None:
    x, g, mean, rstd, weight = given = operands((4, 5, 40))
    others: list[tuple] = [
        tuple(y.double() for y in given), tuple(y.to("meta") for y in given),
        (x.bfloat16(), g.bfloat16(), mean, rstd, weight), (x[:0], g[:0], mean[:0], rstd[:0], weight),
        (x, g[:, :4], mean, rstd, weight), (x, g, mean[:, :4], rstd, weight),
        (x, g, mean, rstd.unsqueeze(2), weight), (x, g, mean, rstd, weight[:9]),
        (x[0], g[0], mean[0], rstd[0], weight),
    ]  # fmt: skip
    for other in others:
        assert host.layer_norm_backward(*other, True) is NotImplemented


def test_a_step_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one sample at a time in float64; and the loop has served."""
    own, served = host.layer_norm_backward, []

    def spy(*args: object) -> object:
        found = own(*args)
        served.append(found is not NotImplemented)
        return found

    monkeypatch.setitem(dispatch._load("host"), "layer_norm_backward", spy)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(9, 24), nn.LayerNorm(24), nn.Tanh(), nn.LayerNorm(24, bias=False)
    )
    check_exact(model, torch.randn(6, 5, 9), dtype=torch.float32)
    assert served
    assert all(served)


def test_the_reference_agrees() -> None:
    given = operands((4, 70, 33))
    ours = host.layer_norm_backward(*given, True)
    for found, other in zip(
        ours, norm_backward.layer_norm_backward.reference(*given, True), strict=True
    ):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
