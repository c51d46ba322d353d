"""The noise has the standard deviation that the formulas say, and is none where sigma is 0.

Each sample of noise is tested by sum z^2 / std^2 ~ chi-square, two-sided at level 1e-4, and its
mean by z at the same level; the seed is fixed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fastclip import clipping
from fastclip.clipping import Clipping, Group, Hard, Quantile, Reweighted, StepNoise
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.clipping.cases import CASES, K
from tests.clipping.reference_run import shares
from tests.oracle import make_private

LEVEL = 1e-4
C, SIGMA, B = 0.7, 1.3, 3
WIDTH = 100  # a weight of 10,000 entries


class Idle:
    """A model that only ever sees empty batches, so that every release is noise alone."""

    def __init__(
        self, strategy: Clipping, sigma: float = SIGMA, width: int = WIDTH, C: float = C, seed: int = 7
    ) -> None:  # fmt: skip
        self.model = nn.Linear(width, width, bias=False)
        self.engine, self.private, self.optimizer, _ = make_private(
            self.model, clipping=strategy, max_grad_norm=C, noise_multiplier=sigma, lr=0.0,
            batch_size=4, dataset_size=17, noise_generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        self.rows = torch.zeros(0, width)

    def step(self) -> Tensor:
        """The gradient that is released."""
        self.optimizer.zero_grad()
        self.engine.set_groups(torch.zeros(0, dtype=torch.int64))
        self.private(self.rows).sum().backward()
        self.optimizer.step()
        return self.model.weight.grad.clone()


def assert_normal(noise: Tensor, std: float) -> None:
    """At least 10,000 draws from N(0, std^2)."""
    z = noise.double().flatten() / std
    assert len(z) >= 10_000
    tail = stats.chi2.cdf(float(z.square().sum()), len(z))
    assert LEVEL / 2 < tail < 1 - LEVEL / 2
    assert abs(float(z.mean())) * math.sqrt(len(z)) < stats.norm.ppf(1 - LEVEL / 2)


def f_ratio(counts: Tensor) -> float:
    """The largest C_k / C_0 of DPSGD-F from its noisy counts, at most 11."""
    m, o = (row.clamp(min=0).tolist() for row in counts)
    rate = max(sum(m), 1.0) / B
    return 1 + min(max(a / max(a + b, 1.0) for a, b in zip(m, o, strict=True)) / rate, 10.0)


PINNED = {"lower": C, "upper": C}  # the threshold stays, so that S is known
GRADIENT_NOISE = {
    # name: (strategy, S, whether it counts, sigma_t / sigma by step)
    "dp_sgd": (clipping.dp_sgd(), C, False, [1]),
    "normalized": (clipping.normalized_dp_sgd(), 1, False, [1]),
    "adaptive": (clipping.adaptive(**PINNED), C, True, [1, 1]),
    "bounded_adaptive": (clipping.bounded_adaptive(0.2), 1, True, [1, 1]),
    "auto_s": (clipping.auto_s(3, 3, 0.6, **PINNED), C, True, [1, 0.6, 0.36, 0.36]),
    "auto_l": (clipping.auto_l(3, 3, 0.4, **PINNED), C, True, [1, 0.7, 0.4, 0.4]),
}


@pytest.mark.parametrize("name", GRADIENT_NOISE)
def test_gradient_noise(name: str) -> None:
    """std = sigma_grad S / B, with sigma_grad > sigma where counts take their share."""
    strategy, sensitivity, counts, factors = GRADIENT_NOISE[name]
    idle = Idle(strategy)
    for factor in factors:
        sigma_grad = shares(factor * SIGMA, 10.0)[0] if counts else factor * SIGMA
        assert_normal(idle.step(), sigma_grad * sensitivity / B)


def test_gradient_noise_of_sad_dpsgd() -> None:
    """Stages of 1, 2 and 4 steps: sigma grows by 1 / 0.6 and S = C falls by 0.5."""
    idle = Idle(clipping.sad_dpsgd(7, 3, 0.6, 0.5, 0.5))
    for stage in (0, 1, 1, 2, 2, 2, 2):
        assert_normal(idle.step(), SIGMA / 0.6**stage * C * 0.5**stage / B)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("thresholds", ["same_step", "previous_step"])
@pytest.mark.parametrize("ratio", [10.0, 1.5])
def test_gradient_noise_of_dpsgd_f(thresholds: str, ratio: float) -> None:
    """S is the largest threshold of the counts in use: of this step's, or of the step before."""
    idle = Idle(clipping.dpsgd_f(K, ratio, thresholds=thresholds))
    factor = 2.0
    for _ in range(4):
        noise = idle.step()
        if thresholds == "same_step":
            factor = f_ratio(idle.optimizer.noisy_counts)
        assert_normal(noise, shares(SIGMA, ratio)[0] * C * factor / B)
        factor = f_ratio(idle.optimizer.noisy_counts)


