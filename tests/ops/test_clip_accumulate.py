"""clip_accumulate against one sample at a time in float64, its bound, and Opacus.

The contract holds for every implementation: here the reference; the kernels' host build and GPU
build in tests/ops/cuda.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import opacus.optimizers
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fastclip.clipping import Clipping, Hard, PerLayer
from fastclip.core.numerics import accumulation_dtype, margin
from fastclip.errors import ArgumentError
from fastclip.ops.clip import clip_accumulate, hard_scales, room

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NORM = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 2e-3, torch.bfloat16: 2e-3}
SUM = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-2}
SHAPES = [(5, 3), (), (1,), (4099,), (2, 0), (64, 3, 3, 3), (8, 1024)]
SMALL = [(3, 5), (), (7,), (2, 0)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
per_layers = pytest.mark.parametrize("per_layer", [False, True], ids=["flat", "per_layer"])


def drawn(
    b: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: Any = "cpu"
) -> list[Tensor]:
    """Gradients of which some samples are clipped and some are not, at C near 1."""
    generator = torch.Generator().manual_seed(b)
    size = torch.rand(b, generator=generator) * 4 / math.sqrt(1 + sum(map(math.prod, shapes)))
    return [
        (torch.randn(b, *shape, generator=generator) * size.view(-1, *[1] * len(shape))).to(
            device, dtype
        )
        for shape in shapes
    ]


def thresholds_for(count: int, per_layer: bool) -> float | list[float]:
    return [0.3 + 0.1 * (i % 9) for i in range(count)] if per_layer else 1.1


def by_loops(
    grad_samples: Sequence[Tensor], thresholds: Any
) -> tuple[list[Tensor], Tensor, list[float]]:
    """The definition, one sample after the other, in float64: sums, norms, and what errors of the
    sums are relative to (their norms, and where samples cancel, what went into them)."""
    wide = [g.detach().cpu().double() for g in grad_samples]
    flat = isinstance(thresholds, float)
    squares = [[float(x.square().sum()) for x in g] for g in wide]
    norms = torch.tensor(squares, dtype=torch.float64).reshape(len(wide), -1)
    if flat:
        norms = norms.sum(0, keepdim=True)
    norms = norms.sqrt()  # [l, b] or [1, b]
    sums, sizes = [], []
    for i, g in enumerate(wide):
        total, absolute = torch.zeros(2, *g.shape[1:], dtype=torch.float64)
        row, limit = (0, thresholds) if flat else (i, thresholds[i])
        for b, x in enumerate(g):
            if torch.isfinite(norms[:, b]).all():
                part = min(1.0, limit / max(float(norms[row, b]), 1e-300)) * x
                total += part
                absolute += part.abs()
        sums.append(total)
        # clipped samples are 2^-18 smaller, the others are not: half of what went in makes 5e-6
        sizes.append(float(total.norm() + absolute.norm() / 2) or 1.0)
    return sums, norms[0] if flat else norms, sizes


def skewed(g: Tensor) -> Tensor:
    """The same numbers at an address and with a distance of samples that are not aligned."""
    n = g[0].numel() if len(g) else 0
    memory = g.new_full((len(g) * (n + 3) + 1,), math.nan)
    view = memory[1:].view(len(g), n + 3)[:, :n]
    view.copy_(g.reshape(len(g), n))
    return view.unflatten(1, g.shape[1:]) if g.dim() > 2 else view.reshape(g.shape)


class ClipContract:
    """What every implementation must do; subclasses say which and where."""

    device = "cpu"

    def clip(self, grad_samples: Any, thresholds: Any) -> tuple[list[Tensor], Tensor]:
        raise NotImplementedError

    def check(self, grad_samples: list[Tensor], thresholds: Any) -> None:
        """Values, shapes and types against the loops; rows that are not finite included."""
        sums, norms = self.clip(grad_samples, thresholds)
        expected, exact_norms, sizes = by_loops(grad_samples, thresholds)
        coarsest = min((g.dtype for g in grad_samples), key=lambda t: -NORM[t])
        wide = torch.float64 in {g.dtype for g in grad_samples}
        assert norms.dtype == (torch.float64 if wide else torch.float32)
        assert norms.shape == exact_norms.shape
        torch.testing.assert_close(
            norms.cpu().double(), exact_norms, rtol=NORM[coarsest], atol=1e-45, equal_nan=True
        )
        assert len(sums) == len(grad_samples)
        for g, total, exact, size in zip(grad_samples, sums, expected, sizes, strict=True):
            assert (total.shape, total.dtype) == (g.shape[1:], accumulation_dtype(g.dtype))
            assert total.device == g.device
            error = (total.cpu().double() - exact).norm()
            assert error <= SUM[coarsest] * size

    @pytest.mark.parametrize("b", [0, 1, 7, 300])
    @dtypes
    @per_layers
    def test_loops(self, b: int, dtype: torch.dtype, per_layer: bool) -> None:
        shapes = SHAPES if b < 300 else SMALL
        self.check(drawn(b, shapes, dtype, self.device), thresholds_for(len(shapes), per_layer))

    @per_layers
    def test_many_tensors(self, per_layer: bool) -> None:
        shapes = [(i % 5,) if i % 3 else (i % 7, 3) for i in range(1500)]
        gradients = drawn(4, shapes, torch.float32, self.device)
        self.check(gradients, thresholds_for(1500, per_layer))

    @dtypes
    @per_layers
    def test_unaligned(self, dtype: torch.dtype, per_layer: bool) -> None:
        gradients = [skewed(g) for g in drawn(5, SHAPES, dtype, self.device)]
        assert any(g.data_ptr() % 16 for g in gradients if g.numel())
        self.check(gradients, thresholds_for(len(SHAPES), per_layer))

    @dtypes
    def test_strides(self, dtype: torch.dtype) -> None:
        """Transposed, channels last, every other sample, one sample's memory for all."""
        images, matrix, row = drawn(6, [(8, 5, 5), (33, 20), (50,)], dtype, self.device)
        every = torch.empty(12, 50, dtype=dtype, device=self.device)[::2].copy_(row)
        gradients = [
            images.to(memory_format=torch.channels_last),
            matrix.transpose(1, 2),
            every,
            row[:1].expand(6, 50),
            matrix[:, :, ::3],
        ]
        assert not any(g.is_contiguous() for g in gradients)
        self.check(gradients, 1.1)

    @per_layers
    def test_mixed_types(self, per_layer: bool) -> None:
        gradients = [drawn(7, [(40,)], dtype, self.device)[0] for dtype in DTYPES]
        self.check(gradients, thresholds_for(4, per_layer))
        sixteen = [gradients[3], gradients[2], gradients[0]]
        self.check(sixteen, thresholds_for(3, per_layer))

    @dtypes
    @per_layers
    def test_not_finite(self, dtype: torch.dtype, per_layer: bool) -> None:
        """Such a sample contributes nothing, to no parameter; the others what they do alone."""
        gradients = drawn(9, [(6, 5), (3000,)], dtype, self.device)
        for sample, value in ((0, math.inf), (4, math.nan), (8, -math.inf)):
            gradients[sample % 2][sample].view(-1)[sample] = value
        self.check(gradients, thresholds_for(2, per_layer))
        for g in gradients:
            g[1:] = math.nan
        for total in self.clip(gradients, thresholds_for(2, per_layer))[0]:
            assert torch.equal(total, torch.zeros_like(total))

    @dtypes
    def test_zero_gradients(self, dtype: torch.dtype) -> None:
        gradients = drawn(3, [(2000,), (4,)], dtype, self.device)
        for g in gradients:
            g[1] = 0
        self.check(gradients, 1.1)
        sums, norms = self.clip([torch.zeros_like(g) for g in gradients], 1e-12)
        assert not norms.any()
        assert not any(total.any() for total in sums)

    @pytest.mark.parametrize("value", [1e20, 1e-20, 1e-30, 1e-44])
    def test_extremes(self, value: float) -> None:
        """Squares of these leave the range of float32, norms do not."""
        gradients = drawn(3, [(5000,), (7,)], torch.float32, self.device)
        for g in gradients:
            g[1] = value
        norm = float(gradients[0][0, :1].fill_(value).double()) * math.sqrt(5007)  # as it is stored
        _, norms = self.clip(gradients, 1.1)
        assert norms[1].item() == pytest.approx(norm, rel=1e-5, abs=2e-45)
        self.check([g[1:2] for g in gradients], 1.1)
        self.check([g[1:2] for g in gradients], [1e-12, 1e30])

    def test_largest_of_16_bits(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            largest = torch.finfo(dtype).max
            self.check([torch.full((2, 1), largest, dtype=dtype, device=self.device)], 1e3)

    def test_overflowing_norm_is_dropped(self) -> None:
        g = torch.full((2, 4000), 3e38, device=self.device)
        g[1] = 1e-3
        (total,), norms = self.clip([g], 1.0)
        assert norms[0] == math.inf
        assert torch.equal(total, g[1])

    @settings(
        max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(
        dtype=st.sampled_from(DTYPES),
        significands=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=6),
        exponent=st.integers(-160, 127),
        repeats=st.sampled_from([1, 3, 1100]),
        threshold=st.floats(1.0, 2.0),
        magnitude=st.integers(-39, 98),
    )
    @example(torch.float32, [1.0], 110, 1, 1.0, -38)  # a scale that is subnormal in float32
    @example(torch.float32, [0.7], 3, 1, 1.1, 0)
    def test_bound(
        self, dtype: torch.dtype, significands: list[float], exponent: int, repeats: int,
        threshold: float, magnitude: int,
    ) -> None:  # fmt: skip
        """A sample alone: the norm of what is stored, in float64, is at most C; and no more of it
        is lost than the margin, unless the scale leaves the range of float32."""
        values = torch.tensor(significands, dtype=torch.float64).repeat(repeats) * 2.0**exponent
        g = values.to(self.device, dtype)[None]
        c = threshold * 2.0**magnitude
        gradients = [g, g[:, :1] / 2]
        (first, second), norms = self.clip(gradients, c)
        stored = torch.cat([first, second]).double().norm().item()
        assert stored <= c
        size = torch.cat(gradients, 1).double().norm().item()
        if math.isfinite(float(norms)) and min(c, size) > 1e-30 and size / c < 1e30:
            assert stored >= min(c, size) * (1 - 1e-5)
        (first, second), _ = self.clip(gradients, [c, c / 2])
        assert first.double().norm().item() <= c
        assert second.double().norm().item() <= c / 2

    @dtypes
    def test_scales_are_those_of_hard(self, dtype: torch.dtype) -> None:
        """Bit by bit: one number a sample, whose norm is the number itself."""
        for x in torch.logspace(-10, 4, 57).to(dtype):
            if not x:
                continue
            wide = x.to(accumulation_dtype(dtype))
            state = Clipping().initial(0.7, 1)
            scale = Clipping(Hard()).scales(wide[None], state)
            (total,), _ = self.clip([x.to(self.device)[None]], 0.7)
            assert total.item() == (scale * wide).item()

    def test_forms_of_thresholds(self) -> None:
        gradients = drawn(7, [(30,), (20,)], torch.float32, self.device)
        expected = self.clip(gradients, 0.5)
        for dtype in (torch.float32, torch.float64):
            assert_same(self.clip(gradients, torch.tensor(0.5, dtype=dtype)), expected)
            assert_same(self.clip(gradients, torch.tensor(0.5).to(self.device, dtype)), expected)
        expected = self.clip(gradients, [0.5, 2.0])
        assert expected[1].shape == (2, 7)
        assert_same(self.clip(gradients, torch.tensor([0.5, 2.0], device=self.device)), expected)
        assert_same(self.clip(tuple(gradients), (0.5, 2)), expected)
        assert self.clip(gradients[:1], [0.5])[1].shape == (1, 7)

    @per_layers
    def test_repeatable(self, per_layer: bool) -> None:
        """Bit by bit."""
        gradients = drawn(40, SHAPES, torch.float32, self.device)
        thresholds = thresholds_for(len(SHAPES), per_layer)
        first = self.clip(gradients, thresholds)
        for _ in range(3):
            again = [g.clone() for g in gradients]
            assert_same(self.clip(again, thresholds), first)

    def test_refusals(self) -> None:
        g = torch.ones(3, 4, device=self.device)
        cases: list[tuple[list[Tensor], Any, str]] = [
            ([], 1.0, "at least one parameter"),
            ([g, g[:2]], 1.0, r"grad_samples\[1\] expects 3 samples as grad_samples\[0\], got 2"),
            ([g, g.to("meta")], 1.0, r"grad_samples\[1\] expects .* got meta"),
            ([g, g.long()], 1.0, r"grad_samples\[1\] expects float32"),
            ([g.sum()], 1.0, r"grad_samples\[0\] expects a shape"),
            ([g], [1.0, 2.0], "got 2"),
            ([g, g], torch.ones(3), r"got a tensor \[3\]"),
            ([g], 0.0, "positive"),
            ([g], [math.nan], "positive"),
            ([g], math.inf, "positive"),
        ]
        for gradients, thresholds, message in cases:
            with pytest.raises(ArgumentError, match=message):
                self.clip(gradients, thresholds)

    def test_opacus(self) -> None:
        """Its results up to what it adds to the norms, 1e-6 (in float64, where our margin is tiny)."""
        gradients = drawn(12, [(3, 5), (40,), (1,)], torch.float64)
        gradients = [g * 3 for g in gradients]
        for thresholds in (1.5, [0.5, 1.0, 0.25]):
            theirs = opacus_sums(gradients, thresholds)
            ours, _ = self.clip([g.to(self.device) for g in gradients], thresholds)
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=5e-6)


