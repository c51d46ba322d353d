"""One launch of every kernel in every form, for what only wants to see them launched."""

from __future__ import annotations

import torch

from fastclip.clipping import Clipping, Hard, PerLayer, Quantile, Tanh, dpsgd_f, naive_reweighting
from fastclip.kernels.clip_scale import clip_scale, threshold_step


def clip_launches() -> None:
    """The forms of a strategy: groups, layers, weights, normalized."""
    norm_sq, groups = torch.rand(6, 40), torch.arange(40) % 3
    strategies = [
        Clipping(),
        Clipping(Tanh(normalized=True), PerLayer()),
        Clipping(Hard(normalized=True), Quantile("above", num_groups=3)),
        dpsgd_f(3),
        naive_reweighting(3),
        Clipping(Tanh(), Quantile(centred=True)),
    ]
    for strategy in strategies:
        policy = strategy.threshold
        state = strategy.initial([1.0] * 6 if policy.per_layer else 1.0, 6)
        counts = torch.zeros(policy.count_shape, dtype=torch.float64)
        counting = counts if policy.count_noise_ratio else None
        clip_scale(norm_sq, strategy, state, groups, None, counting)
        if counting is not None:
            threshold_step(counts, torch.ones_like(counts), policy, state, 8.0, 0)


def launch_everything() -> None:
    clip_launches()
