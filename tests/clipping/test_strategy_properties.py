"""What every strategy must obey for any norms: bounded contributions, bounded counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip import ops
from fastclip.backward.clipping_state import ClippingState
from fastclip.clipping import Clipping, Group, Quantile, Thresholds
from fastclip.ops.noise import SeededNoise
from tests.strategies import COMBINATIONS, label

LAYERS = 3
EXTREMES = [0.0, 5e-324, 1e-310, 1e-45, 1e-38, 1e-20, 1e18, 1e19, 3e38, 1e154, 1e200]
NORMS = st.one_of(
    st.floats(0, 100), st.floats(0, 1e300), st.sampled_from([*EXTREMES, math.inf, math.nan])
)
strategies = pytest.mark.parametrize("strategy", COMBINATIONS, ids=label)
FEWER = settings(max_examples=40)
"""Of each of hundreds of pairs of a strategy and a type."""
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int]:
    """Layer norms [b][l] of a batch, the rows' groups, and a seed of its noisy counts."""
    rows = draw(st.lists(st.lists(NORMS, min_size=LAYERS, max_size=LAYERS), max_size=6))
    groups = draw(st.lists(st.integers(-1, 2), min_size=len(rows), max_size=len(rows)))
    return rows, groups, draw(st.integers(0, 2**16))


def reached_state(strategy: Clipping, seed: int) -> Thresholds:
    """Thresholds after some steps with wildly noisy counts."""
    policy = strategy.threshold
    state = strategy.initial([0.3, 1.0, 2.5] if policy.per_layer else 0.7, LAYERS)
    generator = torch.Generator().manual_seed(seed)
    for step in range(seed % 13):
        counts = None
        if policy.count_noise_ratio is not None:
            ids = None if policy.num_groups is None else torch.zeros(1, dtype=torch.int64)
            shape = policy.count(torch.ones(1, dtype=torch.float64), state, ids).shape
            counts = torch.randn(shape, generator=generator, dtype=torch.float64) * 30
        state = policy.move(state, counts, 8.0, step)
    return state


def clip(strategy: Clipping, norm_sq: torch.Tensor, state: Thresholds, groups: torch.Tensor):
    """Scales and total norms as the engine computes them."""
    norms = norm_sq.sum(0).sqrt()
    layered = norm_sq.sqrt() if strategy.threshold.per_layer else None
    ids = groups if strategy.threshold.num_groups is not None else None
    return strategy.scales(norms, state, ids, layered), norms


@pytest.mark.one_in(9)
@dtypes
@strategies
@FEWER
@given(batches())
def test_contribution_is_within_the_sensitivity(strategy, dtype, batch) -> None:
    """s_i * n_i <= S in the arithmetic in use, also for 0, subnormal, huge, inf and NaN norms."""
    rows, ids, seed = batch
    state = reached_state(strategy, seed)
    layer_norms = torch.tensor(rows, dtype=dtype).reshape(-1, LAYERS).T  # [l, b]
    groups = torch.tensor(ids, dtype=torch.int64)
    scales, norms = clip(strategy, layer_norms.square(), state, groups)
    assert torch.isfinite(scales).all()
    assert (scales >= 0).all()
    dead = ~torch.isfinite(norms)
    if strategy.threshold.num_groups is not None:
        dead |= groups < 0
    assert (scales[..., dead] == 0).all()
    parts = (scales * layer_norms).nan_to_num(0.0, posinf=0.0)  # inf and NaN rows have scale 0
    size = parts.double().square().sum(0).sqrt()
    # Squares that underflow only shrink the norm a sample is clipped by below 1e-19 of itself.
    assert (size <= float(strategy.sensitivity(state))).all()


