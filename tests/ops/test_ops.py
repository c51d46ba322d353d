"""The operations against float64 einsum, at odd shapes, and the planner's choices between them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops.dispatch import use_backend
from fastclip.ops.noise import NoiseSource, SecureNoise, SeededNoise
from fastclip.ops.planner import Planner
from tests.ops.noise.laws import assert_standard_normal

SHAPES = [(1, 1, 1, 1), (3, 1, 7, 5), (2, 7, 31, 3), (4, 33, 8, 65), (5, 130, 4, 4), (0, 3, 4, 5)]


def operands(b: int, t: int, d: int, p: int, dtype: torch.dtype) -> tuple:
    torch.manual_seed(b + t + d + p)
    return torch.randn(b, t, d).to(dtype), torch.randn(b, t, p).to(dtype)


def reference(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btp,btd->bpd", g.double(), a.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_norms(shape: tuple, dtype: torch.dtype) -> None:
    a, g = operands(*shape, dtype)
    exact = reference(a, g).flatten(1).square().sum(1)
    tolerance = 1e-12 if dtype == torch.float64 else 4e-5
    kept_norm, kept = ops.instantiated_norm(a, g, keep=True)
    for norm in (ops.ghost_norm(a, g), ops.instantiated_norm(a, g), kept_norm):
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norm.double(), exact, rtol=tolerance, atol=0)
    torch.testing.assert_close(kept.double(), reference(a, g), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_sum_ignores_dead_samples(shape: tuple) -> None:
    """A sample of scale 0 contributes 0 even where its operands are not finite."""
    a, g = operands(*shape, torch.float64)
    scale = torch.rand(shape[0], dtype=torch.float64)
    expected = torch.einsum("b,bpd->pd", scale, reference(a, g))
    if shape[0] > 1:
        scale[1] = 0
        expected = torch.einsum("b,bpd->pd", scale, reference(a, g))
        a[1, 0], g[1, -1] = float("inf"), float("nan")
    torch.testing.assert_close(ops.scaled_sum(a, g, scale), expected)


@pytest.mark.parametrize("length", [1, 1000, 1024, 1025, 5000, 3_000_001])
def test_long_rows(length: int) -> None:
    torch.manual_seed(length)
    x = torch.randn(2, length)
    exact = x.double().square().sum(1)
    torch.testing.assert_close(ops.row_norm_sq(x).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize(
    ("b", "t", "v", "d"), [(1, 1, 3, 1), (3, 7, 5, 4), (4, 31, 300, 3), (0, 3, 4, 2)]
)
def test_embedding(b: int, t: int, v: int, d: int, padding_idx: int | None) -> None:
    torch.manual_seed(b * t)
    ids, g = torch.randint(v, (b, t)), torch.randn(b, t, d).double()
    one_hot = F.one_hot(ids, v).double()
    if padding_idx is not None:
        one_hot[..., padding_idx] = 0
    table = torch.einsum("btv,btd->bvd", one_hot, g)
    scale = torch.rand(b).double()
    torch.testing.assert_close(
        ops.embedding_norm(ids, g, padding_idx), table.flatten(1).square().sum(1)
    )
    torch.testing.assert_close(
        ops.embedding_sum(ids, g, scale, v, padding_idx), torch.einsum("b,bvd->vd", scale, table)
    )


GEOMETRIES = [
    ConvGeometry((4, 3, 3), (1,), (1,), (1,), 1),
    ConvGeometry((4, 3, 5), (2,), (0,), (2,), 2),
    ConvGeometry((6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ConvGeometry((6, 2, 3, 2), (2, 1), (1, 0), (1, 3), 3),
    ConvGeometry((6, 4, 1, 1), (2, 2), (0, 0), (1, 1), 2),
    ConvGeometry((6, 4, 1, 1), (1, 1), (2, 1), (1, 1), 1),
    ConvGeometry((4, 2, 2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2), 2),
]


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_conv(geometry: ConvGeometry, batch: int) -> None:
    """Both norms, the kept gradients and the clipped sum, against autograd a sample at a time."""
    torch.manual_seed(0)
    dims = len(geometry.stride)
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    x = torch.randn(batch, geometry.weight_shape[1] * geometry.groups, *(9, 8, 7)[:dims]).double()
    weight = torch.randn(geometry.weight_shape, dtype=torch.float64, requires_grad=True)
    hyper = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    out = conv(x, weight, None, *hyper)
    g = torch.randn_like(out)
    rows = [
        torch.autograd.grad(conv(x[i : i + 1], weight, None, *hyper), weight, g[i : i + 1])[0]
        for i in range(batch)
    ]
    grads = torch.stack(rows) if rows else weight.new_zeros(0, *weight.shape)
    norms, scale = grads.detach().flatten(1).square().sum(1), torch.rand(batch).double()
    torch.testing.assert_close(ops.conv_per_sample_gradients(x, g, geometry), grads)
    torch.testing.assert_close(ops.conv_ghost_norm(x, g, geometry), norms)
    torch.testing.assert_close(ops.conv_norm(x, g, geometry), norms)
    torch.testing.assert_close(
        ops.conv_sum(x, g, scale, geometry), torch.einsum("b,b...->...", scale, grads)
    )


def test_planner_within_its_memory_budget() -> None:
    """Kept gradients may cost what they replace times the factor, and no more."""
    free, tight = Planner(memory_factor=1e9), Planner(memory_factor=0.0)
    assert free.linear(8, 512, 64, 64, 4, may_keep=True).method == "keep"
    assert tight.linear(8, 512, 64, 64, 4, may_keep=True).method != "keep"
    assert free.linear(8, 512, 64, 64, 4, may_keep=False).method != "keep"
    held = tight.linear(8, 512, 64, 64, 4, may_keep=True).nbytes
    assert held == 8 * 512 * (64 + 64) * 4


def test_planner_by_shape() -> None:
    planner = Planner()
    assert planner.linear(8, 1, 4096, 4096, 4, True).method == "ghost"  # two vector norms
    assert planner.linear(8, 64, 4096, 4096, 4, True).method == "ghost"
    assert planner.linear(8, 4096, 64, 64, 4, True).method == "keep"
    small_map = ConvGeometry((512, 512, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    large_map = ConvGeometry((64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    assert planner.conv(32, 36, 16, small_map, 4, True).method == "ghost"
    assert planner.conv(32, 34 * 34, 32 * 32, large_map, 4, True).method == "keep"


def test_planner_refuses_a_gram_that_would_round_too_much() -> None:
    """float32 over a long sequence: instantiated whatever it costs; float64 may use the Gram."""
    planner = Planner()
    assert planner.linear(1, 8192, 20000, 20000, 4, may_keep=False).method == "recompute"
    assert planner.linear(1, 8192, 20000, 20000, 8, may_keep=False).method == "ghost"


def seeded() -> SeededNoise:
    return SeededNoise(torch.Generator().manual_seed(5))


@pytest.mark.parametrize("source", [seeded(), SecureNoise(), SecureNoise(guarded=False)])
def test_noise_has_its_deviation(source: NoiseSource) -> None:
    """Kolmogorov-Smirnov, moments and tails of 100,000 draws."""
    like = [torch.zeros(1000, 100), torch.zeros(3, dtype=torch.float16)]
    sums = [torch.full((1000, 100), 8.0), None]
    noisy, half = ops.noise_finalize(sums, like, 3.0, 4.0, source)
    assert_standard_normal((noisy.double() - 8.0 / 4.0) / (3.0 / 4.0))
    assert half.dtype == torch.float16
    assert half.any()  # a parameter that no sample touched receives noise too


def test_a_seed_gives_the_reference_the_stream_of_torch() -> None:
    with use_backend("reference"):
        (noisy,) = ops.noise_finalize([None], [torch.zeros(1000, 100)], 3.0, 4.0, seeded())
    plain = torch.empty(1000, 100).normal_(0, 0.75, generator=torch.Generator().manual_seed(5))
    assert torch.equal(noisy, plain)


def test_without_noise_the_sum_is_divided_and_nothing_is_drawn() -> None:
    source = seeded()
    before = source.generator.get_state()
    (gradient,) = ops.noise_finalize([torch.full((2,), 3.0)], [torch.zeros(2)], 0.0, 4.0, source)
    assert gradient.tolist() == [0.75, 0.75]
    assert torch.equal(source.generator.get_state(), before)


def test_noise_scaled_on_the_device() -> None:
    """A standard deviation that lies in a tensor gives the same noise as the number."""
    shapes = [torch.zeros(40), torch.zeros(3, 7, dtype=torch.float64), torch.zeros(9).half()]
    sums = [torch.ones_like(x) for x in shapes]
    by_kind = [
        ops.noise_finalize(sums, shapes, std, 4.0, seeded())
        for std in (1.7, torch.tensor(1.7, dtype=torch.float64))
    ]
    for number, tensor in zip(*by_kind, strict=True):
        assert number.dtype == tensor.dtype
        tol = 1e-3 if number.dtype == torch.half else 1e-6
        assert torch.allclose(number, tensor, rtol=tol, atol=tol)
