"""The operations of the engine; here their PyTorch reference, which later kernels must equal."""

from fastclip.ops.accumulate import clip_accumulate
from fastclip.ops.bounds import (
    AddedNorm,
    LaterNorm,
    ProductNorm,
    product_slack,
)
from fastclip.ops.clip import clip_scale, threshold_step
from fastclip.ops.conv import (
    ConvGeometry,
    conv_ghost_norm,
    conv_ghost_parts,
    conv_operands,
    conv_unit_ghost_norm,
    patch_products,
)
from fastclip.ops.conv_gradients import (
    conv_gradients_apart,
    conv_norm,
    conv_per_sample_gradients,
    conv_sum,
    conv_unit_gradients,
    conv_unit_gradients_apart,
    kept_conv_gradients,
)
from fastclip.ops.conv_matrices import (
    by_matrices,
    kernel_rows,
    matrices,
    of_kernel_rows,
    patches_apart,
)
from fastclip.ops.dispatch import computes_reference, has_kernel
from fastclip.ops.embedding import (
    embedding_norm,
    embedding_sum,
    flatten_lookup,
    lookup_norm,
    lookup_slack,
    lookup_sum,
    tied_norm,
)
from fastclip.ops.finalize import check_floating, check_std, fill_normal, noise_finalize
from fastclip.ops.grams import LastInput, half_gram
from fastclip.ops.index import index_on
from fastclip.ops.kept import kept_sum, kept_sums, parted_sum, whole
from fastclip.ops.linear import (
    LAYERS_TOGETHER,
    ghost_norm,
    ghost_norm_concat,
    ghost_norms,
    ghost_parts,
    gradients_apart,
    instantiated_norm,
    kept_gradients,
    per_sample_gradients,
    scaled_sum,
    scaled_sums,
)
from fastclip.ops.norm_affine import group_norm_grads, layer_norm_grads, rms_norm_grads
from fastclip.ops.norm_backward import (
    group_norm_backward,
    layer_norm_backward,
    rms_norm_backward,
)
from fastclip.ops.norm_forward import channels_last, group_norm
from fastclip.ops.numerics import (
    drop_zeroed,
    looked_at,
    row_norm_sq,
    samples_at_once,
    shaped,
    unit_roundoff,
    wide_sum,
    widen,
)
from fastclip.ops.precision import full_float32, in_full_float32
from fastclip.ops.routed import (
    routed_gradients_apart,
    routed_norm,
    routed_slack,
    routes_apart,
    sum_by_owner,
)

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
    "layer_norm_backward",
    "layer_norm_grads",
    "looked_at",
    "lookup_norm",
    "lookup_slack",
    "lookup_sum",
    "matrices",
    "noise_finalize",
    "of_kernel_rows",
    "parted_sum",
    "patch_products",
    "patches_apart",
    "per_sample_gradients",
    "product_slack",
    "rms_norm_backward",
    "rms_norm_grads",
    "routed_gradients_apart",
    "routed_norm",
    "routed_slack",
    "routes_apart",
    "row_norm_sq",
    "samples_at_once",
    "scaled_sum",
    "scaled_sums",
    "shaped",
    "sum_by_owner",
    "threshold_step",
    "tied_norm",
    "unit_roundoff",
    "whole",
    "wide_sum",
    "widen",
]
