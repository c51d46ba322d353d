"""scaled_sum against float64; no contribution beyond its sensitivity; dead samples add nothing."""

from __future__ import annotations

from importlib import import_module
from itertools import product

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.numerics import margin
from fastclip.ops.triton import tiles
from fastclip.ops.triton.runtime import INTERPRETED
from fastclip.ops.triton.scaled_sum import scaled_sum
from fastclip.ops.triton.tiles import product_mode
from tests.ops.triton.oracle import DEVICE, DTYPES, SUM_TOLERANCE, normal, relative_error, strided

module = import_module("fastclip.ops.triton.scaled_sum")  # the package exports the function
SHAPES = [  # few positions, where a tile holds many samples; then a sample at a time
    (70, 1, 7, 5), (5, 7, 31, 65), (9, 15, 8, 8), (5, 17, 31, 65), (3, 65, 8, 130), (2, 130, 70, 33)
]  # fmt: skip


def operands(
    b: int, t: int, d: int, p: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.rand(b, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return normal(b, t, d, dtype=dtype, seed=seed), normal(b, t, p, dtype=dtype, seed=9), scale


def exact(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    a, g, scale = (x.double().cpu() for x in (a, g, scale))
    alive = scale != 0
    return torch.einsum("b,btp,btd->pd", scale[alive], g[alive], a[alive])


def check(a: Tensor, g: Tensor, scale: Tensor) -> None:
    found, true = scaled_sum(a, g, scale), exact(a, g, scale)
    assert found.dtype == torch.float32
    assert found.shape == true.shape
    assert relative_error(found, true) <= max(SUM_TOLERANCE[a.dtype], SUM_TOLERANCE[g.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*operands(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [3, 70])
def test_any_strides(t: int, dtype: torch.dtype) -> None:
    """Gaps, positions innermost, the batch in dimension 1, and broadcast operands."""
    a, g, scale = operands(3, t, 20, 9, dtype)
    batch_inside = g.transpose(0, 1).contiguous().transpose(0, 1)
    check(strided(a), strided(g), strided(scale))
    check(a.mT.contiguous().mT, batch_inside, scale[:1].expand(3))
    check(a[:1].expand(3, -1, -1), g[:, :1].expand(-1, t, -1), scale)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2)])
def test_operands_of_two_types(first: int, second: int) -> None:
    a, g, scale = operands(2, 66, 9, 5, torch.float32)
    check(a.to(DTYPES[first]), g.to(DTYPES[second]), scale)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_nothing_to_sum(shape: tuple[int, ...]) -> None:
    assert torch.equal(
        scaled_sum(*operands(*shape, torch.float32)),
        torch.zeros(shape[3], shape[2], device=DEVICE),
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 3, 65])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_dead_samples(value: float, t: int, dtype: torch.dtype) -> None:
    """Scale 0 means exactly 0, whatever the operands hold."""
    a, g, scale = operands(5, t, 20, 70, dtype)
    without = scaled_sum(a[[0, 2]], g[[0, 2]], scale[[0, 2]])
    scale[[1, 3, 4]] = 0
    a[1, -1, 2], g[3, 0, 3] = value, value
    a[4], g[4] = value, value
    found = scaled_sum(a, g, scale)
    assert relative_error(found, without) <= 1e-6  # another order of the same terms
    assert not scaled_sum(a, g, torch.zeros_like(scale)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 3, 17, 64])
