"""The papers' algorithms as plain loops; comments give the line of the algorithm.

Every loop takes the run, sigma(t) (the total noise multiplier of step t = 0, 1, ...) and the first
threshold C, and yields its steps. Two readings differ from the papers' text on purpose: the
denominator is always the public B (some write |B|, the size of the batch drawn), and noisy counts
are clamped before they are divided by, which the papers leave open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tests.clipping.reference_run import Run, Step, at_most, norm, shares

Sigma = Callable[[int], float]
Steps = Iterator[Step]


def dp_sgd(run: Run, sigma: Sigma, C: float) -> Steps:
    """SoftAdaClip, Algorithm 1 (Abadi et al. 2016)."""
    for t, batch in enumerate(run.batches):  # lines 1-2
        g = run.gradients(batch)  # lines 3-4
        s = [min(1.0, C / norm(g_i)) for g_i in g]  # line 5
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma(t) * C)  # lines 7-8
        yield Step(g, s, *released, threshold=C, sensitivity=C, sigma_grad=sigma(t))


def normalized_dp_sgd(run: Run, sigma: Sigma, C: float) -> Steps:
    """Bounded adaptive clipping, Algorithm 1 (De et al. 2022); lines counted after "Input"."""
    for t, batch in enumerate(run.batches):  # lines 1-2
        g = run.gradients(batch)  # lines 3-4
        s = [min(1 / C, 1 / norm(g_i)) for g_i in g]  # line 5
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma(t))  # lines 7-8: the noise has no C
        yield Step(g, s, *released, threshold=C, sensitivity=1.0, sigma_grad=sigma(t))


def per_layer(run: Run, sigma: Sigma, C: Sequence[float]) -> Steps:
    """Opacus' "per_layer": each parameter tensor by its own norm, noise by S = sqrt(sum C_l^2)."""
    S = math.sqrt(sum(C_l**2 for C_l in C))
    for t, batch in enumerate(run.batches):
        g = run.gradients(batch)
        parts = [run.layers(g_i) for g_i in g]
        s = [[min(1.0, C_l / norm(p)) for C_l, p in zip(C, row, strict=True)] for row in parts]
        g_bar = [
            torch.cat([s_il * p for s_il, p in zip(s_i, row, strict=True)])
            for s_i, row in zip(s, parts, strict=True)
        ]
        released = run.descend(g_bar, sigma(t) * S)
        yield Step(g, s, *released, threshold=C, sensitivity=S, sigma_grad=sigma(t))


def automatic(run: Run, sigma: Sigma, C: float, gamma: float = 0.01) -> Steps:
    """AUTO-S (Bu et al. 2023): C / (n + gamma)."""
    for t, batch in enumerate(run.batches):
        g = run.gradients(batch)
        s = [C / (norm(g_i) + gamma) for g_i in g]
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma(t) * C)
        yield Step(g, s, *released, threshold=C, sensitivity=C, sigma_grad=sigma(t))


def fixed_soft(run: Run, sigma: Sigma, C: float, eps: float = 1e-6) -> Steps:
    """SoftAdaClip, Algorithm 3: Fixed Soft Clipping."""
    for t, batch in enumerate(run.batches):  # lines 1-2
        g = run.gradients(batch)  # lines 3-4
        alpha = [math.tanh(C / (norm(g_i) + eps)) for g_i in g]  # line 6
        g_bar = [a_i * g_i for a_i, g_i in zip(alpha, g, strict=True)]  # line 7
        released = run.descend(g_bar, sigma(t) * C)  # lines 9-10
        yield Step(g, alpha, *released, threshold=C, sensitivity=C, sigma_grad=sigma(t))


def adaptive(
    run: Run, sigma: Sigma, C: float, *, soft: bool = False, gamma: float = 0.5, eta: float = 0.2,
    r: float = 10.0, lower: float = 0.0, upper: float = math.inf, eps: float = 1e-6,
    centred: bool = False,
) -> Steps:  # fmt: skip
    """SoftAdaClip, Algorithm 2: with line 6 Andrew et al. 2021, with lines 8-9 SoftAdaClip.

    `centred` counts b_i - 1/2 as Andrew et al. do (section 2.2): sensitivity and noise are halved,
    and the fraction is 1/2 more than the noisy count's.
    """
    unit, middle = (0.5, 0.5) if centred else (1.0, 0.0)
    for t, batch in enumerate(run.batches):  # lines 1-2
        sigma_grad, sigma_count = shares(sigma(t), r)
        g = run.gradients(batch)  # lines 3-4
        if soft:
            s = [math.tanh(C / (norm(g_i) + eps)) for g_i in g]  # line 8
        else:
            s = [min(1.0, C / norm(g_i)) for g_i in g]  # line 6
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]  # lines 6, 9
        b = [1.0 if at_most(norm(g_i), C) else 0.0 for g_i in g]  # line 10
        released = run.descend(g_bar, sigma_grad * C)  # lines 12-13
        count = sum(b_i - middle for b_i in b) + sigma_count * unit * run.count_normal()  # line 14
        yield Step(
            g, s, *released, threshold=C, sensitivity=C, sigma_grad=sigma_grad,
            sigma_count=sigma_count, counts=count,
        )  # fmt: skip
        b_tilde = float(count) / run.B + middle  # line 14
        C = C * math.exp(-eta * (b_tilde - gamma))  # line 15
        C = min(max(C, lower), upper)


