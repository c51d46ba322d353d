"""Clipped sum of an embedding table's gradients, from sorted look-ups: every row is written once.

    W[v] = sum of s_b g[j] over the entries j, of samples b, that look up v

Index letters and runs as in embedding_norm, with the id alone as the key. A program takes ROWS sorted
entries and a tile of d; it writes the rows whose runs it has seen the whole of, and hands on its first
and its last run as two carried rows, until one program takes all. So there are no atomics, and equal
look-ups give equal bits. Sums are float64, of products that float64 holds exactly, and are rounded
once. Entries of scale 0 are not read: they add 0 even where they are not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.kernels.embedding_norm import MAX_BLOCK, ROWS
from fastclip.kernels.runtime import cdiv, launched, next_power_of_2, runs_on

_WARPS = 2


@triton.jit
def _load(source, j, col, FIRST: tl.constexpr):
    """Key and scaled row of sorted entry j; past the end, zeros that lengthen the last run."""
    KEY, G, ORDER, SAMPLE, SCALE, n, d, padding, sgn, scale_b = source
    at = tl.minimum(j, n - 1).to(tl.int64)
    key = tl.load(KEY + at)
    live = j < n
    factor = tl.full([], 1.0, tl.float64)
    if FIRST:
        at = tl.load(ORDER + at)
        factor = tl.load(SCALE + tl.load(SAMPLE + at) * scale_b).to(tl.float64)
        live = live & (key != padding) & (factor != 0)
    row = tl.load(G + at * sgn, mask=col < tl.where(live, d, 0), other=0.0).to(tl.float64)
    return key, row * tl.where(live, factor, 0.0)


@triton.jit
def _add(state, entry, first, OUT, d, col, FINAL: tl.constexpr):
    """The state after one more row: key and sum of the open run, sum of the first once it has ended."""
    last, run, head = state
    key, row = entry
    ends = key != last
    is_head = ends & (last == first) & (not FINAL)  # it may have begun in an earlier program
    head = tl.where(is_head, run, head)
    whole = ends & (not is_head)
    tl.store(OUT + last * d + col, run.to(tl.float32), mask=col < tl.where(whole, d, 0))
    return key, tl.where(ends, 0.0, run) + row, head


@launched(do_not_specialize=["n"])
def _runs(KEY, G, ORDER, SAMPLE, SCALE, OUT, NEXT_KEY, NEXT, n, d, padding, sgn, sgd,
          scale_b, COUNT: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
          FINAL: tl.constexpr):  # fmt: skip
    """COUNT sorted rows from program_id(0), BLOCK features from program_id(1)."""
    chunk, tile = tl.program_id(0), tl.program_id(1)
    col = tile * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(KEY + chunk * COUNT)
    zeros = tl.zeros([BLOCK], tl.float64)
    state = (first, zeros, zeros)
    source = (KEY, G + col.to(tl.int64) * sgd, ORDER, SAMPLE, SCALE, n, d, padding, sgn, scale_b)
    for i in range(0, COUNT, 4):
        # Four rows are asked for before the first is used: their latencies overlap.
        j = chunk * COUNT + i
        e0, e1 = _load(source, j, col, FIRST), _load(source, j + 1, col, FIRST)
        e2, e3 = _load(source, j + 2, col, FIRST), _load(source, j + 3, col, FIRST)
        state = _add(state, e0, first, OUT, d, col, FINAL)
        state = _add(state, e1, first, OUT, d, col, FINAL)
        state = _add(state, e2, first, OUT, d, col, FINAL)
        state = _add(state, e3, first, OUT, d, col, FINAL)
    last, run, head = state
    inside = col < d
    if FINAL:
        tl.store(OUT + last * d + col, run.to(tl.float32), mask=inside)
    else:
        at = 2 * chunk.to(tl.int64)
        tl.store(NEXT + at * d + col, head, mask=inside)
        tl.store(NEXT + (at + 1) * d + col, run, mask=inside)
        tl.store(NEXT_KEY + at, first, mask=tile == 0)
        tl.store(NEXT_KEY + at + 1, last, mask=tile == 0)


def lookup_sum(
    ids: Tensor, sample: Tensor, g: Tensor, scale: Tensor, num_embeddings: int,
    padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """As fastclip.ops.lookup_sum: ids [n], sample [n], g [n, d] of any strides, scale [b] -> [v, d]."""
    n, d = g.shape
    if not runs_on(g, ids, sample, scale) or n + ROWS >= 1 << 31:
        return NotImplemented
    out = torch.zeros(num_embeddings, d, dtype=torch.float32, device=g.device)
    if not n or not d:
        return out
    key, order = ids.sort(stable=True)  # equal ids are added in the order of the entries
    sample = sample.contiguous()
    block = min(MAX_BLOCK, next_power_of_2(d))
    padding = -1 if padding_idx is None else padding_idx
    rows, (sgn, sgd) = g, g.stride()
    while True:
        chunks = cdiv(n, ROWS)
        carried = 2 * chunks
        next_key = key.new_empty(carried)
        following = g.new_empty(carried, d, dtype=torch.float64)
        _runs[(chunks, cdiv(d, block))](
            key, rows, order, sample, scale, out, next_key, following, n, d, padding, sgn, sgd,
            scale.stride(0), COUNT=ROWS, BLOCK=block, FIRST=rows is g, FINAL=chunks == 1,
            num_warps=_WARPS,
        )  # fmt: skip
        if chunks == 1:
            return out
        key, rows, n, sgn, sgd = next_key, following, carried, d, 1