def test_gradient_noise_per_layer() -> None:
    idle = Idle(clipping.per_layer(), C=[C])
    assert_normal(idle.step(), SIGMA * C / B)


@pytest.mark.slow
def test_count_noise_of_adaptive() -> None:
    """One count a step: sigma_count = r sigma_grad, a quarter of the draws each for four r."""
    draws = []
    for seed, ratio in enumerate((10.0, 3.0, 1.0, 0.5), 11):  # none is that of the global generator
        idle = Idle(clipping.adaptive(count_noise_ratio=ratio, **PINNED), width=1, seed=seed)
        for _ in range(2500):
            idle.step()
            draws.append(idle.optimizer.noisy_counts / shares(SIGMA, ratio)[1])
    assert_normal(torch.stack(draws), 1.0)


def many_groups(stages: int) -> list[Clipping]:
    """Policies of so many groups that one step draws 10,000 counts."""
    noise = StepNoise(stages, stages, 0.6)
    policies = (
        Group(5000, thresholds="same_step"),
        Group(5000, thresholds="previous_step"),
        Reweighted(10_000, thresholds="same_step"),
        Reweighted(10_000, thresholds="previous_step"),
        Quantile("above", num_groups=5000),
    )
    return [Clipping(Hard(), policy, noise) for policy in policies]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("strategy", many_groups(stages=3), ids=str)
def test_count_noise_of_groups_in_stages(strategy: Clipping) -> None:
    """sigma_count falls with the stages, like the noise of the gradients."""
    idle = Idle(strategy, width=1)
    for stage in range(3):
        idle.step()
        assert_normal(idle.optimizer.noisy_counts, shares(SIGMA * 0.6**stage, 10.0)[1])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_no_noise_at_sigma_0(name: str) -> None:
    """Neither gradients nor counts: an empty batch releases exact zeros, three steps on."""
    strategy, threshold = CASES[name].strategy, CASES[name].C
    idle = Idle(strategy, sigma=0.0, width=3, C=threshold[:1] if name == "per_layer" else threshold)
    for _ in range(3):
        assert torch.equal(idle.step(), torch.zeros(3, 3))
        counts = idle.optimizer.noisy_counts
        assert counts is None or torch.equal(counts, torch.zeros_like(counts))
        levels = idle.optimizer.noise_levels
        assert (levels.total, levels.gradients, levels.counts or 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_thresholds_of_layers_in_an_array(kind: Any) -> None:
    strategy, numbers = clipping.per_layer(), [0.5, 0.25]
    state = strategy.initial(kind(numbers), 2)
    assert state.threshold.tolist() == numbers
    assert strategy.rescaled(state, kind([1.0, 0.125])).threshold.tolist() == [1.0, 0.125]
    assert strategy.rescaled(state, kind([0.5, 0.5])).threshold.tolist() == [0.5, 0.5]
    with pytest.raises(ArgumentError, match="expects 3 thresholds in max_grad_norm"):
        strategy.initial(kind(numbers), 3)


def test_an_array_of_another_form_is_no_list() -> None:
    for value in (np.float64(0.5), np.ones((2, 1)), torch.tensor(0.5), 0.5):
        with pytest.raises(ArgumentTypeError, match="as a list of 2 numbers"):
            clipping.per_layer().initial(value, 2)