def test_no_contribution_beyond_its_sensitivity(t: int, dtype: torch.dtype) -> None:
    """A sample scaled to norm 1, less the margin of the scales, stays within 1.

    Entries are equal, so that their roundings add up instead of canceling.
    """
    one, worst = torch.ones(1), 0.0
    for value in (0.9, 1.1, 1.3, 1.5, 1.7):
        a = torch.full((1, t, 70), value).to(DEVICE, dtype)
        g = torch.full((1, t, 40), 1.3).to(DEVICE, dtype)
        scale = ((1 - margin(torch.float32)) / exact(a, g, one).norm()).to(DEVICE, torch.float32)
        assert scaled_sum(a, g, scale[None]).double().norm() <= 1
        worst = max(worst, exact(a, (g * scale).to(torch.bfloat16), one).norm().item())
    assert worst > 1 + 1e-4  # what scaling before a 16-bit product would contribute


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [3, 70])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_any_split(
    splits: int, t: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches that begin and end inside a sample, and some without any row."""
    monkeypatch.setattr(module, "splits_for", lambda *_: splits)
    check(*operands(5, t, 20, 70, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [3, 70])
def test_bitwise_repeatable(t: int, dtype: torch.dtype) -> None:
    rows = operands(8, t, 20, 70, dtype)
    assert torch.equal(scaled_sum(*rows), scaled_sum(*rows))


def test_small_sums_are_cut_into_more_parts() -> None:
    """Of as many tiles: a multiprocessor holds more of small ones."""
    large, small = (module.splits_for(n, n, 1000, DEVICE, 8) for n in (128, 16))
    assert 1 < large < small


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 65, 700])
@pytest.mark.parametrize("device", ["ampere", "hopper"])
def test_a_configuration_for_everything(
    device: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for of in (module, tiles):  # which asks for what spills
        monkeypatch.setattr(of, "generation", lambda: device)
    sizes, modes = (1, 16, 40, 64, 300), ("native", "ieee", "tf32x3")
    for p, mode, bucket, a_t, rest in product(sizes, modes, (1, 64, 256), (1, n), (0, 16)):
        named = {"p": p, "d": n, "MODE": mode, "bucket": bucket, "a_t": a_t, "g_t": p, "REST": rest}
        usable = module.usable_here(module.CONFIGS, named)
        assert usable
        if mode == "ieee" and (a_t == 1) != (p == 1):  # larger tiles of such operands spill
            assert all(max(c.kwargs["BLOCK_P"], c.kwargs["BLOCK_D"]) <= 64 for c in usable)


@pytest.mark.one_in(2)
@pytest.mark.skipif(not INTERPRETED, reason="the autotuner runs every configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "d", "p"), [(3, 130, 10), (40, 140, 130), (40, 10, 130)])
def test_every_configuration(
    t: int, d: int, p: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, g, scale = operands(2, t, d, p, dtype)
    mode = product_mode(a, g)
    mode = "tf32x3" if mode == "native" and t < 16 else mode
    for config in module.usable(module.CONFIGS, {"p": p, "d": d, "MODE": mode}):
        monkeypatch.setattr(module._tiles_kernel, "usable", lambda *_, config=config: [config])
        check(a, g, scale)


def test_what_is_left_to_the_reference() -> None:
    a, g, scale = operands(2, 3, 4, 5, torch.float32)
    assert scaled_sum(a.double(), g.double(), scale) is NotImplemented
    assert scaled_sum(a, g, scale.double()) is NotImplemented


def test_agrees_with_the_reference() -> None:
    a, g, scale = operands(4, 33, 12, 7, torch.float32)
    reference = ops.scaled_sum(a.cpu(), g.cpu(), scale.cpu())
    assert relative_error(scaled_sum(a, g, scale), reference) <= 1e-6


def test_negative_views() -> None:
    """As `z.conj().imag` is: their memory holds the numbers with the other sign; PyTorch knows."""
    a, g, scale = normal(3, 20, 9), normal(3, 20, 7), normal(3).abs()
    negative = torch.complex(a, a).conj().imag
    assert negative.is_neg()
    for given in (
        (negative, g, scale),
        (a, torch._neg_view(g), scale),
        (a, g, torch._neg_view(scale)),
    ):
        assert scaled_sum(*given) is NotImplemented
    expected = ops.scaled_sum(-a, g, scale)
    assert relative_error(ops.scaled_sum(negative, g, scale), expected) < 1e-6
