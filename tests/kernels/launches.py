"""One launch of every kernel in every form, for what only wants to see them launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastclip.clipping import Clipping, Hard, PerLayer, Quantile, Tanh, dpsgd_f, naive_reweighting
from fastclip.kernels import KERNELS
from fastclip.ops import ConvGeometry


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
        KERNELS["clip_scale"](norm_sq, strategy, state, groups, None, counting)
        if counting is not None:
            noise = torch.ones_like(counts)
            KERNELS["threshold_step"](counts, noise, policy, state, 8.0, 0)


def linear_launches(dtype: torch.dtype) -> None:
    """Shapes of BERT's layers, few samples."""
    for t, d, p in ((128, 768, 3072), (1, 768, 64), (512, 64, 32)):
        a, g = torch.zeros(2, t, d, dtype=dtype), torch.zeros(2, t, p, dtype=dtype)
        KERNELS["ghost_norm"](a, g)
        KERNELS["ghost_norm_concat"]([(a, g), (a, g)])
        KERNELS["instantiated_norm"](a, g)
        KERNELS["instantiated_norm"](a, g, keep=True)
        KERNELS["scaled_sum"](a, g, torch.ones(2))


def lookup_launches(dtype: torch.dtype) -> None:
    """A short text in a wide table."""
    ids, sample = torch.zeros(96, dtype=torch.int64), torch.arange(96) // 48
    KERNELS["lookup_norm"](ids, sample, torch.zeros(96, 768, dtype=dtype), 2, 30522, 0)


def norm_launches(dtype: torch.dtype) -> None:
    """With and without the input's gradient."""
    x, statistics, weight = (
        torch.zeros(2, 128, 768, dtype=dtype),
        torch.ones(2, 128),
        torch.ones(768),
    )
    image, groups = torch.zeros(2, 64, 196, dtype=dtype), torch.ones(2, 32)
    for need_input in (True, False):
        KERNELS["layer_norm_backward"](x, x, statistics, statistics, weight, need_input)
        KERNELS["rms_norm_backward"](x, x, statistics, weight, need_input)
        scale = torch.ones(64)
        KERNELS["group_norm_backward"](image, image, groups, groups, scale, need_input)


def conv_launches(dtype: torch.dtype) -> None:
    """Stride, padding, dilation, groups, channels-last, one dimension, pointwise."""
    cases = (
        ((2, 64, 14, 14), (2, 64, 14, 14), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
        ((2, 64, 15, 15), (2, 32, 8, 8), (32, 16, 3, 3), (2, 2), (1, 1), (1, 1), 4),
        ((2, 64, 14, 14), (2, 128, 14, 14), (128, 64, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    )
    for x_shape, g_shape, *rest in cases:
        x, g = torch.zeros(x_shape, dtype=dtype), torch.zeros(g_shape, dtype=dtype)
        for layout in (torch.contiguous_format, torch.channels_last):
            pair = x.to(memory_format=layout), g.to(memory_format=layout)
            KERNELS["conv_norm"](*pair, ConvGeometry(*rest))
            KERNELS["conv_ghost_norm"](*pair, ConvGeometry(*rest))


def launch_everything(dtypes: Sequence[torch.dtype]) -> None:
    """Every operation that has a kernel."""
    clip_launches()
    for dtype in dtypes:
        linear_launches(dtype)
        lookup_launches(dtype)
        norm_launches(dtype)
        conv_launches(dtype)
