"""Squared norms of g_b^T a_b where samples have one position: outer products, without a Gram.

Index letters: b sample, d input feature, p output feature.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fastclip.kernels.products import ordered_sum
from fastclip.kernels.runtime import launched
from fastclip.ops.numerics import lost_squares, unit_roundoff

_LANES = 1024


@launched
def _one_position_kernel(
    a, g, norms, d, p, factor, lost_a, lost_g, a_b, a_d, g_b, g_p, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    norm_a = ordered_sum(a + b * a_b, d, a_d, BLOCK, True) + lost_a
    norm_g = ordered_sum(g + b * g_b, p, g_p, BLOCK, True) + lost_g
    tl.store(norms + b, norm_a * norm_g * factor)


def one_position_norm(a: Tensor, g: Tensor) -> Tensor:
    """||a_b||^2 ||g_b||^2 for a [b, 1, d] and g [b, 1, p]: the norm of an outer product, [b]."""
    (b, _, d), p = a.shape, g.shape[2]
    norms = torch.empty(b, dtype=torch.float32, device=a.device)
    # Each lane adds its squares one after the other: equal ones come out low by up to a quarter u each.
    factor = 1 + unit_roundoff(norms.dtype) * (d + p) / (4 * _LANES)
    _one_position_kernel[(b,)](
        a, g, norms, d, p, factor, lost_squares(d, a.dtype), lost_squares(p, g.dtype),
        a.stride(0), a.stride(2), g.stride(0), g.stride(2), BLOCK=_LANES,
    )  # fmt: skip
    return norms
