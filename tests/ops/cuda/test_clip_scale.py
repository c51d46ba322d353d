"""clip_scale and threshold_step in CUDA C++ against the strategies' own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastclip.clipping import Automatic, Clipping, Group, Hard, Quantile, Reweighted, Tanh
from fastclip.ops import dispatch
from fastclip.ops.clip import clip_scale as reference_scale
from fastclip.ops.clip import threshold_step as reference_step
from fastclip.ops.cuda import clip_scale, threshold_step
from tests.clip_cases import LAYERS, norms_of, setting
from tests.strategies import COMBINATIONS, label

ALL = [  # every combination, and parameters that are felt
    *COMBINATIONS,
    Clipping(Tanh(eps=0.3)),
    Clipping(Automatic(gamma=0.5)),
    Clipping(Hard(), Quantile(target=0.3, learning_rate=0.7, upper=0.75)),
    Clipping(Hard(), Group(3, max_ratio=0.4)),
    Clipping(Hard(), Reweighted(3, max_weight=0.5)),
]
strategies = pytest.mark.parametrize("strategy", ALL, ids=label)
counting = pytest.mark.parametrize(
    "strategy", [s for s in ALL if s.threshold.count_noise_ratio], ids=label
)
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])], ids=["host", "gpu"]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run, asked for by name: elsewhere Triton's go first."""
    with dispatch.use_backend("cuda"):
        yield request.param


@pytest.mark.parametrize("b", [0, 1, 7, 300])
@strategies
def test_scales_norms_and_counts(strategy: Clipping, b: int, device: str) -> None:
    norm_sq = norms_of(b, device)
    state, groups, layers, counts = setting(strategy, b, device)
    theirs = None if counts is None else counts.clone()
    scales, norms = clip_scale(norm_sq, strategy, state, groups, layers, counts)
    expected, sizes = reference_scale.reference(norm_sq, strategy, state, groups, layers, theirs)
    assert (scales.shape, scales.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(scales, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(norms, sizes, rtol=1e-6, atol=0, equal_nan=True)
    if counts is not None:
        assert torch.equal(counts, theirs)
    own = norm_sq.sqrt() if strategy.threshold.per_layer else norms
    parts = (scales * own).nan_to_num(0.0, posinf=0.0).double()
    size = parts.square().sum(0).sqrt() if parts.dim() == 2 else parts
    assert (size <= strategy.sensitivity(state)).all()


@counting
def test_thresholds(strategy: Clipping, device: str) -> None:
    state, _, _, counts = setting(strategy, 7, device)
    policy = strategy.threshold
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(counts.shape, dtype=torch.float64, generator=generator).to(device) * 20
        for drawn in (noise, None):
            noisy, moved = threshold_step(counts, drawn, policy, state, 8.0, 3)
            expected, theirs = reference_step.reference(counts, drawn, policy, state, 8.0, 3)
            assert torch.equal(noisy, expected)
            for name, value in theirs.tensors().items():
                torch.testing.assert_close(moved.tensors()[name], value, rtol=1e-12, atol=0)


def test_wide_noise_stays_in_range(device: str) -> None:
    policy = Quantile("above", lower=0.5, upper=4.0, learning_rate=5.0)
    state = policy.initial(1.0, 1).to(torch.device(device))
    for noise, bound in ((1e6, 4.0), (-1e6, 0.5)):
        counts = torch.tensor(3.0, dtype=torch.float64, device=device)
        drawn = torch.full_like(counts, noise)
        assert threshold_step(counts, drawn, policy, state, 8.0, 0)[1].threshold == bound


def test_many_groups(device: str) -> None:
    """More than a block of threads, and than Triton's kernel takes."""
    strategy = Clipping(Hard(normalized=True), Group(1500))
    state = strategy.initial(0.7, 6).to(torch.device(device))
    norm_sq = norms_of(3000, device)
    groups = torch.arange(3000, device=device).flip(0) % 1500
    ours, theirs = torch.zeros(2, 2, 1500, dtype=torch.float64, device=device)
    scales, _ = clip_scale(norm_sq, strategy, state, groups, None, ours)
    expected, _ = reference_scale.reference(norm_sq, strategy, state, groups, None, theirs)
    torch.testing.assert_close(scales, expected, rtol=2e-6, atol=0)
    assert torch.equal(ours, theirs)
    call = (ours, None, strategy.threshold, state, 3000.0, 0)
    moved, expected = threshold_step(*call)[1], reference_step.reference(*call)[1]
    torch.testing.assert_close(moved.threshold, expected.threshold, rtol=1e-12, atol=0)


def test_parts_of_a_user_stay_with_the_reference(device: str) -> None:
    """A subclass may have changed the formula."""

    class Halved(Hard):
        def __call__(self, norms: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
            return super().__call__(norms, thresholds) / 2

    class Slower(Quantile):
        pass

    for strategy in (Clipping(Halved()), Clipping(Hard(), Slower())):
        state = strategy.initial(1.0, LAYERS).to(torch.device(device))
        assert clip_scale(norms_of(7, device), strategy, state) is NotImplemented
    counts = torch.zeros((), dtype=torch.float64, device=device)
    assert threshold_step(counts, None, Slower(), state, 8.0, 0) is NotImplemented


def test_other_types_stay_with_the_reference(device: str) -> None:
    norm_sq, strategy = norms_of(7, device), Clipping()
    state = strategy.initial(1.0, LAYERS).to(torch.device(device))
    assert clip_scale(norm_sq.double(), strategy, state) is NotImplemented
    assert clip_scale(norm_sq, strategy, strategy.initial(1.0, 1).to(torch.device("meta"))) is (
        NotImplemented
    )
    assert clip_scale(norm_sq, strategy, state) is not NotImplemented


def test_operations_dispatch_here_by_name(device: str) -> None:
    strategy = Clipping(Hard(), Quantile())
    state, _, _, counts = setting(strategy, 7, device)
    reference_scale(norms_of(7, device), strategy, state, None, None, counts)
    reference_step(counts, None, strategy.threshold, state, 8.0, 0)
    for name in ("clip_scale", "threshold_step"):
        assert dispatch.backend_of(name, torch.device(device)) == ("cuda", "launched")


@pytest.mark.gpu
@no_gpu
def test_triton_goes_first() -> None:
    """Where nobody asked for CUDA C++ by name."""
    pytest.importorskip("triton")
    with dispatch.use_backend("auto"):
        state = Clipping().initial(1.0, LAYERS).to(torch.device("cuda"))
        assert clip_scale(norms_of(7, "cuda"), Clipping(), state) is NotImplemented
