"""Presets for the methods of the papers, each a scale function, a threshold policy and a schedule.

`max_grad_norm` of make_private is C_0 of every preset. Build another combination directly, such as
`Clipping(Tanh(), Quantile("above", lower=0.5, num_groups=2), StagedNoise(total_steps=1000))`.
"""

from __future__ import annotations

from fastclip.clipping.groups import Group, Reweighted
from fastclip.clipping.scales import Automatic, GlobalAdapt, Hard, Tanh
from fastclip.clipping.schedules import LinearNoise, StagedNoise, StepNoise
from fastclip.clipping.strategy import Clipping
from fastclip.clipping.thresholds import Constant, PerLayer, Quantile, StagedThreshold


def dp_sgd() -> Clipping:
    """Hard clipping of the whole gradient at a constant C (Abadi et al. 2016), Opacus' "flat"."""
    return Clipping(Hard(), Constant())


def normalized_dp_sgd() -> Clipping:
    """DP-SGD with gradients divided by C, with scale min(1 / C, 1 / n) (De et al. 2022)."""
    return Clipping(Hard(normalized=True), Constant())


def per_layer() -> Clipping:
    """Hard clipping of each parameter tensor at its own constant, Opacus' "per_layer"."""
    return Clipping(Hard(), PerLayer())


def automatic(gamma: float = 0.01) -> Clipping:
    """Scale C / (n + gamma) (AUTO-S). With gamma = 0 every gradient has length C (AUTO-V).

    Source: Automatic Clipping (Bu et al. 2022, at NeurIPS 2023).

    Args:
        gamma: more than 5e-13, or 0. With 0 a gradient g contributes C g / |g|, whatever factor it
            has, and a gradient of 0 contributes 0. `Automatic` gives the rounding.

    Raises:
        ArgumentError: for any other gamma.
    """
    return Clipping(Automatic(gamma), Constant())


def fixed_soft(eps: float = 1e-6) -> Clipping:
    """tanh(C / (n + eps)) at a constant C, SoftAdaClip's ablation Fixed Soft Clipping."""
    return Clipping(Tanh(eps), Constant())


def adaptive(
    target_quantile: float = 0.5, threshold_lr: float = 0.2, count_noise_ratio: float = 10.0,
    lower: float | None = None, upper: float | None = None,
) -> Clipping:  # fmt: skip
    """C follows a quantile of the norms (Andrew et al. 2021), Opacus' "adaptive".

    Args:
        target_quantile: the fraction of samples to leave unclipped.
        threshold_lr: learning rate eta of C.
        count_noise_ratio: sigma_count / sigma_grad.
        lower: lower bound of C.
        upper: upper bound of C.
    """
    policy = Quantile("below", target_quantile, threshold_lr, 1.0, lower, upper, count_noise_ratio)
    return Clipping(Hard(), policy)


def soft_ada_clip(
    target_quantile: float = 0.5, threshold_lr: float = 0.2, count_noise_ratio: float = 10.0,
    lower: float | None = None, upper: float | None = None, eps: float = 1e-6,
) -> Clipping:  # fmt: skip
    """`adaptive` with the tanh scale, SoftAdaClip (Soleymani et al.), Algorithm 2."""
    policy = Quantile("below", target_quantile, threshold_lr, 1.0, lower, upper, count_noise_ratio)
    return Clipping(Tanh(eps), policy)


def unbounded_adaptive(
    target_quantile: float = 0.5, tau: float = 2.5, threshold_lr: float = 0.2,
    count_noise_ratio: float = 10.0, normalized: bool = True,
) -> Clipping:  # fmt: skip
    """Counts beyond tau * C move C (Zhao et al. 2025, Algorithm 2 with C_LB = 0).

    Args:
        target_quantile: the fraction of samples beyond tau * C.
        normalized: gradients are divided by C, as in the paper. The other arguments are those of
            `adaptive`.
    """
    policy = Quantile(
        "above", target_quantile, threshold_lr, tau, count_noise_ratio=count_noise_ratio
    )
    return Clipping(Hard(normalized), policy)


