"""instantiated_norm against float64, with and without its gradients, and never below it."""

from __future__ import annotations

from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.ops.triton.instantiated_norm import instantiated_norm
from fastclip.ops.triton.runtime import INTERPRETED
from fastclip.ops.triton.tiles import product_mode
from tests.ops.test_cancellation import CONSTRUCTIONS
from tests.ops.triton.oracle import (
    DEVICE,
    DTYPES,
    NORM_TOLERANCE,
    SUM_TOLERANCE,
    normal,
    relative_error,
    strided,
)

module = import_module("fastclip.ops.triton.instantiated_norm")  # the package exports the function
SHAPES = [(3, 1, 7, 5), (3, 7, 31, 65), (2, 65, 8, 130), (1, 130, 70, 33)]
ULP = 1e-6  # a lone position has no bound: its norm is rounded like any other number


def operands(b: int, t: int, d: int, p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(b, t, d, dtype=dtype), normal(b, t, p, dtype=dtype, seed=1)


def gradients(a: Tensor, g: Tensor) -> Tensor:
    return torch.einsum("btp,btd->bpd", g.double().cpu(), a.double().cpu())


def check(a: Tensor, g: Tensor) -> None:
    """Norms alone and with their gradients: not below the exact norm, nor above the tolerance."""
    norms, exact = instantiated_norm(a, g), gradients(a, g)
    both, kept = instantiated_norm(a, g, keep=True)
    true = exact.square().sum((1, 2))
    tolerance = max(NORM_TOLERANCE[a.dtype], NORM_TOLERANCE[g.dtype])
    for found in (norms, both):
        assert found.dtype == torch.float32
        assert found.shape == true.shape
        assert (found.double().cpu() >= true * (1 - ULP)).all()
        assert (found.double().cpu() <= true * (1 + tolerance)).all()
    assert kept.dtype == torch.float32
    assert kept.shape == exact.shape
    assert relative_error(kept, exact) <= max(SUM_TOLERANCE[a.dtype], SUM_TOLERANCE[g.dtype])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*operands(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype: torch.dtype) -> None:
    """Gaps, positions innermost, the batch in dimension 1, and broadcast operands."""
    a, g = operands(3, 70, 20, 9, dtype)
    batch_inside = g.transpose(0, 1).contiguous().transpose(0, 1)
    check(strided(a), strided(g))
    check(a.mT.contiguous().mT, batch_inside)
    check(a[:1].expand(3, -1, -1), g[:, :1].expand(-1, 70, -1))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2)])
def test_operands_of_two_types(first: int, second: int) -> None:
    check(normal(2, 66, 9, dtype=DTYPES[first]), normal(2, 66, 5, dtype=DTYPES[second], seed=1))


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_nothing_to_sum(shape: tuple[int, ...]) -> None:
    a, g = operands(*shape, torch.float32)
    norms, kept = instantiated_norm(a, g, keep=True)
    assert torch.equal(norms, torch.zeros(shape[0], device=DEVICE))
    assert torch.equal(instantiated_norm(a, g), norms)
    assert torch.equal(kept, torch.zeros(shape[0], shape[3], shape[2], device=DEVICE))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 65])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite(value: float, t: int, dtype: torch.dtype) -> None:
    """A sample that holds inf or NaN has no finite norm; its neighbors keep theirs."""
    a, g = operands(4, t, 70, 6, dtype)
    a[1, -1, 2], g[2, 0, 3] = value, value
    a[3, 0, 0], g[3] = value, 0  # inf * 0
    for found in (instantiated_norm(a, g), instantiated_norm(a, g, keep=True)[0]):
        assert torch.equal(found.isfinite().cpu(), torch.tensor([True, False, False, False]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "d", "p"), [(2, 512, 4), (64, 8, 96), (130, 16, 16)])
@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_cancellation(construction: str, t: int, d: int, p: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, g = (x.to(DEVICE, dtype) for x in CONSTRUCTIONS[construction](t, d, p))
    true = gradients(a, g).square().sum((1, 2))
    assert (instantiated_norm(a, g).double().cpu() >= true).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_entries(dtype: torch.dtype) -> None:
    """Equal terms round alike: the errors of a long sum have one sign and do not cancel."""
    for left, right in ((1.1, 1.3), (0.7, 0.9), (1.37, 0.013)):
        a = torch.full((1, 2000, 20), left, device=DEVICE, dtype=dtype)
        g = torch.full((1, 2000, 30), right, device=DEVICE, dtype=dtype)
        true = gradients(a, g).square().sum((1, 2))
        assert (instantiated_norm(a, g).double().cpu() >= true).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_repeatable(dtype: torch.dtype) -> None:
    a, g = operands(2, 150, 70, 130, dtype)
    first, second = (instantiated_norm(a, g, keep=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 65, 700])
def test_a_configuration_for_everything(n: int) -> None:
    for p, mode in product((1, 16, 40, 64, 300), ("native", "ieee", "tf32x3")):
        usable = module.usable(module._CONFIGS, {"p": p, "d": n, "MODE": mode})
        assert usable
        for c in usable:  # what the room for the partial sums counts on
            assert c.kwargs["BLOCK_P"] >= min(p, 64)
            assert c.kwargs["BLOCK_D"] >= min(n, 64)


@pytest.mark.one_in(2)
@pytest.mark.skipif(not INTERPRETED, reason="the autotuner runs every configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "p"), [(140, 130), (10, 130), (130, 10)])
def test_every_configuration(
    d: int, p: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, g = operands(1, 40, d, p, dtype)
    options = {"p": p, "d": d, "MODE": product_mode(a, g)}
    for config in module.usable(module._CONFIGS, options):
        monkeypatch.setattr(module._tiles_kernel, "usable", lambda *_, config=config: [config])
        check(a, g)


def test_what_is_left_to_the_reference() -> None:
    a, g = operands(2, 3, 4, 5, torch.float32)
    assert instantiated_norm(a.double(), g.double()) is NotImplemented


def test_agrees_with_the_reference() -> None:
    a, g = operands(2, 33, 12, 7, torch.float32)
    norms, kept = ops.instantiated_norm(a.cpu(), g.cpu(), keep=True)
    found, grads = instantiated_norm(a, g, keep=True)
    assert torch.allclose(found.cpu(), norms, rtol=1e-5)
    assert torch.allclose(grads.cpu(), kept, rtol=1e-5, atol=1e-5)