def bounded_adaptive(
    run: Run, sigma: Sigma, C: float, *, C_LB: float = 0.0, gamma: float = 0.5, tau: float = 2.5,
    eta: float = 0.2, r: float = 10.0, normalized: bool = True, upper: float = math.inf,
) -> Steps:  # fmt: skip
    """Bounded adaptive clipping, Algorithm 2; unbounded with C_LB = 0 (its first "if").

    Lines are counted from "for t"; `normalized=False` multiplies line 5 and the noise by C_t.
    """
    for t, batch in enumerate(run.batches):  # lines 1-2
        sigma_grad, sigma_count = shares(sigma(t), r)
        unit = 1.0 if normalized else C
        g = run.gradients(batch)  # lines 3-4
        s = [unit * min(1 / C, 1 / norm(g_i)) for g_i in g]  # line 5
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma_grad * unit)  # lines 7-8
        b = sum(not at_most(norm(g_i), tau * C) for g_i in g)  # line 9
        count = b + sigma_count * run.count_normal()  # line 10
        yield Step(
            g, s, *released, threshold=C, sensitivity=unit, sigma_grad=sigma_grad,
            sigma_count=sigma_count, counts=count,
        )  # fmt: skip
        C = max(C_LB, C * math.exp(eta * (float(count) / run.B - gamma)))  # line 11
        C = min(C, upper)


def global_adapt(
    run: Run, sigma: Sigma, C: float, *, Z: float, gamma: float = 0.5, tau: float = 1.0,
    eta: float = 1.0, r: float = 10.0,
) -> Steps:  # fmt: skip
    """DPSGD-Global-Adapt (Esipova et al. 2023): scales C / Z, clipped to C beyond Z; Z moves."""
    for t, batch in enumerate(run.batches):
        sigma_grad, sigma_count = shares(sigma(t), r)
        g = run.gradients(batch)
        s = [C / Z if norm(g_i) <= Z else C / norm(g_i) for g_i in g]
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma_grad * C)
        b = sum(not at_most(norm(g_i), tau * Z) for g_i in g)
        count = b + sigma_count * run.count_normal()
        yield Step(
            g, s, *released, threshold=Z, sensitivity=C, sigma_grad=sigma_grad,
            sigma_count=sigma_count, counts=count,
        )  # fmt: skip
        Z = Z * math.exp(eta * (float(count) / run.B - gamma))


def group_thresholds(counts: Tensor, C_0: float, B: int, max_ratio: float) -> list[float]:
    """DPSGD-F, Algorithm 2, lines 11-15, clamped for what noise can do."""
    m_k, o_k = ([max(float(c), 0.0) for c in row] for row in counts)
    m = max(sum(m_k), 1.0)  # line 11; m / B >= 1 / B
    b_k = [max(m_of_k + o_of_k, 1.0) for m_of_k, o_of_k in zip(m_k, o_k, strict=True)]  # line 13
    ratios = [(m_of_k / b) / (m / B) for m_of_k, b in zip(m_k, b_k, strict=True)]
    return [C_0 * (1 + min(ratio, max_ratio)) for ratio in ratios]  # line 14


def dpsgd_f(
    run: Run, sigma: Sigma, C: float, *, K: int, r: float = 10.0, max_ratio: float = 10.0,
    same_step: bool = True, auto_gamma: float | None = None,
) -> Steps:  # fmt: skip
    """DPSGD-F, Algorithm 2; sigma_1 of the paper is sigma_count here, its sigma_2 sigma_grad.

    Not `same_step`: line 17 uses the counts of the step before; at first all ratios are 1.
    `auto_gamma` clips automatically, C_k / (n + gamma), in the place of line 17.
    """
    C_0, C_k = C, [2 * C] * K
    for t, batch in enumerate(run.batches):  # lines 1-2
        sigma_grad, sigma_count = shares(sigma(t), r)
        g = run.gradients(batch)  # lines 3-5
        groups = batch.groups.tolist()
        raw = torch.zeros(2, K, dtype=torch.float64)
        for g_i, k in zip(g, groups, strict=True):  # lines 6-9
            raw[1 if at_most(norm(g_i), C_0) else 0, k] += 1  # m_k first, then o_k
        if same_step:
            counts = raw + sigma_count * run.count_normal(2, K)  # line 10
            C_k = group_thresholds(counts, C_0, run.B, max_ratio)  # lines 11-15
        if auto_gamma is None:
            s = [min(1.0, C_k[k] / norm(g_i)) for g_i, k in zip(g, groups, strict=True)]  # line 17
        else:
            s = [C_k[k] / (norm(g_i) + auto_gamma) for g_i, k in zip(g, groups, strict=True)]
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        S = max(C_k)  # line 19
        released = run.descend(g_bar, sigma_grad * S)  # lines 20-21
        if not same_step:
            counts = raw + sigma_count * run.count_normal(2, K)  # line 10
        yield Step(
            g, s, *released, threshold=C_k, sensitivity=S, sigma_grad=sigma_grad,
            sigma_count=sigma_count, counts=counts,
        )  # fmt: skip
        if not same_step:
            C_k = group_thresholds(counts, C_0, run.B, max_ratio)


