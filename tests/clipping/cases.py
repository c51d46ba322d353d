"""Every preset, and combinations, beside the loop that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastclip import clipping
from fastclip.clipping import (
    Automatic,
    Clipping,
    Constant,
    ExponentialNoise,
    Global,
    Group,
    Hard,
    Quantile,
    Reweighted,
    StagedNoise,
    Tanh,
    TimeNoise,
)
from tests.clipping import combination_loops as combined
from tests.clipping import paper_loops as paper
from tests.clipping.reference_run import Run

K = 3
LAYERS = [0.4, 0.1, 0.5, 0.3]


@dataclass(frozen=True)
class Case:
    """A strategy and the loop that it is compared with.

    Attributes:
        C: make_private's max_grad_norm. sigma: its noise_multiplier, the total one.
        level: sigma(t) / sigma of the loop, constant by default.
    """

    strategy: Clipping | str
    loop: Callable[..., paper.Steps]
    C: Any = 0.7
    sigma: float = 0.3
    level: Callable[[int], float] = lambda t: 1.0

    def steps(self, run: Run) -> paper.Steps:
        """What the loop computes on `run`."""
        return self.loop(run, lambda t: self.sigma * self.level(t), self.C)


def staged(level: Callable[[int], float], n: int, gamma: float = 1.0) -> Callable[[int], float]:
    """`level` of stage j = 1..n, by step, in a run of 21 planned steps."""
    return paper.sigma_in_stages(1.0, level, T=21, n=n, gamma=gamma)


CASES = {
    "dp_sgd": Case(clipping.dp_sgd(), paper.dp_sgd),
    "flat": Case("flat", paper.dp_sgd),  # Opacus' names
    "normalized_dp_sgd": Case(clipping.normalized_dp_sgd(), paper.normalized_dp_sgd),
    "per_layer": Case(clipping.per_layer(), paper.per_layer, C=LAYERS),
    "automatic": Case(clipping.automatic(), paper.automatic),
    "automatic_gamma": Case(clipping.automatic(0.3), partial(paper.automatic, gamma=0.3)),
    "automatic_v": Case(clipping.automatic(0.0), partial(paper.automatic, gamma=0.0)),
    "fixed_soft": Case(clipping.fixed_soft(), paper.fixed_soft),
    "fixed_soft_eps": Case(clipping.fixed_soft(0.2), partial(paper.fixed_soft, eps=0.2)),
    "adaptive": Case(clipping.adaptive(), paper.adaptive),
    "adaptive_options": Case(
        clipping.adaptive(0.7, 0.6, 3.0, lower=0.5, upper=0.9),
        partial(paper.adaptive, gamma=0.7, eta=0.6, r=3.0, lower=0.5, upper=0.9),
    ),
    "soft_ada_clip": Case(clipping.soft_ada_clip(), partial(paper.adaptive, soft=True)),
    "soft_ada_clip_options": Case(
        clipping.soft_ada_clip(0.3, 0.5, 4.0, lower=0.3, upper=0.8, eps=0.1),
        partial(
            paper.adaptive, soft=True, gamma=0.3, eta=0.5, r=4.0, lower=0.3, upper=0.8, eps=0.1
        ),
    ),
    "unbounded_adaptive": Case(clipping.unbounded_adaptive(), paper.bounded_adaptive, C=0.4),
    "unbounded_adaptive_options": Case(
        clipping.unbounded_adaptive(0.4, 1.3, 0.5, 4.0, normalized=False),
        partial(paper.bounded_adaptive, gamma=0.4, tau=1.3, eta=0.5, r=4.0, normalized=False),
    ),
    "bounded_adaptive": Case(
        clipping.bounded_adaptive(0.35), partial(paper.bounded_adaptive, C_LB=0.35), C=0.4
    ),
    "bounded_adaptive_options": Case(
        clipping.bounded_adaptive(0.5, 0.6, 1.2, 0.7, 5.0, upper=0.8, normalized=False),
        partial(
            paper.bounded_adaptive,
            C_LB=0.5,
            gamma=0.6,
            tau=1.2,
            eta=0.7,
            r=5.0,
            upper=0.8,
            normalized=False,
        ),
    ),
    "global_adapt": Case(clipping.global_adapt(1.1), partial(paper.global_adapt, Z=1.1), sigma=0.1),
    "global_adapt_options": Case(
        clipping.global_adapt(0.9, 0.4, 1.5, 0.6, 2.0),
        partial(paper.global_adapt, Z=0.9, gamma=0.4, tau=1.5, eta=0.6, r=2.0),
    ),
    "dpsgd_f": Case(clipping.dpsgd_f(K), partial(paper.dpsgd_f, K=K), sigma=0.05),
    "dpsgd_f_previous_step": Case(
        clipping.dpsgd_f(K, thresholds="previous_step"),
        partial(paper.dpsgd_f, K=K, same_step=False),
        sigma=0.05,
    ),
    "dpsgd_f_options": Case(
        clipping.dpsgd_f(K, 4.0, 1.4),
        partial(paper.dpsgd_f, K=K, r=4.0, max_ratio=1.4),
    ),
    "naive_reweighting": Case(
        clipping.naive_reweighting(K), partial(paper.naive_reweighting, K=K), sigma=0.05
    ),
    "naive_reweighting_previous_step": Case(
        clipping.naive_reweighting(K, thresholds="previous_step"),
        partial(paper.naive_reweighting, K=K, same_step=False),
        sigma=0.05,
    ),
    "naive_reweighting_options": Case(
        clipping.naive_reweighting(K, 4.0, 0.6),
        partial(paper.naive_reweighting, K=K, r=4.0, max_weight=0.6),
    ),
    "sad_dpsgd": Case(
        clipping.sad_dpsgd(24),
        partial(paper.sad_dpsgd, T=24, n=3, beta=0.8, beta_C=0.8, gamma=0.9),
    ),
    "sad_dpsgd_options": Case(  # stages of 3, 6 and 12 steps; the run goes on beyond them
        clipping.sad_dpsgd(21, 3, 0.6, 0.7, 0.5),
        partial(paper.sad_dpsgd, T=21, n=3, beta=0.6, beta_C=0.7, gamma=0.5),
    ),
    "auto_s": Case(
        clipping.auto_s(21, stages=7), paper.adaptive, level=staged(lambda j: 0.9 ** (j - 1), 7)
    ),
    "auto_l": Case(
        clipping.auto_l(21, stages=7, final_noise=0.4, lower=0.6, upper=0.8),
        partial(paper.adaptive, lower=0.6, upper=0.8),
        level=staged(lambda j: 1 - 0.6 * (j - 1) / 6, 7),
    ),
    "tanh_quantile_of_groups_staged": Case(
        Clipping(Tanh(), Quantile("above", tau=1.5, lower=0.6, num_groups=K), StagedNoise(21)),
        partial(combined.soft_quantile_of_groups, K=K, C_LB=0.6, tau=1.5),
        sigma=0.05,
        level=staged(lambda j: 0.8 ** -(j - 1), 3, gamma=0.9),
    ),
    "global_constant": Case(
        Clipping(Global(1.2), Constant()), partial(combined.global_clipping, Z=1.2)
    ),
    "centred_quantile": Case(
        Clipping(Hard(), Quantile(centred=True)), partial(paper.adaptive, centred=True)
    ),
    "automatic_group": Case(
        Clipping(Automatic(), Group(K)), partial(paper.dpsgd_f, K=K, auto_gamma=0.01), sigma=0.05
    ),
    "tanh_reweighted": Case(
        Clipping(Tanh(), Reweighted(K, thresholds="previous_step")),
        partial(paper.naive_reweighting, K=K, same_step=False, soft_eps=1e-6),
        sigma=0.05,
    ),
    "exponential_noise": Case(
        Clipping(Hard(), Constant(), ExponentialNoise(21, 3, rate=0.2)),
        paper.dp_sgd,
        level=staged(lambda j: math.exp(-0.2 * (j - 1)), 3),
    ),
    "time_noise": Case(
        Clipping(Hard(), Quantile(), TimeNoise(21, 7, rate=0.3)),
        paper.adaptive,
        level=staged(lambda j: 1 / (1 + 0.3 * (j - 1)), 7),
    ),
}
