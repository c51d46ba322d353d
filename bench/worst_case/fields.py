"""Targets of other layers' records: convolutions, look-ups, normalisations, gradients that are there.

Index letters: b sample, t position, c channel, o output channel, v row of a table, n feature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.worst_case.genome import Choice, Count, Genome, Real, Space
from bench.worst_case.operands import DTYPES, in_batch, pair, pair_genes
from bench.worst_case.products import BATCH_GENES, Keeps
from bench.worst_case.ratios import (
    THRESHOLD_GENES,
    Ratios,
    of_parts,
    of_record,
    of_sums,
    threshold_of,
)
from fastclip import ops
from fastclip.rules import KeptRecord, LookupRecord
from fastclip.rules.conv import conv_record
from fastclip.rules.records import ConvRecord

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ADDED: Space = {**BATCH_GENES, **THRESHOLD_GENES}


# ---- convolutions --------------------------------------------------------------------------------


def conv_space(longest: int, widest: int = 16) -> Space:
    """Genes of a convolution over at most so many pixels."""
    return {
        **pair_genes(), **_ADDED, "dims": Choice((1, 1, 2, 3)), "pixels": Count(1, longest),
        "kernel": Choice((1, 2, 3)), "stride": Choice((1, 1, 2)), "padding": Choice((0, 1)),
        "dilation": Choice((1, 1, 2)), "groups": Choice((1, 1, 2, 3)), "depthwise": Choice((0, 0, 1)),
        "c": Count(1, widest), "o": Count(1, widest),
    }  # fmt: skip


def conv_measured(way: str) -> Callable[[Genome], Ratios]:
    """The measure of convolutions of one way: ghost, recomputed or kept."""

    def measure(genome: Genome) -> Ratios:
        space, out, geometry = _geometry(genome)
        c, o = geometry.weight_shape[1] * geometry.groups, geometry.weight_shape[0]
        shapes = ((torch.Size(space).numel(), c), (torch.Size(out).numel(), o))

        def gradient(x: Tensor, g: Tensor) -> Tensor:
            return _conv_gradient(x.mT.reshape(1, c, *space), g.mT.reshape(1, o, *out), geometry)

        rows, outputs = pair(genome, shapes, gradient)
        b = genome["batch"]
        place = genome["place"] % b
        x = in_batch(rows.mT.reshape(c, *space), b, place)
        g = in_batch(outputs.mT.reshape(o, *out), b, place)
        record = (
            conv_record(Keeps(), x, g, geometry)  # type: ignore[arg-type]
            if way == "kept"
            else ConvRecord(x, g, geometry, ghost=way == "ghost")
        )
        exact = None
        if genome["dtype"] != "float64":
            exact = gradient(rows.double(), outputs.double()).norm().item()
        about = (
            f"x {list(x.shape)}, weight {list(geometry.weight_shape)}, stride {geometry.stride[0]}, "
            f"padding {geometry.padding[0]}, dilation {geometry.dilation[0]}, groups "
            f"{geometry.groups}, {genome['dtype']}"
        )
        return of_record(genome, record, place, exact, about)

    return measure


def _geometry(genome: Genome) -> tuple[tuple[int, ...], tuple[int, ...], ops.ConvGeometry]:
    dims, groups = genome["dims"], genome["groups"]
    kernel, padding, dilation = genome["kernel"], genome["padding"], genome["dilation"]
    least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
    side = max(least, round(genome["pixels"] ** (1 / dims)))
    out = (side + 2 * padding - dilation * (kernel - 1) - 1) // genome["stride"] + 1
    c = 1 if genome["depthwise"] else -(-genome["c"] // groups)
    o = -(-genome["o"] // groups) * groups
    geometry = ops.ConvGeometry(
        (o, c, *[kernel] * dims), (genome["stride"],) * dims, (padding,) * dims, (dilation,) * dims,
        groups,
    )  # fmt: skip
    return (side,) * dims, (out,) * dims, geometry


def _conv_gradient(x: Tensor, g: Tensor, geo: ops.ConvGeometry) -> Tensor:
    """Of the weight, by autograd."""
    weight = x.new_zeros(geo.weight_shape, requires_grad=True)
    with torch.enable_grad():
        out = _CONV[len(geo.stride)](
            x, weight, None, geo.stride, geo.padding, geo.dilation, geo.groups
        )
        again = x.requires_grad or g.requires_grad
        return torch.autograd.grad(out, weight, g, create_graph=again)[0]


# ---- look-ups ------------------------------------------------------------------------------------


def lookup_space(longest: int) -> Space:
    """Genes of a table that is looked up at most so often."""
    return {
        **pair_genes("x", "g"), **_ADDED, "t": Count(1, longest), "v": Choice((1, 2, 3, 40, 5000)),
        "n": Count(1, 64), "alike": Real(0, 1), "padding": Choice((0, 0, 1)),
    }  # fmt: skip


def lookup_measure(genome: Genome) -> Ratios:
    """The ratios of a look-up."""
    t, v, n, b = (genome[name] for name in ("t", "v", "n", "batch"))
    place, generator = genome["place"] % b, torch.Generator().manual_seed(genome["seed"])
    own = torch.randint(v, (t,), generator=generator)
    own[torch.rand(t, generator=generator) < genome["alike"]] = v - 1
    _, g = pair(genome, ((t, 1), (t, n)), names=("x", "g"))
    padding = 0 if genome["padding"] else None
    ids = own.expand(b, t).contiguous()
    record = LookupRecord.from_dense(ids, in_batch(g, b, place), v, padding)
    exact = None
    if genome["dtype"] != "float64":
        table = torch.zeros(v, n, dtype=torch.float64).index_add_(0, own, g.double())
        if padding is not None:
            table[padding] = 0
        exact = table.norm().item()
    about = f"ids [{b}, {t}], table [{v}, {n}], padding {padding}, {genome['dtype']}"
    return of_record(genome, record, place, exact, about)


# ---- normalisations ------------------------------------------------------------------------------


def norm_space(longest: int) -> Space:
    """Genes of a normalisation over at most so many positions."""
    return {
        **pair_genes("x", "g"), **_ADDED, "t": Count(1, longest), "c": Count(1, 64),
        "groups": Choice((1, 2, 3)), "input": Choice((False, True)),
    }  # fmt: skip


def norm_measured(kind: str) -> Callable[[Genome], Ratios]:
    """The measure of LayerNorm, RMSNorm or GroupNorm."""

    def measure(genome: Genome) -> Ratios:
        t, groups, b, need = (genome[n] for n in ("t", "groups", "batch", "input"))
        c = -(-genome["c"] // groups) * groups if kind == "group" else genome["c"]
        place = genome["place"] % b
        x, g = (in_batch(own, b, place) for own in pair(genome, ((t, c), (t, c)), names=("x", "g")))
        grads, size = _affine(kind, x, g, groups, need)
        g_rows = g.double()
        exact = None
        if genome["dtype"] != "float64":
            parts = [(size.double() * g_rows)[place].sum(0), g_rows[place].sum(0)][: len(grads)]
            exact = torch.cat(parts).norm().item()
        records = [KeptRecord(own) for own in grads]
        norm_sq = torch.stack([record.norm_sq() for record in records])
        about = f"x {list(x.shape)}, {genome['dtype']}"
        return of_sums(
            genome, norm_sq, place, lambda s: [r.clipped_sum(s) for r in records], exact, about
        )

    return measure


def _affine(
    kind: str, x: Tensor, g: Tensor, groups: int, need: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of weight and bias, and what the weight is multiplied by, [b, t, c] in float64."""
    c = x.shape[2]
    weight, bias = torch.ones(c, dtype=x.dtype), torch.zeros(c, dtype=x.dtype)
    wide = x.double()
    if kind == "rms":
        rstd = (ops.widen(x).square().mean(2) + 1e-5).rsqrt()
        return ops.rms_norm_backward(x, g, rstd, weight, need)[1:], wide * rstd.double()[..., None]
    if kind == "layer":
        _, mean, rstd = torch.native_layer_norm(x, (c,), weight, bias, 1e-5)
        grads = ops.layer_norm_backward(x, g, mean.squeeze(2), rstd.squeeze(2), weight, need)[1:]
        return grads, (wide - mean.double()) * rstd.double()
    x, g = x.mT.contiguous(), g.mT.contiguous()
    _, mean, rstd = ops.group_norm(x, weight, bias, groups, 1e-5, x.dtype)
    grads = ops.group_norm_backward(x, g, mean, rstd, weight, need)[1:]
    mean, rstd = (s.double().repeat_interleave(c // groups, 1)[:, None] for s in (mean, rstd))
    return grads, (wide - mean) * rstd


# ---- gradients that are there --------------------------------------------------------------------


def materialised_space() -> Space:
    """Genes of per-sample gradients of several parameters."""
    return {
        **pair_genes(), **_ADDED, "t": Count(1, 12), "n": Count(1, 8192),
        "layers": Choice((False, False, True)),
    }  # fmt: skip


def materialised_measure(genome: Genome) -> Ratios:
    """The ratios of `clip_accumulate`: t parameters of n numbers."""
    t, n, b = (genome[name] for name in ("t", "n", "batch"))
    place = genome["place"] % b
    _, rows = pair(genome, ((t, 1), (t, n)))
    grads = [in_batch(row, b, place) for row in rows]
    exact = rows.double().norm(dim=1)
    if genome["layers"]:
        thresholds = [threshold_of(genome, own) for own in exact.tolist()]
        sums, norms = ops.clip_accumulate(grads, thresholds)
        norm = norms[:, place].double().norm().item()
        bound = torch.tensor(thresholds, dtype=torch.float64).norm().item()
    else:
        bound = threshold_of(genome, exact.norm().item())
        sums, norms = ops.clip_accumulate(grads, bound)
        norm = norms[place].item()
    about = f"{t} x [{b}, {n}], {'per layer' if genome['layers'] else 'flat'}, {genome['dtype']}"
    wide = rows.dtype == DTYPES["float64"]
    return of_parts(norm, sums, bound, None if wide else exact.norm().item(), about)
