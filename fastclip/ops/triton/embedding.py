"""Per-sample norms and clipped sums of an embedding table's gradient, from sorted look-ups.

    norm_b = sum over the distinct ids v of sample b of || sum of the g[j] that look up v ||^2

Index letters: b sample, j entry, t position, d feature; v id. Entries are sorted by the key
(sample, id), and equal keys form a run. A program takes ROWS sorted entries and a tile of d, and reads
each row of g once. It has complete runs and samples, except the first and the last ones. These it
passes on as two carried rows (partial sum of a run, and the squared norms of its sample so far), which
are again sorted by key. The next launch does the same to them, until one program takes all. So an id
repeated n times costs log n launches, never a loop over n. Each sample is written once, by one program,
without atomics. Carried rows are 2 / ROWS of g. Sums are float64: rows of one id may cancel, and the
error of a float32 sum of many could exceed the scales' margin. The kernel waits for memory anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastclip.ops.triton.runtime import (
    autotuned,
    cdiv,
    launched,
    next_power_of_2,
    runs_on,
    work_class,
)

ROWS = 32
MAX_BLOCK = 256


@triton.jit
def _norm_load(source, j, col, FIRST: tl.constexpr):
    """Returns key, row and carried norm of sorted entry j; after the end zeros extend the last run."""
    KEY, G, ORDER, DONE, n, d, t, padding, sgb, sgt, bits, tiles = source
    key = tl.load(KEY + tl.minimum(j, n - 1))
    live = j < n
    if FIRST:
        entry = tl.load(ORDER + tl.minimum(j, n - 1)).to(tl.int32)
        live = live & ((key & ((1 << bits) - 1)) != padding)
        at = (entry // t).to(tl.int64) * sgb + (entry % t).to(tl.int64) * sgt
        done = tl.full([], 0.0, tl.float64)
    else:
        at = j.to(tl.int64) * sgb
        done = tl.load(DONE + j.to(tl.int64) * tiles + tl.program_id(1), mask=live, other=0.0)
    row = tl.load(G + at, mask=col < tl.where(live, d, 0), other=0.0)
    return key, row.to(tl.float64), done


@triton.jit
def _norm_add(state, entry, first, OUT, bits, tiles, FINAL: tl.constexpr):
    """Returns the state after one more row: key and sum of the open run, sum of the first run after its
    end, two parts of the open sample's squared norm, and the first sample's after its end."""
    last, run, head, squares, norm, head_norm = state
    key, row, done = entry
    ends = key != last
    is_head = ends & (last == first) & (not FINAL)  # it may have begun in an earlier program
    squares += tl.where(ends & (not is_head), run * run, 0.0)
    head = tl.where(is_head, run, head)
    run = tl.where(ends, 0.0, run) + row
    sample = last >> bits
    if (key >> bits) != sample:
        norm += tl.sum(squares)
        if (sample == (first >> bits)) & (not FINAL):
            head_norm = norm
        else:
            tl.store(OUT + sample * tiles + tl.program_id(1), norm)
        squares = tl.zeros_like(squares)
        norm = tl.full([], 0.0, tl.float64)
    return key, run, head, squares, norm + done, head_norm


@autotuned([triton.Config({}, num_warps=w) for w in (1, 4)], key=["d", "BLOCK", "work"])
@launched(do_not_specialize=["n", "work"])
def _norm_runs(KEY, G, ORDER, DONE, OUT, NEXT_KEY, NEXT, NEXT_DONE, n, work, d, t, padding,
          sgb, sgt, sgd, bits, tiles, COUNT: tl.constexpr, BLOCK: tl.constexpr,
          FIRST: tl.constexpr, FINAL: tl.constexpr):  # fmt: skip
    """COUNT sorted rows from program_id(0), BLOCK features from program_id(1)."""
    chunk, tile = tl.program_id(0), tl.program_id(1)
    col = tile * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(KEY + chunk * COUNT)
    zeros = tl.zeros([BLOCK], tl.float64)
    zero = tl.full([], 0.0, tl.float64)
    state = (first, zeros, zeros, zeros, zero, zero)
    source = (KEY, G + col.to(tl.int64) * sgd, ORDER, DONE, n, d, t, padding, sgb, sgt, bits, tiles)
    for i in range(0, COUNT, 4):
        # Four rows are asked for before the first is used: their latencies overlap.
        j = chunk * COUNT + i
        e0, e1 = _norm_load(source, j, col, FIRST), _norm_load(source, j + 1, col, FIRST)
        e2, e3 = _norm_load(source, j + 2, col, FIRST), _norm_load(source, j + 3, col, FIRST)
        state = _norm_add(state, e0, first, OUT, bits, tiles, FINAL)
        state = _norm_add(state, e1, first, OUT, bits, tiles, FINAL)
        state = _norm_add(state, e2, first, OUT, bits, tiles, FINAL)
        state = _norm_add(state, e3, first, OUT, bits, tiles, FINAL)
    last, run, head, squares, norm, head_norm = state
    inside = col < d
    if FINAL:
        norm += tl.sum(squares + run * run)
        tl.store(OUT + (last >> bits) * tiles + tile, norm)
    else:
        norm += tl.sum(squares)
        at = 2 * chunk.to(tl.int64)
        tl.store(NEXT + at * d + col, head, mask=inside)
        tl.store(NEXT + (at + 1) * d + col, run, mask=inside)
        tl.store(NEXT_DONE + at * tiles + tile, head_norm)
        tl.store(NEXT_DONE + (at + 1) * tiles + tile, norm)
        tl.store(NEXT_KEY + at, first, mask=tile == 0)
        tl.store(NEXT_KEY + at + 1, last, mask=tile == 0)


def lookup_norm(
    ids: Tensor, sample: Tensor, g: Tensor, batch_size: int, num_embeddings: int,
    padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """As fastclip.ops.lookup_norm: ids [n], sample [n], g [n, d] -> [batch_size]."""
    return _norms(ids, sample, g.unsqueeze(1), batch_size, num_embeddings, padding_idx)


def embedding_norm(ids: Tensor, g: Tensor, padding_idx: int | None = None) -> Tensor:
    """As fastclip.ops.embedding_norm: ids [b, t], g [b, t, d] of any strides -> [b]."""
    b, t = ids.shape
    sample = torch.arange(b, device=ids.device)[:, None].expand(b, t).reshape(-1)
    return _norms(ids.reshape(-1), sample, g, b, 1 << 31, padding_idx)


def _norms(
    ids: Tensor, sample: Tensor, g: Tensor, b: int, num_embeddings: int, padding_idx: int | None
) -> Tensor:
    """g [n / t, t, d]; entry j is g[j // t, j % t]."""
    t, d = g.shape[1:]
    n = ids.numel()
    # The base of the key is a power of two: it is split by shifts, not divisions.
    bits = max(1, (num_embeddings - 1).bit_length())
    if not runs_on(g, ids, sample) or n + ROWS >= 1 << 31 or b << bits >= 1 << 63:
        return NotImplemented
    if not n or not d:
        return torch.zeros(b, dtype=torch.float32, device=g.device)
    # Stable: equal keys are added in the order of the entries, the same every time.
    key, order = ((sample << bits) + ids).sort(stable=True)
    block = min(MAX_BLOCK, next_power_of_2(d))
    tiles = cdiv(d, block)
    norms = g.new_zeros(b, tiles, dtype=torch.float64)
    rows, done, sgb, sgt, sgd = g, norms, *g.stride()
    while True:
        chunks = cdiv(n, ROWS)
        carried = 2 * chunks
        next_key = key.new_empty(carried)
        following = g.new_empty(carried, d, dtype=torch.float64)
        next_done = norms.new_empty(carried, tiles)
        _norm_runs[(chunks, tiles)](
            key, rows, order, done, norms, next_key, following, next_done, n,
            work_class(chunks * tiles), d, t, -1 if padding_idx is None else padding_idx, sgb, sgt,
            sgd, bits, tiles, COUNT=ROWS, BLOCK=block, FIRST=rows is g, FINAL=chunks == 1,
        )  # fmt: skip
        if chunks == 1:
            return norms.sum(1).float()
        key, rows, done, n = next_key, following, next_done, carried
        sgb, sgt, sgd = d, 0, 1


# -------------------------------------------------------------------------------------------------
# Clipped sum of an embedding table's gradients, from sorted look-ups: every row is written once.
#
#     W[v] = sum of s_b g[j] over the entries j, of samples b, that look up v
#
# Index letters and runs as in embedding_norm, with the id alone as the key. A program takes ROWS
# sorted entries and a tile of d. It writes the rows of complete runs, and passes on its first and
# last run as two carried rows, until one program takes all. So there are no atomics, and equal
# look-ups give equal bits. Sums are float64, of products that float64 holds exactly, and are rounded
# once. Entries of scale 0 are not read: they add 0 even if they are not finite.


_WARPS = 2


@triton.jit
def _sum_load(source, j, col, FIRST: tl.constexpr):
    """Returns key and scaled row of sorted entry j; after the end zeros that extend the last run."""
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
def _sum_add(state, entry, first, OUT, d, col, FINAL: tl.constexpr):
    """Returns the state after one more row: key and sum of the open run, sum of the ended first."""
    last, run, head = state
    key, row = entry
    ends = key != last
    is_head = ends & (last == first) & (not FINAL)  # it may have begun in an earlier program
    head = tl.where(is_head, run, head)
    whole = ends & (not is_head)
    tl.store(OUT + last * d + col, run.to(tl.float32), mask=col < tl.where(whole, d, 0))
    return key, tl.where(ends, 0.0, run) + row, head


@launched(do_not_specialize=["n"])
def _sum_runs(KEY, G, ORDER, SAMPLE, SCALE, OUT, NEXT_KEY, NEXT, n, d, padding, sgn, sgd,
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
        e0, e1 = _sum_load(source, j, col, FIRST), _sum_load(source, j + 1, col, FIRST)
        e2, e3 = _sum_load(source, j + 2, col, FIRST), _sum_load(source, j + 3, col, FIRST)
        state = _sum_add(state, e0, first, OUT, d, col, FINAL)
        state = _sum_add(state, e1, first, OUT, d, col, FINAL)
        state = _sum_add(state, e2, first, OUT, d, col, FINAL)
        state = _sum_add(state, e3, first, OUT, d, col, FINAL)
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
        _sum_runs[(chunks, cdiv(d, block))](
            key, rows, order, sample, scale, out, next_key, following, n, d, padding, sgn, sgd,
            scale.stride(0), COUNT=ROWS, BLOCK=block, FIRST=rows is g, FINAL=chunks == 1,
            num_warps=_WARPS,
        )  # fmt: skip
        if chunks == 1:
            return out
        key, rows, n, sgn, sgd = next_key, following, carried, d, 1