def bounded_adaptive(
    lower: float, target_quantile: float = 0.5, tau: float = 2.5, threshold_lr: float = 0.2,
    count_noise_ratio: float = 10.0, upper: float | None = None, normalized: bool = True,
) -> Clipping:  # fmt: skip
    """`unbounded_adaptive` with a lower bound of C (Zhao et al. 2025, Algorithm 2).

    The first step is clipped at C_0 = max_grad_norm, as in the paper, even if C_0 is below `lower`.

    Args:
        lower: C_LB, which keeps the gradients of hard and rare samples from vanishing.
    """
    policy = Quantile("above", target_quantile, threshold_lr, tau, lower, upper, count_noise_ratio)
    return Clipping(Hard(normalized), policy)


def global_adapt(
    z: float, target_quantile: float = 0.5, tau: float = 1.0, threshold_lr: float = 1.0,
    count_noise_ratio: float = 10.0,
) -> Clipping:  # fmt: skip
    """Scales by C / Z and clips beyond Z. Z follows the counts, C stays (Esipova et al. 2023).

    Args:
        z: the first Z.
        target_quantile: the fraction of samples beyond tau * Z.
    """
    policy = Quantile(
        "above", target_quantile, threshold_lr, tau, count_noise_ratio=count_noise_ratio
    )
    return Clipping(GlobalAdapt(z), policy)


def dpsgd_f(
    num_groups: int, count_noise_ratio: float = 10.0, max_ratio: float = 10.0,
    thresholds: str = "same_step",
) -> Clipping:  # fmt: skip
    """One threshold per group, larger if more is clipped (DPSGD-F, Xu et al. 2020, Algorithm 2).

    The arguments are those of `Group`. Call `engine.set_groups(ids)` before each backward pass.
    """
    return Clipping(Hard(), Group(num_groups, count_noise_ratio, thresholds, max_ratio))


def naive_reweighting(
    num_groups: int, count_noise_ratio: float = 10.0, max_weight: float = 10.0,
    thresholds: str = "same_step",
) -> Clipping:  # fmt: skip
    """Weights samples inversely to the noisy size of their group (Xu et al. 2020, Algorithm 3).

    The arguments are those of `Reweighted`. Call `engine.set_groups(ids)` before each backward pass.
    """
    return Clipping(Hard(), Reweighted(num_groups, count_noise_ratio, thresholds, max_weight))


def sad_dpsgd(
    total_steps: int, stages: int = 3, noise_decay: float = 0.8, threshold_decay: float = 0.8,
    length_decay: float = 0.9,
) -> Clipping:  # fmt: skip
    """Little noise and a high threshold early, more noise and a lower one later (SAD-DPSGD).

    Args:
        total_steps: planned real steps.
        stages: number of stages.
        noise_decay: sigma_j = sigma_1 / noise_decay^(j-1), where noise_multiplier is sigma_1.
        threshold_decay: C_j = C_1 * threshold_decay^(j-1).
        length_decay: stages grow as T_{j+1} = T_j / length_decay.
    """
    return Clipping(
        Hard(),
        StagedThreshold(total_steps, stages, threshold_decay, length_decay),
        StagedNoise(total_steps, stages, noise_decay, length_decay),
    )


def auto_s(
    total_steps: int, stages: int = 10, noise_decay: float = 0.9, target_quantile: float = 0.5,
    threshold_lr: float = 0.2, count_noise_ratio: float = 10.0, lower: float | None = None,
    upper: float | None = None,
) -> Clipping:  # fmt: skip
    """Noise that decays in equal stages, with the private quantile threshold.

    Auto-DPSGD estimates C from raw gradient norms, which is not private. Here the noisy counts of
    `adaptive` replace that estimate.
    """
    policy = adaptive(target_quantile, threshold_lr, count_noise_ratio, lower, upper).threshold
    return Clipping(Hard(), policy, StepNoise(total_steps, stages, noise_decay))


def auto_l(
    total_steps: int, stages: int = 10, final_noise: float = 0.5, target_quantile: float = 0.5,
    threshold_lr: float = 0.2, count_noise_ratio: float = 10.0, lower: float | None = None,
    upper: float | None = None,
) -> Clipping:  # fmt: skip
    """`auto_s` with noise that decays linearly to final_noise * sigma_1 in the last stage."""
    policy = adaptive(target_quantile, threshold_lr, count_noise_ratio, lower, upper).threshold
    return Clipping(Hard(), policy, LinearNoise(total_steps, stages, final_noise))
