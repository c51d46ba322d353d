"""Squared norms of g_b^T a_b where samples have one position: outer products, without a Gram.

Index letters: b sample, d input feature, p output feature.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fastclip.kernels.products import ordered_sum
from fastclip.kernels.runtime import launched
from fastclip.ops.numerics import lost_squares


@launched
def _one_position_kernel(  # type: ignore[no-untyped-def]
    a, g, norms, d, p, lost_a, lost_g, a_b, a_d, g_b, g_p, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    norm_a = ordered_sum(a + b * a_b, d, a_d, BLOCK, True) + lost_a
    tl.store(norms + b, norm_a * (ordered_sum(g + b * g_b, p, g_p, BLOCK, True) + lost_g))


def one_position_norm(a: Tensor, g: Tensor) -> Tensor:
    """||a_b||^2 ||g_b||^2 for a [b, 1, d] and g [b, 1, p]: the norm of an outer product, [b]."""
    b, _, d = a.shape
    norms = torch.empty(b, dtype=torch.float32, device=a.device)
    _one_position_kernel[(b,)](
        a, g, norms, d, g.shape[2], lost_squares(d, a.dtype), lost_squares(g.shape[2], g.dtype),
        a.stride(0), a.stride(2), g.stride(0), g.stride(2), BLOCK=1024,
    )  # fmt: skip
    return norms
