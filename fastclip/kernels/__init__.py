"""Triton kernels, one operation a file; launchers have the signatures of fastclip.ops."""

from collections.abc import Callable
from typing import Any

from fastclip.kernels.clip_scale import clip_scale, threshold_step
from fastclip.kernels.conv_arguments import conv_operands
from fastclip.kernels.conv_norm import conv_ghost_norm, conv_norm
from fastclip.kernels.conv_sum import conv_sum
from fastclip.kernels.embedding_norm import lookup_norm
from fastclip.kernels.embedding_sum import lookup_sum
from fastclip.kernels.ghost_norm import ghost_norm, ghost_norm_concat
from fastclip.kernels.ghost_norms import ghost_norms
from fastclip.kernels.group_norm import group_norm
from fastclip.kernels.group_norm_backward import group_norm_backward
from fastclip.kernels.instantiated_norm import instantiated_norm
from fastclip.kernels.kept_sum import kept_sum
from fastclip.kernels.norm_affine import layer_norm_backward, rms_norm_backward
from fastclip.kernels.scaled_sum import scaled_sum
from fastclip.kernels.scaled_sums import scaled_sums

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
