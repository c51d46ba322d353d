"""clip_scale and threshold_step against the strategies' own arithmetic, for every strategy."""

from __future__ import annotations

import pytest
import torch

from fastclip.clipping import Clipping, Hard, PerLayer, Quantile
from fastclip.ops.clip import clip_scale as reference_scale
from fastclip.ops.clip import threshold_step as reference_step
from fastclip.ops.triton.clip_scale import clip_scale, threshold_step
from tests.clip_cases import LAYERS, norms_of, setting
from tests.ops.triton.oracle import DEVICE
from tests.strategies import COMBINATIONS, label

strategies = pytest.mark.parametrize("strategy", COMBINATIONS, ids=label)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("b", [0, 1, 7, 300])
@strategies
def test_scales_norms_and_counts(strategy: Clipping, b: int) -> None:
    norm_sq = norms_of(b, DEVICE)
    state, groups, layers, counts = setting(strategy, b, DEVICE)
    theirs = None if counts is None else counts.clone()
    scales, norms = clip_scale(norm_sq, strategy, state, groups, layers, counts)
    expected, sizes = reference_scale.reference(norm_sq, strategy, state, groups, layers, theirs)
    assert (scales.shape, scales.dtype) == (expected.shape, expected.dtype)
    assert torch.allclose(scales, expected, rtol=2e-6, atol=0)
    assert torch.allclose(norms, sizes, rtol=1e-6, atol=0, equal_nan=True)
    if counts is not None:
        assert torch.equal(counts, theirs)
    own = norm_sq.sqrt() if strategy.threshold.per_layer else norms
    parts = (scales * own).nan_to_num(0.0, posinf=0.0).double()
    size = parts.square().sum(0).sqrt() if parts.dim() == 2 else parts
    assert (size <= strategy.sensitivity(state)).all()


@pytest.mark.parametrize(("length", "b"), [(1, 33), (63, 64), (64, 65), (65, 4096), (1000, 70)])
def test_many_tensors(length: int, b: int) -> None:
    """Blocks of tensors and of samples that end anywhere; a sample's bits are its own."""
    generator = torch.Generator().manual_seed(length)
    norm_sq = torch.rand(length, b, generator=generator).to(DEVICE)
    norm_sq[-1, -1] = 1e12  # what is last counts
    strategy = Clipping()
    state = strategy.initial(0.7, length).to(DEVICE)
    scales, norms = clip_scale(norm_sq, strategy, state)
    exact = norm_sq.double().sum(0).sqrt()
    assert torch.allclose(norms.double(), exact, rtol=2**-23, atol=0)
    assert torch.allclose(scales.double(), 0.7 / exact.clamp(min=0.7), rtol=1e-5, atol=0)
    assert (scales.double() * exact <= 0.7).all()
    for found, again in zip((scales, norms), clip_scale(norm_sq, strategy, state), strict=True):
        assert torch.equal(found, again)
    for found, alone in zip(
        (scales, norms), clip_scale(norm_sq[:, :7], strategy, state), strict=True
    ):
        assert torch.equal(found[:7], alone)


@pytest.mark.parametrize("length", [65, 1100])
def test_many_thresholds(length: int) -> None:
    """More than a block of them, of which every other tensor's are asked for."""
    thresholds = torch.linspace(0.1, 3.0, length, dtype=torch.float64)
    layers = torch.arange(0, length, 2)
    norm_sq = torch.rand(len(layers), 35, generator=torch.Generator().manual_seed(0)) * 10
    strategy = Clipping(Hard(normalized=True), PerLayer())
    state = strategy.initial(thresholds.tolist(), length).to(DEVICE)
    given = norm_sq.to(DEVICE), strategy, state, None, layers.to(DEVICE)
    scales, _ = clip_scale(*given)
    own = thresholds[layers][:, None]
    exact = own / norm_sq.double().sqrt().maximum(own) / thresholds.norm()
    assert torch.allclose(scales.double().cpu(), exact, rtol=1e-5, atol=0)
    assert torch.equal(scales, clip_scale(*given)[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "strategy", [s for s in COMBINATIONS if s.threshold.count_noise_ratio], ids=label
)
def test_thresholds(strategy: Clipping) -> None:
    state, _, _, counts = setting(strategy, 7, DEVICE)
    policy = strategy.threshold
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(counts.shape, dtype=torch.float64, generator=generator).to(DEVICE) * 20
        for drawn in (noise, None):
            noisy, moved = threshold_step(counts, drawn, policy, state, 8.0, 3)
            expected, theirs = reference_step.reference(counts, drawn, policy, state, 8.0, 3)
            assert torch.equal(noisy, expected)
            for name, value in theirs.tensors().items():
                assert torch.allclose(moved.tensors()[name], value, rtol=1e-12, atol=0), name


def test_wide_noise_stays_in_range() -> None:
    policy = Quantile("above", lower=0.5, upper=4.0, learning_rate=5.0)
    state = policy.initial(1.0, 1).to(DEVICE)
    for noise, bound in ((1e6, 4.0), (-1e6, 0.5)):
        counts = torch.tensor(3.0, dtype=torch.float64, device=DEVICE)
        drawn = torch.full_like(counts, noise)
        assert threshold_step(counts, drawn, policy, state, 8.0, 0)[1].threshold == bound


def test_parts_of_a_user_stay_with_the_reference() -> None:
    """A subclass may have changed the formula."""

    class Halved(Hard):
        def __call__(self, norms: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
            return super().__call__(norms, thresholds) / 2

    strategy = Clipping(Halved())
    state = strategy.initial(1.0, LAYERS).to(DEVICE)
    assert clip_scale(norms_of(7, DEVICE), strategy, state) is NotImplemented
    double = norms_of(7, DEVICE).double()
    assert clip_scale(double, Clipping(), Clipping().initial(1.0, LAYERS)) is NotImplemented