def group_weights(counts: Tensor, B: int, max_weight: float) -> list[float]:
    """DPSGD-F, Algorithm 3, lines 7-9: theta_k = (B / K) / b_k, clamped."""
    b_k = [max(float(b), 1.0) for b in counts]
    return [min((B / len(b_k)) / b, max_weight) for b in b_k]  # line 8


def naive_reweighting(
    run: Run, sigma: Sigma, C: float, *, K: int, r: float = 10.0, max_weight: float = 10.0,
    same_step: bool = True, soft_eps: float | None = None,
) -> Steps:  # fmt: skip
    """DPSGD-F, Algorithm 3: Naive.

    Not `same_step`: line 11 uses the weights of the step before; at first all are 1. `soft_eps`
    scales by tanh(C_0 / (n + eps)) in the place of line 11's min.
    """
    C_0, theta = C, [1.0] * K
    for t, batch in enumerate(run.batches):  # lines 1-2
        sigma_grad, sigma_count = shares(sigma(t), r)
        g = run.gradients(batch)  # lines 3-5
        groups = batch.groups.tolist()
        b = torch.tensor([groups.count(k) for k in range(K)], dtype=torch.float64)
        if same_step:
            counts = b + sigma_count * run.count_normal(K)  # line 6
            theta = group_weights(counts, run.B, max_weight)  # lines 7-9
        if soft_eps is None:
            clip = [min(1.0, C_0 / norm(g_i)) for g_i in g]  # line 11
        else:
            clip = [math.tanh(C_0 / (norm(g_i) + soft_eps)) for g_i in g]
        s = [theta[k] * c_i for c_i, k in zip(clip, groups, strict=True)]  # line 11
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        S = C_0 * max(theta)  # line 13
        released = run.descend(g_bar, sigma_grad * S)  # lines 14-15
        if not same_step:
            counts = b + sigma_count * run.count_normal(K)  # line 6
        yield Step(
            g, s, *released, threshold=C_0, sensitivity=S, sigma_grad=sigma_grad,
            sigma_count=sigma_count, counts=counts,
        )  # fmt: skip
        if not same_step:
            theta = group_weights(counts, run.B, max_weight)


def sad_dpsgd(
    run: Run, sigma: Sigma, C: float, *, T: int, n: int, beta: float, beta_C: float, gamma: float
) -> Steps:
    """SAD-DPSGD, sections IV-A and IV-B: in stage j (from 1) sigma_1 / beta^(j-1), C_1 beta_C^(j-1).

    Its stages grow: T_(j+1) = T_j / gamma, sum T_j = T.
    """
    C_1, stage = C, stages(T, n, gamma)
    for t, batch in enumerate(run.batches):
        sigma_j = sigma(t) / beta ** (stage(t) - 1)
        C_j = C_1 * beta_C ** (stage(t) - 1)
        g = run.gradients(batch)
        s = [min(1.0, C_j / norm(g_i)) for g_i in g]
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma_j * C_j)
        yield Step(g, s, *released, threshold=C_j, sensitivity=C_j, sigma_grad=sigma_j)


def stages(T: int, n: int, gamma: float = 1.0) -> Callable[[int], int]:
    """t -> j, from 1 to n: stages of lengths T_1, T_1 / gamma, ..., which sum to T (rounded)."""
    T_1 = T / sum(gamma**-j for j in range(n))
    ends = [round(sum(T_1 * gamma**-i for i in range(j + 1))) for j in range(n)]
    return lambda t: min(sum(t >= end for end in ends) + 1, n)


def sigma_in_stages(
    sigma_1: float, level: Callable[[int], float], T: int, n: int, gamma: float = 1.0
) -> Sigma:
    """sigma(t) = sigma_1 * level(j) in stage j = 1..n."""
    stage = stages(T, n, gamma)
    return lambda t: sigma_1 * level(stage(t))
