"""Clipped sum of per-sample gradients that are in memory: each is read once.

    out[n] = sum_b s_b G[b, n]

A program takes BLOCK entries of all samples, and adds sample by sample, so that equal gradients give
equal bits. What a sample of scale 0 holds is not added, even where it is not finite; PyTorch's product
needs a pass over all gradients for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels.known import Known
from fastclip.kernels.runtime import alike, cdiv, launched, runs_on
from fastclip.ops.kept import as_they_lie

BLOCK = 1024
_WARPS = 4


@triton.jit
def _added(acc, value, factor):
    return tl.where(factor == 0, acc, tl.fma(value.to(tl.float32), factor, acc))


@launched(do_not_specialize=["b"])
def _sum_kernel(x, scale, out, b, n, x_b, scale_b, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x += at
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, b, 4):
        # Four samples are asked for before the first is used: their latencies overlap.
        b0, b1 = tl.cast(first, tl.int64), tl.minimum(first + 1, b - 1).to(tl.int64)
        b2, b3 = (
            tl.minimum(first + 2, b - 1).to(tl.int64),
            tl.minimum(first + 3, b - 1).to(tl.int64),
        )
        x0, x1 = tl.load(x + b0 * x_b, mask=inside), tl.load(x + b1 * x_b, mask=inside)
        x2, x3 = tl.load(x + b2 * x_b, mask=inside), tl.load(x + b3 * x_b, mask=inside)
        f0 = tl.load(scale + b0 * scale_b)
        f1 = tl.load(scale + b1 * scale_b, mask=first + 1 < b, other=0.0)
        f2 = tl.load(scale + b2 * scale_b, mask=first + 2 < b, other=0.0)
        f3 = tl.load(scale + b3 * scale_b, mask=first + 3 < b, other=0.0)
        acc = _added(_added(acc, x0, f0.to(tl.float32)), x1, f1.to(tl.float32))
        acc = _added(_added(acc, x2, f2.to(tl.float32)), x3, f3.to(tl.float32))
    tl.store(out + at, acc, mask=inside)


def kept_sum(gradients: Tensor, scale: Tensor) -> Tensor:
    """As fastclip.ops.kept_sum: gradients [b, *shape], scale [b] -> [*shape]."""
    same = alike(gradients, scale)
    known = _KNOWN.get(same)
    if known is not None:
        shape, back = known
        out = torch.empty(shape, dtype=torch.float32, device=gradients.device)
        if _sum_kernel.repeat(same, gradients, scale, out):
            return out if back is None else out.permute(back).contiguous()
    if not runs_on(gradients, scale) or gradients.dtype != torch.float32:
        return NotImplemented
    rows, back = as_they_lie(gradients)
    shape = rows.shape[1:]
    b, n = len(rows), shape.numel()
    if not b or not n or not rows[0].is_contiguous():
        return NotImplemented
    out = torch.empty(shape, dtype=torch.float32, device=gradients.device)
    _sum_kernel[(cdiv(n, BLOCK),)](
        rows, scale, out, b, n, rows.stride(0), scale.stride(0), BLOCK=BLOCK, num_warps=_WARPS,
        same=same,
    )  # fmt: skip
    if back == sorted(back):
        back = None
    _KNOWN[same] = shape, back
    return out if back is None else out.permute(back).contiguous()


_KNOWN: Known[tuple[torch.Size, list[int] | None]] = Known()
"""Of gradients of a kind: the shape of their sum as it lies, and how it is permuted to be as theirs."""
