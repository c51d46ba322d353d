"""Combinations that no paper has, as plain loops, put together from the parts of the papers'."""

from __future__ import annotations

import math

import torch

from tests.clipping.paper_loops import Sigma, Steps
from tests.clipping.reference_run import Run, Step, at_most, norm, shares


def global_clipping(run: Run, sigma: Sigma, C: float, *, Z: float) -> Steps:
    """DPSGD-Global (Bu et al. 2021) at a constant Z: C / Z, and 0 for norms beyond Z."""
    for t, batch in enumerate(run.batches):
        g = run.gradients(batch)
        s = [C / Z if at_most(norm(g_i), Z) else 0.0 for g_i in g]
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        released = run.descend(g_bar, sigma(t) * C)
        yield Step(g, s, *released, threshold=Z, sensitivity=C, sigma_grad=sigma(t))


def soft_quantile_of_groups(
    run: Run, sigma: Sigma, C: float, *, K: int, C_LB: float, tau: float, gamma: float = 0.5,
    eta: float = 0.2, r: float = 10.0, eps: float = 1e-6,
) -> Steps:  # fmt: skip
    """SoftAdaClip's scale at bounded adaptive thresholds, one a group.

    A sample adds a 1 to one of 2 K counts: of its group, beyond tau C_k or not. The fraction of a
    group divides by its own noisy size, both clamped as in DPSGD-F.
    """
    C_k = [C] * K
    for t, batch in enumerate(run.batches):
        sigma_grad, sigma_count = shares(sigma(t), r)
        g = run.gradients(batch)
        groups = batch.groups.tolist()
        s = [math.tanh(C_k[k] / (norm(g_i) + eps)) for g_i, k in zip(g, groups, strict=True)]
        g_bar = [s_i * g_i for s_i, g_i in zip(s, g, strict=True)]
        S = max(C_k)
        released = run.descend(g_bar, sigma_grad * S)
        raw = torch.zeros(2, K, dtype=torch.float64)
        for g_i, k in zip(g, groups, strict=True):
            raw[1 if at_most(norm(g_i), tau * C_k[k]) else 0, k] += 1
        counts = raw + sigma_count * run.count_normal(2, K)
        yield Step(
            g, s, *released, threshold=C_k, sensitivity=S, sigma_grad=sigma_grad,
            sigma_count=sigma_count, counts=counts,
        )  # fmt: skip
        beyond, within = ([max(float(c), 0.0) for c in row] for row in counts)
        f = [b / max(b + w, 1.0) for b, w in zip(beyond, within, strict=True)]
        C_k = [max(C_LB, c * math.exp(eta * (f_k - gamma))) for c, f_k in zip(C_k, f, strict=True)]
