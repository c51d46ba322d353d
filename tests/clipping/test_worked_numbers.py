"""Numbers that the papers work out, or that a few lines by hand give, through the whole engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fastclip import clipping
from fastclip.clipping import Clipping
from fastclip.errors import ArgumentError
from tests.oracle import make_private


class Line:
    """A model of one weight w, output w * x, under a strategy and without noise.

    With the output itself as the loss the gradient of sample i is x_i and its norm |x_i|.

    Args:
        size: of the data set and of its one batch, hence the public B.
    """

    def __init__(
        self, strategy: Clipping, size: int, w: float = 0.0, lr: float = 0.0, C: float = 1.0
    ):
        self.model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.model.weight, w)
        self.engine, self.private, self.optimizer, _ = make_private(
            self.model, clipping=strategy, batch_size=size, dataset_size=size, lr=lr,
            max_grad_norm=C,
        )  # fmt: skip

    @property
    def w(self) -> float:
        return self.model.weight.item()

    def step(self, x: Any, target: Any = None, groups: Any = None) -> float:
        """One step on all of x; returns the clipped sum. The loss is 1/2 (target - w x)^2, or w x."""
        x = torch.as_tensor(x, dtype=torch.float64)[:, None]
        self.optimizer.zero_grad()
        if groups is not None:
            self.engine.set_groups(torch.as_tensor(groups))
        output = self.private(x)[:, 0]
        loss = output if target is None else 0.5 * (torch.as_tensor(target) - output).square()
        loss.mean().backward()
        total = float(self.model.weight.summed_grad)
        self.optimizer.step()
        return total


@pytest.mark.parametrize("strategy", [clipping.fixed_soft(), clipping.soft_ada_clip()])
@pytest.mark.parametrize(("norm", "printed"), [(1.1, 0.72), (1.2, 0.68)])
def test_soft_ada_clip_scales(strategy: Clipping, norm: float, printed: float) -> None:
    """SoftAdaClip, section 3: at C = 1 norms 1.1 and 1.2 keep their order, unlike hard clipping."""
    scale = Line(strategy, size=1).step([norm]) / norm
    assert round(scale, 2) == printed
    assert scale == pytest.approx(math.tanh(1 / (norm + 1e-6)), rel=1e-9)


def test_hard_clipping_of_the_same_norms() -> None:
    """... which maps both to norm 1."""
    sums = [Line(clipping.dp_sgd(), size=1).step([norm]) for norm in (1.1, 1.2)]
    assert sums == pytest.approx([1.0, 1.0], rel=1e-9)


@pytest.mark.parametrize("thresholds", ["same_step", "previous_step"])
def test_dpsgd_f_equal_groups(thresholds: str) -> None:
    """Groups that are clipped alike all get C_k = 2 C_0: Algorithm 2, line 14 with equal ratios."""
    line = Line(clipping.dpsgd_f(3, thresholds=thresholds), size=12, C=0.8)
    x, groups = [0.5, 0.7, 1.0, 2.0] * 3, [k for k in range(3) for _ in range(4)]
    for _ in range(3):
        total = line.step(x, groups=groups)
        assert line.optimizer.threshold.tolist() == pytest.approx([1.6] * 3, rel=1e-12)
        assert line.optimizer.noisy_counts.tolist() == [[2, 2, 2], [2, 2, 2]]
        assert total == pytest.approx(3 * (0.5 + 0.7 + 1.0 + 1.6), rel=1e-9)


@pytest.mark.parametrize(
    ("max_ratio", "expected"), [(10.0, [4.0, 1.0, 1.0]), (2.0, [3.0, 1.0, 1.0])]
)
def test_dpsgd_f_unequal_groups(max_ratio: float, expected: list[float]) -> None:
    """3 of 4 beyond C_0 = 1, 0 of 2, and nobody, at B = 12: ratios (3 / 4) / (3 / 12) = 3, 0, 0."""
    line = Line(clipping.dpsgd_f(3, max_ratio=max_ratio), size=12)
    total = line.step([2.0, 3.5, 5.0, 0.5, 0.4, 1.0], groups=[0, 0, 0, 0, 1, 1])
    assert line.optimizer.noisy_counts.tolist() == [[3, 0, 0], [1, 2, 0]]
    assert line.optimizer.threshold.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(line.optimizer.sensitivity) == pytest.approx(expected[0], rel=1e-12)
    largest = expected[0]
    clipped = 2.0 + min(3.5, largest) + largest + 0.5 + 0.4 + 1.0
    assert total == pytest.approx(clipped, rel=1e-9)


@pytest.mark.parametrize(
    ("max_weight", "expected"), [(10.0, [1.0, 2.0, 4.0]), (1.5, [1.0, 1.5, 1.5])]
)
def test_naive_reweighting(max_weight: float, expected: list[float]) -> None:
    """Groups of 4, 2 and 0 at B = 12, K = 3: weights 4 / 4, 4 / 2 and 4 / 1 (a size is at least 1)."""
    line = Line(clipping.naive_reweighting(3, max_weight=max_weight), size=12, C=0.5)
    total = line.step([2.0, 0.1, 0.2, 0.3, 0.4, 1.0], groups=[0, 0, 0, 0, 1, 1])
    assert line.optimizer.noisy_counts.tolist() == [4, 2, 0]
    assert float(line.optimizer.sensitivity) == pytest.approx(0.5 * expected[2], rel=1e-12)
    clipped = 0.5 + 0.1 + 0.2 + 0.3 + expected[1] * (0.4 + 0.5)
    assert total == pytest.approx(clipped, rel=1e-9)


@pytest.mark.parametrize("strategy", [clipping.dpsgd_f(2), clipping.naive_reweighting(2)])
def test_largest_ratio_and_weight_by_default(strategy: Clipping) -> None:
    """B = 48, groups of 1 (clipped) and 3 (not): ratio 48 and weight 24 both become 10."""
    line = Line(strategy, size=48)
    line.step([2.0, 0.1, 0.2, 0.3], groups=[0, 1, 1, 1])
    largest = 11 if strategy == clipping.dpsgd_f(2) else 10
    assert float(line.optimizer.sensitivity) == pytest.approx(largest, rel=1e-12)


# The toy of the bounded adaptive clipping paper, section 3.2: mean of 60% zeros and 40% ones.

TOY = [0.0] * 6 + [1.0] * 4


def toy_mean(strategy: Clipping, start: float) -> float:
    """Estimate after 600 full-batch steps, C_0 = 1, gamma = 0.5."""
    line = Line(strategy, size=len(TOY), w=start, lr=0.02)
    for _ in range(600):
        line.step([1.0] * len(TOY), TOY)
    return line.w


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", [0.3, 1.5])
def test_toy_unbounded_ends_at_the_majority(start: float) -> None:
    assert abs(toy_mean(clipping.unbounded_adaptive(tau=1.0), start)) < 0.05


@pytest.mark.one_in(6)
@pytest.mark.parametrize("start", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(("lower", "mean"), [(0.6, 0.4), (0.5, 1 / 3)])
def test_toy_bounded(lower: float, mean: float, start: float) -> None:
    """From 0.6 on nothing is clipped at the true mean; at 0.5, 6 mu = 4 * 0.5."""
    found = toy_mean(clipping.bounded_adaptive(lower=lower, tau=1.0), start)
    assert found == pytest.approx(mean, abs=0.05 if lower == 0.6 else 0.02)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "low", "high"),
    [
        (clipping.adaptive(0.7, 0.1), 7, 8),
        (clipping.adaptive(0.2, 0.1), 2, 3),
        (clipping.soft_ada_clip(0.7, 0.1), 7, 8),
        (clipping.unbounded_adaptive(0.5, threshold_lr=0.1), 5 / 2.5, 6 / 2.5),
        (clipping.unbounded_adaptive(0.3, tau=1.0, threshold_lr=0.1), 7, 8),
        (clipping.bounded_adaptive(3.5, 0.5, threshold_lr=0.1), 3.5, 3.5),
        (clipping.global_adapt(1.0, 0.3, threshold_lr=0.1), 7, 8),
        (clipping.global_adapt(20.0, 0.3, tau=2.0, threshold_lr=0.1), 3.5, 4),
    ],
)
def test_threshold_finds_the_quantile(strategy: Clipping, low: float, high: float) -> None:
    """Norms 1 to 10 over and over, no noise: the threshold settles where the target is met."""
    line = Line(strategy, size=10)
    for _ in range(300):
        line.step(range(1, 11))
    assert 0.98 * low <= float(line.optimizer.threshold) <= 1.02 * high


def test_sad_dpsgd_stages() -> None:
    """T_1 + T_1 / 0.9 + T_1 / 0.81 = 271 for T_1 = 81; sigma grows by 1 / 0.8 a stage."""
    runs = clipping.sad_dpsgd(total_steps=271).noise.runs(271)
    assert [steps for _, steps in runs] == [81, 90, 100]
    assert [factor for factor, _ in runs] == pytest.approx([1, 1.25, 1.5625])


def test_sad_dpsgd_stages_shorter_than_a_step() -> None:
    """T_1 = 0.45 steps: refused, since noise and threshold would start in different stages."""
    with pytest.raises(ArgumentError, match="without any step"):
        clipping.sad_dpsgd(80, stages=5, length_decay=0.3)


def test_sad_dpsgd_stages_of_few_steps() -> None:
    """sigma / sigma_1 follows `runs`, and C falls in the same stages."""
    strategy = clipping.sad_dpsgd(80, stages=3, length_decay=0.3)
    planned = [factor for factor, steps in strategy.noise.runs(80) for _ in range(steps)]
    line = Line(strategy, size=4)
    line.optimizer.noise_multiplier = 1.0
    found, thresholds = [], []
    for _ in range(80):
        found.append(line.optimizer.noise_multiplier)
        line.step([1.0])
        thresholds.append(float(line.optimizer.threshold))
    assert found == pytest.approx(planned)
    assert found[0] == 1.0
    assert thresholds == pytest.approx([1 / factor for factor in planned])
