"""Triton kernels, one operation per file; launchers have the signatures of fastclip.ops."""

from collections.abc import Callable
from typing import Any

from fastclip.ops.triton.clip_scale import clip_scale, threshold_step
from fastclip.ops.triton.conv import conv_ghost_norm, conv_norm, conv_operands, conv_sum
from fastclip.ops.triton.embedding import lookup_norm, lookup_sum
from fastclip.ops.triton.ghost_norm import ghost_norm, ghost_norm_concat, ghost_norms
from fastclip.ops.triton.group_norm import group_norm, group_norm_backward
from fastclip.ops.triton.instantiated_norm import instantiated_norm
from fastclip.ops.triton.layer_norm import layer_norm_backward, rms_norm_backward
from fastclip.ops.triton.scaled_sum import kept_sum, scaled_sum, scaled_sums

KERNELS: dict[str, Callable[..., Any]] = {
    launcher.__name__: launcher
    for launcher in (
        clip_scale,
        conv_ghost_norm,
        conv_norm,
        conv_operands,
        conv_sum,
        ghost_norm,
        ghost_norm_concat,
        ghost_norms,
        group_norm,
        group_norm_backward,
        instantiated_norm,
        kept_sum,
        layer_norm_backward,
        lookup_norm,
        lookup_sum,
        rms_norm_backward,
        scaled_sum,
        scaled_sums,
        threshold_step,
    )
}
"""Operation of fastclip.ops -> launcher."""
