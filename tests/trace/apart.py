"""Steps in which samples stay independent: functions of the network and of [b, t, d]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

T, D = 6, 8
Step = Callable[[Any, Tensor], Tensor]
count = torch.arange


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * h.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        s = h.sigmoid()
        return g * (s + h * s * (1 - s))


def turned(f: Step) -> Step:
    """Of [b, d, t]."""
    return lambda m, h: f(m, h.transpose(1, 2)).transpose(1, 2)


def in_place(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, ::2].mul_(2)
    h[:, 1].add_(h[:, 0])
    return h


def every_row(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    for i in range(len(h)):
        h[i] = h[i] * 1.5 - 0.2
    return h


def windows(m: Any, h: Tensor) -> Tensor:
    b = len(h)
    w = h.reshape(b, 3, 2, D).permute(1, 0, 2, 3).reshape(3 * b, 2, D)
    return m.experts[1](w).view(3, b, 2, D).permute(1, 0, 2, 3).reshape(b, T, D)


def heads(m: Any, h: Tensor) -> Tensor:
    q = h.reshape(len(h), T, 2, 4).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return out.transpose(1, 2).reshape(h.shape)


def routed_by_nonzero(m: Any, h: Tensor) -> Tensor:
    flat = h.reshape(-1, D)
    chosen = m.experts[0](flat).argmax(-1) % 3
    out = torch.zeros_like(flat)
    for e in range(3):
        at = (chosen == e).nonzero().squeeze(-1)
        out.index_add_(0, at, m.experts[e](flat[at]))
    return out.view(h.shape)


def routed_by_sort(m: Any, h: Tensor) -> Tensor:
    flat = h.reshape(-1, D)
    order = (flat.argmax(-1) % 3).argsort()
    made = torch.tanh(flat[order])
    out = torch.empty_like(made)
    out[order] = made
    return out.view(h.shape)


def routed_by_mask(m: Any, h: Tensor) -> Tensor:
    flat = h.reshape(-1, D)
    chosen = flat.argmax(-1) % 3
    out = torch.zeros_like(flat)
    for e in range(3):
        out[chosen == e] = m.experts[e](flat[chosen == e])
    return out.view(h.shape)


def weighted_experts(m: Any, h: Tensor) -> Tensor:
    weight, which = h.softmax(-1).topk(2, -1)
    each = torch.stack([x(h) for x in m.experts], -2)
    at = (which % 3)[..., None].expand(*which.shape, D)
    return (each.gather(-2, at) * weight[..., None]).sum(-2)


def permuted(m: Any, h: Tensor) -> Tensor:
    return F.one_hot(h[..., 0].argsort(1), T).to(h) @ h


def packed(m: Any, h: Tensor) -> Tensor:
    p = nn.utils.rnn.pack_padded_sequence(h.transpose(0, 1), [T - 1] * len(h))
    o, _ = m.recurrent(p)
    return nn.utils.rnn.pad_packed_sequence(o, total_length=T)[0].transpose(0, 1)


def one_sequence(m: Any, h: Tensor) -> Tensor:
    n = len(h) * T
    of = count(len(h)).repeat_interleave(T)
    f = h.reshape(1, n, D)
    return F.scaled_dot_product_attention(f, f, f, attn_mask=of[:, None] == of).view(h.shape)


def own_zeroed(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[count(len(h)), h[..., 0].argmax(1)] = 0
    return h


def filled(m: Any, h: Tensor) -> Tensor:
    out = torch.empty(len(h), T, D)
    out[:, :2] = h[:, :2]
    out[:, 2:] = h[:, 2:].cos()
    return out


def prompted(m: Any, h: Tensor) -> Tensor:
    h = torch.cat([m.positions[:2].expand(len(h), 2, D), h], 1)
    return heads_of(h)[:, 2:]


def heads_of(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h)


def attention_module(m: Any, h: Tensor) -> Tensor:
    s = h.transpose(0, 1)
    w, b = torch.cat([m.experts[0].weight] * 3), torch.cat([m.experts[0].bias] * 3)
    e = m.experts[1]
    return F.multi_head_attention_forward(
        s, s, s, D, 2, w, b, None, None, False, 0.0, e.weight, e.bias
    )[0].transpose(0, 1)


def grouped(m: Any, h: Tensor) -> Tensor:
    """One convolution whose groups are the samples."""
    b = len(h)
    x = h.transpose(1, 2).reshape(1, b * D, T)
    out = F.conv1d(x, m.conv.weight.repeat(b, 1, 1), padding=1, groups=b)
    return out.view(b, D, T).transpose(1, 2)


def gradient_of_own(m: Any, h: Tensor) -> Tensor:
    return h + torch.autograd.grad((h.sin() ** 2).sum(), h, create_graph=True)[0]


def scan(m: Any, h: Tensor) -> Tensor:
    state, out = torch.zeros(len(h), D), []
    for k in range(T):
        state = torch.tanh(m.experts[2](state) + h[:, k])
        out.append(state)
    return torch.stack(out, 1)


def by_length(m: Any, h: Tensor) -> Tensor:
    kept = count(T)[None] < (h[..., 0] > 0).sum(1)[:, None]
    return h * kept[..., None]


def assembled_weight(m: Any, h: Tensor) -> Tensor:
    w = torch.empty(D, D)
    w[:4], w[4:] = m.experts[0].weight[:4], m.experts[1].weight[:4]
    return F.linear(h, w)


def low_rank(m: Any, h: Tensor) -> Tensor:
    e = m.experts
    return F.linear(h, e[0].weight[:, :2] @ e[1].weight[:2], e[2].bias)


def masked_attention(m: Any, h: Tensor) -> Tensor:
    mask = ((h[..., 0] > 0) | (count(T) == 0))[:, None, :]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=mask)


def centered(h: Tensor, *axes: int) -> Tensor:
    return h - h.mean(axes, keepdim=True)


def attend(h: Tensor) -> Tensor:
    return torch.softmax(h @ h.transpose(1, 2) / 3, -1) @ h


def rotated(m: Any, h: Tensor) -> Tensor:
    angle = count(T)[:, None].to(h)
    a, b = h[..., :4], h[..., 4:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def segment_sums(m: Any, h: Tensor) -> Tensor:
    of = count(len(h)).repeat_interleave(T)
    return h + torch.zeros(len(h), D).index_add(0, of, h.reshape(-1, D))[:, None] / T


def segment_maxima(m: Any, h: Tensor) -> Tensor:
    of = count(len(h)).repeat_interleave(T)[:, None].expand(-1, D)
    most = torch.zeros(len(h), D).scatter_reduce(0, of, h.reshape(-1, D), "amax")
    return h - most[:, None]


def in_blocks(m: Any, h: Tensor) -> Tensor:
    each = torch.block_diag(*[x @ x.T for x in h])
    return (each @ h.reshape(-1, D)).view(h.shape) / D


def complex_turn(m: Any, h: Tensor) -> Tensor:
    z = torch.view_as_complex(h.reshape(len(h), T, 4, 2).contiguous())
    return torch.view_as_real(z * (1 + 2j)).reshape(h.shape)


def prefix(m: Any, h: Tensor) -> Tensor:
    return torch.cat([torch.zeros(len(h), 1, D), h[:, :-1]], 1) + h


def marked(m: Any, h: Tensor) -> Tensor:
    """A constant column among the features."""
    one = torch.linspace(0, 1, T)[None, :, None].expand(len(h), T, 1)
    return torch.cat([h[..., 1:], one], -1)


def quantized(m: Any, h: Tensor) -> Tensor:
    distance = (h.unsqueeze(-2) - m.table.weight).pow(2).sum(-1)
    code = m.table(distance.argmin(-1))
    return h + (code - h).detach() + 0.1 * code


def rolled_back(m: Any, h: Tensor) -> Tensor:
    return h.transpose(0, 1).contiguous().view(T, len(h), D).permute(1, 0, 2) + 1


def recurrent_cells(m: Any, h: Tensor) -> Tensor:
    hx, out = None, []
    for k in range(T):
        hx = m.cell(h[:, k], hx)
        out.append(hx[0])
    return torch.stack(out, 1)


def checkpointed(m: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda z: torch.tanh(m.experts[2](z)), h, use_reentrant=False)


def reentrant(m: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda z: torch.tanh(m.experts[2](z)), h, use_reentrant=True)


def frozen_labels(m: Any, h: Tensor) -> Tensor:
    kinds = (h.mean(-1) > 0).long()
    return h + m.table(kinds) * (kinds == 1)[..., None]


def least_squares(m: Any, h: Tensor) -> Tensor:
    ht = h.transpose(1, 2)
    return torch.linalg.solve(torch.eye(D) + ht @ h, ht).transpose(1, 2)


APART: dict[str, Step] = {
    "layer norm": lambda m, h: m.norm(h),
    "relu": lambda m, h: F.relu(h),
    "gelu": lambda m, h: F.gelu(h),
    "silu": lambda m, h: F.silu(h),
    "convolution": turned(lambda m, h: m.conv(h)),
    "group norm": turned(lambda m, h: m.group(h)),
    "instance norm": turned(lambda m, h: F.instance_norm(h)),
    "batch norm, evaluating": turned(
        lambda m, h: F.batch_norm(h, m.batch.running_mean, m.batch.running_var, m.batch.weight)
    ),
    "fold": lambda m, h: m.experts[0](h.reshape(-1, D)).view(h.shape),
    "windows": windows,
    "heads": heads,
    "attention": lambda m, h: attend(h),
    "attention module": attention_module,
    "masked attention": masked_attention,
    "one sequence": one_sequence,
    "softmax over features": lambda m, h: h.softmax(-1),
    "softmax over positions": lambda m, h: h.softmax(1),
    "running sum": lambda m, h: h.cumsum(1),
    "running max": lambda m, h: h.cummax(1)[0],
    "flip": lambda m, h: h.flip(1),
    "roll": lambda m, h: h.roll((1, 2), (1, 2)),
    "sort": lambda m, h: h.sort(1)[0],
    "gather by rank": lambda m, h: h.gather(1, h[..., :1].argsort(1).expand(h.shape)),
    "take by rank": lambda m, h: torch.take_along_dim(h, h.argsort(1), 1),
    "own zeroed": own_zeroed,
    "own taken": lambda m, h: h + h[count(len(h)), h[..., 1].argmax(1)].unsqueeze(1),
    "masked fill": lambda m, h: h.masked_fill(h > 0.5, 0.1),
    "filled by own sum": lambda m, h: h.masked_fill((h.sum(-1) > 0)[..., None], 0.0),
    "where": lambda m, h: torch.where(h.mean((1, 2), keepdim=True) > 0, h, -h),
    "in place": in_place,
    "every row": every_row,
    "einsum": lambda m, h: torch.einsum("btd,bsd,bse->bte", h, h.softmax(-1), h) / T,
    "scatter by own": lambda m, h: torch.zeros_like(h).scatter_add(
        1, h.argmax(-1, keepdim=True).remainder(T).expand(h.shape), h
    ),
    "masked scatter": lambda m, h: torch.zeros_like(h).masked_scatter(h > 0, h[h > 0]),
    "unfold": lambda m, h: F.pad(h, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1),
    "as strided": lambda m, h: (
        h.contiguous()
        .as_strided((len(h), T - 1, 2, D), (T * D, D, D, 1))
        .mean(2)
        .repeat(1, 2, 1)[:, :T]
    ),
    "fourier": lambda m, h: torch.fft.irfft(torch.fft.rfft(h, dim=1) * 2, n=T, dim=1),
    "complex": complex_turn,
    "table": lambda m, h: h + m.table(h.argmax(-1)),
    "table by bucket": lambda m, h: (
        h + m.table(torch.bucketize(h.mean(-1), torch.linspace(-1, 1, 6)))
    ),
    "codebook": quantized,
    "row by row": lambda m, h: torch.stack([m.norm(h[i]) * 2 for i in range(len(h))]),
    "rows as modules": lambda m, h: torch.stack([m.experts[2](r) for r in h]),
    "position by position": lambda m, h: torch.cat([x.unsqueeze(1) * 1.5 for x in h.unbind(1)], 1),
    "pieces of one": lambda m, h: torch.cat([torch.tanh(c) for c in h.split(1)]),
    "recurrent": lambda m, h: m.recurrent(h.transpose(0, 1))[0].transpose(0, 1),
    "batch first": lambda m, h: m.first(h)[0],
    "gated recurrent": lambda m, h: m.gated(h.transpose(0, 1))[0].transpose(0, 1),
    "cells": recurrent_cells,
    "packed": packed,
    "scan": scan,
    "dropout": lambda m, h: F.dropout(h, 0.0),
    "masked mean": lambda m, h: (
        h - (h * (h > 0)).sum(1, keepdim=True) / ((h > 0).sum(1, keepdim=True) + 1)
    ),
    "routed by nonzero": routed_by_nonzero,
    "routed by sort": routed_by_sort,
    "routed by mask": routed_by_mask,
    "weighted experts": weighted_experts,
    "dense experts": lambda m, h: sum(
        m.experts[e](h) * (h.argmax(-1) % 3 == e).to(h)[..., None] for e in range(3)
    ),
    "permuted": permuted,
    "positions": lambda m, h: h + m.positions,
    "constant positions": lambda m, h: h * count(T)[:, None].to(h),
    "ones": lambda m, h: h * torch.ones(len(h), T, 1),
    "checkpoint": checkpointed,
    "reentrant checkpoint": reentrant,
    "custom function": lambda m, h: Scaled.apply(h),
    "top of own": lambda m, h: h + h.topk(2, 1)[0].mean(1, keepdim=True),
    "log-sum": lambda m, h: h - h.logsumexp((1, 2), keepdim=True),
    "log-sum along": lambda m, h: h - torch.logcumsumexp(h, 1),
    "products": lambda m, h: torch.bmm(h, torch.tanh(h).transpose(1, 2)) @ h / T,
    "added products": lambda m, h: torch.baddbmm(h, h, h.transpose(1, 2) @ h / 9),
    "own norm": lambda m, h: h / (h.flatten(1).norm(dim=1)[:, None, None] + 1),
    "own deviation": lambda m, h: h / (h.std((1, 2), keepdim=True) + 1),
    "lower triangle": lambda m, h: (h @ h.transpose(1, 2)).tril() @ h / D,
    "constant index": lambda m, h: h[:, count(T).flip(0)],
    "repeat and mean": lambda m, h: h.repeat_interleave(2, 0).view(len(h), 2, T, D).mean(1),
    "outer constant": lambda m, h: h * torch.outer(count(T).to(h), count(D).to(h)),
    "vmap": lambda m, h: torch.vmap(lambda z: m.experts[1](z).tanh())(h),
    "vmap twice": lambda m, h: torch.vmap(lambda r: torch.vmap(torch.sin)(r) * r.sum())(h),
    "image to columns": lambda m, h: F.unfold(h[:, None], (1, D)).transpose(1, 2).reshape(h.shape),
    "interpolate": turned(lambda m, h: F.interpolate(h, scale_factor=2, mode="linear")[:, :, ::2]),
    "bilinear": lambda m, h: F.interpolate(h[:, None], size=(2 * T, D), mode="bilinear")[:, 0, ::2],
    "max pool": turned(lambda m, h: F.max_pool1d(h, 3, 1, 1)),
    "average pool": turned(lambda m, h: F.avg_pool1d(h, 3, 1, 1)),
    "pixel shuffle": lambda m, h: F.pixel_shuffle(h.reshape(len(h), 48, 1, 1), 2).reshape(h.shape),
    "response norm": turned(lambda m, h: F.local_response_norm(h, 3)),
    "rotary": rotated,
    "gated": lambda m, h: torch.cat([F.glu(h, -1)] * 2, -1),
    "prelu": turned(lambda m, h: F.prelu(h, m.positions[0].abs())),
    "selu": lambda m, h: F.alpha_dropout(F.selu(h), 0.0),
    "pad": lambda m, h: F.pad(h, (0, 0, 2, 0))[:, :T],
    "other layout": lambda m, h: h.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "finer fold": lambda m, h: h.reshape(len(h) * 2, 3, D).softmax(1).view(h.shape),
    "depthwise": turned(lambda m, h: F.conv1d(h, m.conv.weight[:, :1], groups=D, padding=1)),
    "folded convolution": lambda m, h: (
        F.conv1d(h.reshape(1, len(h) * T, D).transpose(1, 2), m.experts[0].weight[:, :, None])
        .transpose(1, 2)
        .view(h.shape)
    ),
    "samples as groups": grouped,
    "differences": lambda m, h: F.pad(h.diff(dim=1), (0, 0, 1, 0)),
    "search": lambda m, h: (
        h + torch.searchsorted(h.sort(-1)[0].contiguous(), h.contiguous()).to(h) / D
    ),
    "third": lambda m, h: h - h.kthvalue(3, 1, keepdim=True)[0],
    "median": lambda m, h: h - h.median(1, keepdim=True)[0],
    "expanded": lambda m, h: h[:, :1].expand_as(h) + h,
    "shared keys": lambda m, h: (
        torch.einsum("bthd,bshd->bhts", h.reshape(len(h), T, 2, 4), h.reshape(len(h), T, 2, 4))
        .softmax(-1)
        .mean(1)
        @ h
    ),
    "blocks": in_blocks,
    "segment sums": segment_sums,
    "segment maxima": segment_maxima,
    "inner windows": lambda m, h: h.unfold(1, 2, 2).flip(-1).permute(0, 1, 3, 2).reshape(h.shape),
    "product of own": lambda m, h: h * torch.sigmoid(h).prod(1, keepdim=True),
    "determinant": lambda m, h: h * torch.linalg.det(h[:, :3, :3] + torch.eye(3))[:, None, None],
    "solve": least_squares,
    "distances": lambda m, h: torch.cdist(h, h).softmax(-1) @ h,
    "one-hot": lambda m, h: h * F.one_hot(h.argmax(-1), D) + h.softmax(-1),
    "straight through": lambda m, h: (h.round() - h).detach() + h,
    "clamped in place": lambda m, h: h.clone().clamp_(-1, 1),
    "normed weight": lambda m, h: F.linear(
        h, m.experts[0].weight / m.experts[0].weight.norm(dim=1, keepdim=True)
    ),
    "assembled weight": assembled_weight,
    "low rank": low_rank,
    "zeroed by mask": lambda m, h: h.index_put((h[..., 0] > 0,), torch.zeros(())),
    "own length": by_length,
    "tensordot": lambda m, h: torch.tensordot(h, m.experts[0].weight, dims=([2], [1])),
    "checkpointed pieces": lambda m, h: torch.cat(
        [checkpoint(lambda z: z.tanh(), c, use_reentrant=False) for c in h.chunk(len(h))]
    ),
    "filled": filled,
    "prompted": prompted,
    "own gradient": gradient_of_own,
    "prefix": prefix,
    "marked": marked,
    "back and forth": rolled_back,
    "own labels": frozen_labels,
    "centered": lambda m, h: centered(h, 1),
    "centered in all": lambda m, h: centered(h, 1, 2),
    "meshed": lambda m, h: (
        h + torch.stack(torch.meshgrid(count(T), count(D), indexing="ij")).sum(0)
    ),
    "trapezoid": lambda m, h: h - torch.trapezoid(h, dim=1)[:, None],
    "cross": lambda m, h: torch.cat([torch.cross(h[..., :3], h[..., 3:6], dim=-1), h[..., 3:]], -1),
    "renormed": lambda m, h: F.normalize(h, dim=-1) * m.positions[:, :1],
    "bilinear layer": lambda m, h: F.bilinear(h, h, m.table.weight[:, :, None].expand(D, D, D) / D),
    "additive": lambda m, h: torch.tanh(h[:, :, None] + h[:, None]).mean(2),
    "softplus": lambda m, h: F.softplus(h) * F.hardtanh(h),
    "log-softmax": lambda m, h: h.log_softmax(1) / T,
    "quantile of own": lambda m, h: h - h.quantile(0.5, dim=1, keepdim=True),
    "two norms": lambda m, h: h / (1 + torch.linalg.vector_norm(h, dim=(1, 2), keepdim=True)),
    "stacked heads": lambda m, h: torch.stack([h, h * 2], 1).flatten(1, 2)[:, ::2],
    "index over two": lambda m, h: h[:, [[0, 1], [2, 3]]].sum(2).repeat(1, 3, 1),
    "narrowed": lambda m, h: torch.cat([h.narrow(1, 3, 3), h.narrow(1, 0, 3)], 1),
    "movedim": lambda m, h: h.movedim(0, -1).contiguous().movedim(-1, 0) * 2,
    "own extremes": lambda m, h: (
        (h - h.amin((1, 2), keepdim=True))
        / (h.amax((1, 2), keepdim=True) - h.amin((1, 2), keepdim=True) + 1)
    ),
    "addcmul": lambda m, h: torch.addcmul(h, h, m.positions, value=0.5),
    "lerp": lambda m, h: torch.lerp(h, h.flip(1), 0.3),
    "scaled in place by own": lambda m, h: h.clone().mul_(
        h.detach().norm(dim=(1, 2), keepdim=True)
    ),
    "nan to num": lambda m, h: torch.nan_to_num(h) + h.sign(),
    "cumulative product": lambda m, h: torch.sigmoid(h).cumprod(1) + h,
    "rms norm": lambda m, h: F.rms_norm(h, (D,)),
    "tiled": lambda m, h: h.tile(1, 2, 1)[:, ::2] + h,
    "swish gate": lambda m, h: m.experts[0](h) * torch.sigmoid(m.experts[1](h)),
}
"""By their names."""