def assert_same(found: tuple[list[Tensor], Tensor], expected: tuple[list[Tensor], Tensor]) -> None:
    assert torch.equal(found[1], expected[1])
    assert all(torch.equal(x, y) for x, y in zip(found[0], expected[0], strict=True))


def opacus_sums(gradients: list[Tensor], thresholds: float | list[float]) -> list[Tensor]:
    """Opacus' optimizers, flat and per layer, on parameters that hold these gradients."""
    parameters = [nn.Parameter(torch.zeros_like(g[0])) for g in gradients]
    for parameter, g in zip(parameters, gradients, strict=True):
        parameter.grad_sample = g.clone()  # Opacus marks it
    kind = "DPPerLayerOptimizer" if isinstance(thresholds, list) else "DPOptimizer"
    optimizer = getattr(opacus.optimizers, kind)(
        torch.optim.SGD(parameters, 0.1),
        noise_multiplier=0.0, max_grad_norm=thresholds, expected_batch_size=len(gradients[0]),
    )  # fmt: skip
    optimizer.clip_and_accumulate()
    return [parameter.summed_grad for parameter in parameters]


class TestReference(ClipContract):
    """PyTorch on the CPU."""

    def clip(self, grad_samples: Any, thresholds: Any) -> tuple[list[Tensor], Tensor]:
        return clip_accumulate.reference(grad_samples, thresholds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestReferenceOnGPU(TestReference):
    """PyTorch on the GPU, where it does not look at values: what the CPU does again in float64,
    because squares leave the range of float32, is not done again there."""

    device = "cuda"

    @pytest.mark.skip(reason="norms beyond 1e18 or below 1e-10 are not kept on a GPU")
    def test_extremes(self) -> None: ...

    @pytest.mark.skip(reason="PyTorch promises no order of sums on a GPU")
    def test_repeatable(self) -> None: ...

    @pytest.mark.skip(reason="norms beyond 1e18 are not kept on a GPU")
    def test_largest_of_16_bits(self) -> None: ...


@per_layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_of_norms(dtype: torch.dtype, per_layer: bool) -> None:
    """The formula is Hard's; it differs where that scale is subnormal, and rounds up."""
    norms = torch.tensor([[0.0, 1e-30, 0.3, 0.7, 0.71, 5.0, 1e20, 3e38, math.inf, math.nan]])
    finite = norms.nan_to_num(0.1, posinf=2.0)
    norms = torch.cat([norms, finite.flip(1), finite])
    norms = (norms if per_layer else norms[:1]).to(dtype)
    strategy = Clipping(Hard(), PerLayer()) if per_layer else Clipping()
    state = strategy.initial([0.7, 1e-5, 1e3] if per_layer else 0.7, 3)
    bounds = room([norms])
    scales = hard_scales(norms, state.threshold, bounds)
    whole = norms[0] if not per_layer else torch.where(torch.isfinite(norms).all(0), 1.0, math.nan)
    expected = strategy.scales(whole.to(dtype), state, None, norms if per_layer else None)
    expected = expected if per_layer else expected[None]
    assert torch.equal(scales, expected.masked_fill(expected < bounds[1], 0))
    assert bounds[0] == 1 - margin(dtype)