@pytest.mark.one_in(18)
@dtypes
@strategies
@FEWER
@given(batches(), st.integers(0, 5))
def test_one_sample_changes_nothing_but_its_own_part(strategy, dtype, batch, which) -> None:
    """Thresholds held fixed, other samples keep their scales bit for bit; counts move by <= theirs."""
    rows, ids, seed = batch
    if not rows:
        return
    which %= len(rows)
    state = reached_state(strategy, seed)
    layer_norms = torch.tensor(rows, dtype=dtype).T
    groups = torch.tensor(ids, dtype=torch.int64)
    kept = torch.arange(len(rows)) != which
    scales, norms = clip(strategy, layer_norms.square(), state, groups)
    fewer, _ = clip(strategy, layer_norms[:, kept].square(), state, groups[kept])
    assert torch.equal(scales[..., kept], fewer)

    policy = strategy.threshold
    if policy.count_noise_ratio is None:
        return
    members = groups if policy.num_groups is not None else None
    with_it = policy.count(norms, state, members)
    without = policy.count(norms[kept], state, None if members is None else members[kept])
    change = torch.linalg.vector_norm((with_it - without).flatten()).item()
    belongs = members is None or bool(groups[which] >= 0)
    one_hot = members is not None or getattr(policy, "centred", False)
    assert change <= (policy.count_sensitivity if belongs else 0.0)
    assert not (one_hot and belongs) or change == policy.count_sensitivity


@strategies
def test_sensitivity_is_reached(strategy) -> None:
    """S is tight: the sample whose threshold is largest comes within 1e-5 of it."""
    state = strategy.initial([0.3, 1.0, 2.5] if strategy.threshold.per_layer else 0.7, LAYERS)
    thresholds = state.threshold.reshape(-1, 1).expand(-1, 1)
    # A function below its bound everywhere comes close to it for large norms; the global ones at Z.
    norm = float(state.threshold.max())
    far = 1e9 if strategy.scale.cutoff is None else 1.0
    rows = len(state.threshold) if strategy.threshold.per_layer else 1
    layer_norms = (thresholds if rows > 1 else torch.tensor([[norm]])).double() * far
    scales, _ = clip(strategy, layer_norms.square(), state, torch.zeros(1, dtype=torch.int64))
    size = (scales * layer_norms).square().sum(0).sqrt().item()
    assert size == pytest.approx(float(strategy.sensitivity(state)), rel=1e-5)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("strategy", [s for s in COMBINATIONS if s.threshold.moves], ids=label)
@given(st.integers(0, 2**16))
def test_thresholds_stay_positive_and_finite(strategy, seed) -> None:
    """However large the noise of the counts."""
    for value in reached_state(strategy, seed).tensors().values():
        assert torch.isfinite(value).all()
        assert (value > 0).all()


def test_not_finite_norms_count_as_clipped() -> None:
    norms = torch.tensor([0.5, 2.0, math.inf, math.nan])
    for policy, expected in ((Quantile("below"), 1.0), (Quantile("above"), 3.0)):
        state = policy.initial(1.0, 1)
        assert policy.count(norms, state, None) == expected
    groups = torch.zeros(4, dtype=torch.int64)
    assert Group(1).count(norms, Group(1).initial(1.0, 1), groups).tolist() == [[3.0], [1.0]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", COMBINATIONS, ids=label)
def test_nothing_waits_for_the_device(strategy) -> None:
    """On the meta device there are no values, so that any look at one raises."""
    per_layer = strategy.threshold.per_layer
    state = ClippingState(strategy, [1.0] * LAYERS if per_layer else 1.0, LAYERS)
    state.expected_batch_size, state.noise_multiplier = 4.0, 1.0
    layers = torch.arange(LAYERS, device="meta") if per_layer else None
    for _ in range(3):
        state.set_groups(torch.empty(4, dtype=torch.int64, device="meta"))
        scales, norms = state.clip(
            torch.empty(LAYERS, 4, device="meta"), layers, fresh=True, placeholder=False
        )
        assert (scales.device.type, norms.device.type) == ("meta", "meta")
        std = state.gradient_noise() * state.sensitivity()
        gradient = torch.empty(5, device="meta")
        ops.noise_finalize([gradient], [gradient], std, 4.0, SeededNoise())
        state.release(1)
        state.advance()
    assert state.next.threshold.device.type == "meta"
