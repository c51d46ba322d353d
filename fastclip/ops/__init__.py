"""The operations of the engine: their PyTorch references, which kernels must equal."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastclip.core.numerics import (
    drop_zeroed,
    full_float32,
    in_full_float32,
    laid_out_as,
    looked_at,
    row_norm_sq,
    samples_at_once,
    shaped,
    unit_roundoff,
    wide_sum,
    widen,
)
from fastclip.ops.clip import (
    check_floating,
    check_std,
    clip_accumulate,
    clip_scale,
    fill_normal,
    noise_finalize,
    threshold_step,
)
from fastclip.ops.conv import (
    ConvGeometry,
    by_matrices,
    conv_ghost_norm,
    conv_ghost_parts,
    conv_gradients_apart,
    conv_norm,
    conv_operands,
    conv_per_sample_gradients,
    conv_sum,
    conv_unit_ghost_norm,
    conv_unit_gradients,
    conv_unit_gradients_apart,
    kept_conv_gradients,
    kernel_rows,
    matrices,
    of_kernel_rows,
    patch_products,
    patches_apart,
)
from fastclip.ops.dispatch import computes_reference, has_kernel
from fastclip.ops.embedding import (
    embedding_norm,
    embedding_sum,
    flatten_lookup,
    lookup_margin,
    lookup_norm,
    lookup_sum,
    tied_norm,
)
from fastclip.ops.grams import (
    AddedNorm,
    LastInput,
    LaterNorm,
    ProductNorm,
    gram_norms,
    half_gram,
    product_margin,
    with_lost,
)
from fastclip.ops.linear import (
    LAYERS_TOGETHER,
    ghost_norm,
    ghost_norm_concat,
    ghost_norms,
    ghost_parts,
    gradients_apart,
    instantiated_norm,
    kept_gradients,
    kept_sum,
    kept_sums,
    parted_sum,
    per_sample_gradients,
    routed_gradients_apart,
    routed_margin,
    routed_norm,
    routes_apart,
    scaled_sum,
    scaled_sums,
    sum_by_sample,
    whole,
)
from fastclip.ops.norms import (
    channels_last,
    group_norm,
    group_norm_backward,
    group_norm_grads,
    layer_norm_backward,
    layer_norm_grads,
    rms_norm_backward,
    rms_norm_grads,
)

# -------------------------------------------------------------------------------------------------
# Indices on the device, made once.


@functools.lru_cache(maxsize=256)
def index_on(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns `places` as int64 on the device; not to be written to.

    A copy of pageable memory would wait in every step, and break the capture of a CUDA graph. It is
    made in the first pass that needs it, and kept.
    """
    with torch.inference_mode(False):
        return torch.tensor(places, dtype=torch.int64, device=device)


# -------------------------------------------------------------------------------------------------


__all__ = [
    "LAYERS_TOGETHER",
    "AddedNorm",
    "ConvGeometry",
    "LastInput",
    "LaterNorm",
    "ProductNorm",
    "by_matrices",
    "channels_last",
    "check_floating",
    "check_std",
    "clip_accumulate",
    "clip_scale",
    "computes_reference",
    "conv_ghost_norm",
    "conv_ghost_parts",
    "conv_gradients_apart",
    "conv_norm",
    "conv_operands",
    "conv_per_sample_gradients",
    "conv_sum",
    "conv_unit_ghost_norm",
    "conv_unit_gradients",
    "conv_unit_gradients_apart",
    "drop_zeroed",
    "embedding_norm",
    "embedding_sum",
    "fill_normal",
    "flatten_lookup",
    "full_float32",
    "ghost_norm",
    "ghost_norm_concat",
    "ghost_norms",
    "ghost_parts",
    "gradients_apart",
    "gram_norms",
    "group_norm",
    "group_norm_backward",
    "group_norm_grads",
    "half_gram",
    "has_kernel",
    "in_full_float32",
    "index_on",
    "instantiated_norm",
    "kept_conv_gradients",
    "kept_gradients",
    "kept_sum",
    "kept_sums",
    "kernel_rows",
    "laid_out_as",
    "layer_norm_backward",
    "layer_norm_grads",
    "looked_at",
    "lookup_margin",
    "lookup_norm",
    "lookup_sum",
    "matrices",
    "noise_finalize",
    "of_kernel_rows",
    "parted_sum",
    "patch_products",
    "patches_apart",
    "per_sample_gradients",
    "product_margin",
    "rms_norm_backward",
    "rms_norm_grads",
    "routed_gradients_apart",
    "routed_margin",
    "routed_norm",
    "routes_apart",
    "row_norm_sq",
    "samples_at_once",
    "scaled_sum",
    "scaled_sums",
    "shaped",
    "sum_by_sample",
    "threshold_step",
    "tied_norm",
    "unit_roundoff",
    "whole",
    "wide_sum",
    "widen",
    "with_lost",
]
