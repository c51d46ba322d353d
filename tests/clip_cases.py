"""What clip_scale is given, for the kernels of every backend."""

from __future__ import annotations

import torch

from fastclip.clipping import Clipping

LAYERS = 5
EXTREMES = [0.0, 1e-40, 1e-30, 1e-12, 0.5, 4.0, 1e18, 3e38, float("inf"), float("nan")]


def norms_of(b: int, device: str | torch.device) -> torch.Tensor:
    """Squared norms [l, b], extreme ones first, then one layer's that is negative; non-contiguous."""
    generator = torch.Generator().manual_seed(b)
    norm_sq = torch.rand(b, LAYERS, generator=generator).square() * 10
    for i, value in enumerate(EXTREMES[:b]):
        norm_sq[i] = value
    negative = norm_sq[len(EXTREMES) : len(EXTREMES) + 1]
    negative[:, 0] = -0.5 * negative[:, 1:].sum(1)
    return norm_sq.to(device).T


def setting(strategy: Clipping, b: int, device: str | torch.device):
    """Thresholds after a few moves, groups (one row in none), layers, and counts so far."""
    policy = strategy.threshold
    per_layer = policy.per_layer
    state = strategy.initial([0.3, 1.0, 2.5, 0.7, 0.1, 3.0] if per_layer else 0.7, 6)
    state = state.to(torch.device(device))
    groups = None
    if policy.num_groups is not None:
        groups = torch.arange(b, device=device) % policy.num_groups
        groups[b // 2 : b // 2 + 1] = -1
    counts = None
    if policy.count_noise_ratio is not None:
        ones = torch.ones(1, device=device)
        counts = policy.count(ones, state, None if groups is None else groups[:1] * 0)
        for step in range(3):
            state = policy.move(state, counts * 3 + step, 8.0, step)
    layers = torch.tensor([5, 0, 2, 3, 1], device=device) if per_layer else None
    return state, groups, layers, counts
