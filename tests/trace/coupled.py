"""Steps in which one sample meets others, or what is done to it depends on its number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trace.apart import D, Step, T, attend, count, turned


class CoupledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return g * (1 + h.mean())


class KeepsMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.mean = h.mean(0)
        return h * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.mean


def numbers(h: Tensor) -> Tensor:
    """1, 2, ... along the samples, [b, 1, 1]."""
    return count(1, len(h) + 1)[:, None, None].to(h)


def others(h: Tensor) -> Tensor:
    return h.roll(1, 0)


def written(h: Tensor, at: Any, value: Any) -> Tensor:
    h = h.clone()
    h[at] = value(h) if callable(value) else value
    return h


def shifted(m: Any, h: Tensor) -> Tensor:
    f = h.reshape(-1, D)
    return (f + torch.cat([f[1:], f[:1]])).view(h.shape)


def mean_in_view(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    v = h.view(-1, D)
    v[::4].mul_(v.mean())
    return h


def running(m: Any, h: Tensor) -> Tensor:
    m.running = 0.5 * m.running + h.detach().mean((0, 1))
    return h - m.running


def running_in_place(m: Any, h: Tensor) -> Tensor:
    m.running.mul_(0.5).add_(h.detach().mean((0, 1)))
    return h - m.running


def with_capacity(m: Any, h: Tensor) -> Tensor:
    f = h.reshape(-1, D)
    one = F.one_hot(f.argmax(-1) % 3, 3)
    rank = one.cumsum(0) * one
    return (f * (rank.sum(-1) <= 6).to(f)[:, None]).view(h.shape)


def moved(h: Tensor, f: Any) -> Tensor:
    """A function of tokens in the order of their first number, put back."""
    flat = h.reshape(-1, D)
    order = flat[:, 0].argsort()
    made = f(flat[order])
    out = torch.empty_like(made)
    out[order] = made
    return out.view(h.shape)


def memory_of_rows(m: Any, h: Tensor) -> Tensor:
    state, out = torch.zeros(T, D), []
    for row in h:
        state = 0.5 * state + row
        out.append(state)
    return torch.stack(out)


def hooked(m: Any, h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda g: g * (1 + h.detach().mean()))
    return h


def clipped_gradient(m: Any, h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda g: g / (1 + g.norm()))
    return h


def sums_of_kinds(m: Any, h: Tensor) -> Tensor:
    kind, mean = h.mean(1).argmax(-1) % 3, h.mean(1)
    return h + torch.zeros(3, D).index_add(0, kind, mean)[kind][:, None]


def best_gated(m: Any, h: Tensor) -> Tensor:
    best = h.mean((1, 2)).topk(min(2, len(h)))[1]
    return h * torch.zeros(len(h)).scatter(0, best, 1.0)[:, None, None]


def overlapping(m: Any, h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    out[:] = h
    out[1:] = out[1:] * 0.5 + h[:-1] * 0.5
    return out


def overlapping_memory(m: Any, h: Tensor) -> Tensor:
    c = h.clone()
    f = c.view(-1)
    f[3:-3].mul_(f[:-6].clone())
    return c


def sinkhorn(m: Any, h: Tensor) -> Tensor:
    s = (h @ h.transpose(1, 2)).exp().clamp(max=9)
    return s / s.sum(0, keepdim=True) @ h


def numbered_column(m: Any, h: Tensor) -> Tensor:
    return torch.cat([h[..., 1:], numbers(h).expand(len(h), T, 1)], -1)


def into_numbered(m: Any, h: Tensor) -> Tensor:
    out = numbers(h).expand(len(h), T, D).clone()
    out[..., 1:] = h[..., 1:]
    return out


def gradient_of_mean(m: Any, h: Tensor) -> Tensor:
    return h + torch.autograd.grad((h.mean(0) ** 3).sum(), h, create_graph=True)[0]


def whitened(m: Any, h: Tensor) -> Tensor:
    f = h.reshape(-1, D)
    return (f @ torch.linalg.inv(f.T @ f + torch.eye(D))).view(h.shape)


def twice_first(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[0] *= 2
    return h


def split_order(m: Any, h: Tensor) -> Tensor:
    first, *rest = h.split(1)
    return torch.cat([m.experts[0](first), *[m.experts[1](x) for x in rest]])


def alternating(m: Any, h: Tensor) -> Tensor:
    return torch.stack([m.experts[i % 2](row) for i, row in enumerate(h)])


def from_numpy(m: Any, h: Tensor) -> Tensor:
    return h + torch.from_numpy(h.detach().numpy().mean(0))


def memory_bank(m: Any, h: Tensor) -> Tensor:
    m.bank = h.detach().mean((0, 1))
    return h


def shared_scale(m: Any, h: Tensor) -> Tensor:
    scale = torch.ones(())
    scale = scale * h.abs().mean()
    return h / scale


def first_of_each(m: Any, h: Tensor) -> Tensor:
    _, kind = (h > 0).long().sum((1, 2)).unique(return_inverse=True)
    return h * (kind + 1)[:, None, None]


def attention_of_samples(m: Any, h: Tensor) -> Tensor:
    w, b = torch.cat([m.experts[0].weight] * 3), torch.cat([m.experts[0].bias] * 3)
    e = m.experts[1]
    return F.multi_head_attention_forward(
        h, h, h, D, 2, w, b, None, None, False, 0.0, e.weight, e.bias
    )[0]


def complex_pairs(m: Any, h: Tensor) -> Tensor:
    z = torch.view_as_complex(torch.stack([h, others(h)], -1))
    return torch.view_as_real(z)[..., 1] + h


def only_some(h: Tensor, f: Any) -> Tensor:
    return torch.cat([h[:2], f(h[2:])]) if len(h) > 2 else h


def numbered_index(m: Any, h: Tensor) -> Tensor:
    return h + h[count(len(h)), count(len(h)) % T][:, None]


def numbered_gather(m: Any, h: Tensor) -> Tensor:
    at = (count(len(h)) % T)[:, None, None].expand(len(h), T, D)
    return h + h.gather(1, at)


def numbered_scatter(m: Any, h: Tensor) -> Tensor:
    at = (count(len(h)) % T)[:, None, None].expand(len(h), 1, D)
    return h.scatter(1, at, 0.0)


def numbered_write(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[count(len(h)), count(len(h)) % T] = 0.0
    return h


def numbered_selection(m: Any, h: Tensor) -> Tensor:
    mask = count(T)[None, :] <= count(len(h))[:, None]
    return h + torch.zeros_like(h).masked_scatter(mask[..., None], h[mask])


def numbered_mask(m: Any, h: Tensor) -> Tensor:
    mask = count(T)[None, :, None] <= count(len(h))[:, None, None]
    return h.masked_fill(mask, 0.0)


def numbered_embedding(m: Any, h: Tensor) -> Tensor:
    return h + m.table(count(len(h)) % D)[:, None]


def vmapped_number(m: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda r, k: r * k)(h, count(1, len(h) + 1).to(h))


def nested_loop(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    for i in range(1, len(h)):
        h[i] = h[i] + 0.1 * h[i - 1]
    return h


def batch_codebook(m: Any, h: Tensor) -> Tensor:
    nearest = torch.cdist(h.reshape(-1, D), h.reshape(-1, D)).topk(2, largest=False)[1][:, 1]
    return h + h.reshape(-1, D)[nearest].view(h.shape)


def columns_by_number(m: Any, h: Tensor) -> Tensor:
    halves = [row[:, :4] if i % 2 else row[:, 4:] for i, row in enumerate(h)]
    return torch.stack([x.repeat(1, 2) for x in halves])


def layout_by_number(m: Any, h: Tensor) -> Tensor:
    turned_ = [row.T if i % 2 else row.reshape(D, T) for i, row in enumerate(h)]
    return torch.stack(turned_).transpose(1, 2)


def reversed_by_number(m: Any, h: Tensor) -> Tensor:
    return torch.stack([torch.cat([r[i % T :], r[: i % T]]) for i, r in enumerate(h)])


COUPLED: dict[str, Step] = {
    "permutation": lambda m, h: h[count(len(h)).flip(0)],
    "random permutation": lambda m, h: h[torch.randperm(len(h))] + h,
    "random weights": lambda m, h: h * (1 + torch.randperm(len(h)))[:, None, None],
    "running sum": lambda m, h: h.cumsum(0),
    "roll": lambda m, h: others(h),
    "flip": lambda m, h: h.flip(0) + h,
    "sort": lambda m, h: h.sort(0)[0],
    "batch norm": turned(lambda m, h: m.batch(h)),
    "batch norm without state": turned(lambda m, h: F.batch_norm(h, None, None, training=True)),
    "softmax over samples": lambda m, h: h.softmax(0),
    "log-softmax over samples": lambda m, h: h.log_softmax(0),
    "mean": lambda m, h: h - h.mean(0),
    "detached mean": lambda m, h: h - h.mean(0).detach(),
    "mean of the other layout": lambda m, h: h - h.transpose(0, 1).mean(1)[None],
    "sorted by data": lambda m, h: h[h[:, 0, 0].argsort()],
    "gathered by data": lambda m, h: h.gather(0, (h > 0).long().remainder(len(h)).expand(h.shape)),
    "taken by data": lambda m, h: h[(h[:, 0, 0] > 0).long().clamp(max=len(h) - 1)] + h,
    "masked by mean": lambda m, h: h.masked_fill(h.mean(0) > 0.0, 0.3),
    "shifted tokens": shifted,
    "added to the next": lambda m, h: written(h, slice(1, None), lambda c: c[1:] + c[:-1]),
    "swapped": lambda m, h: written(h, [0, 1], lambda c: c[[1, 0]]),
    "mean in a view": mean_in_view,
    "einsum over samples": lambda m, h: torch.einsum("btd,cte->bde", h, h)[:, :T] / len(h),
    "einsum of pairs": lambda m, h: torch.einsum("btd,cte->bd", h, h)[:, None] + h,
    "scatter over samples": lambda m, h: (
        h
        + torch.zeros_like(h).scatter_add(
            0, h.argmax(-1, keepdim=True).remainder(len(h)).expand(h.shape), h
        )
    ),
    "unfold": lambda m, h: h + torch.cat([h, h[:1]]).unfold(0, 2, 1).mean(-1),
    "strides": lambda m, h: h + h.contiguous().as_strided(h.shape, (D, D, 1)),
    "all by strides": lambda m, h: (
        0.01 * torch.as_strided(h.contiguous().view(-1), (len(h) * T * D - 1,), (1,), 1).sum() + h
    ),
    "fourier": lambda m, h: torch.fft.fft(h, dim=0).real,
    "number read": lambda m, h: h * 2 if h.mean().item() > 0 else h,
    "bool read": lambda m, h: h + 1 if bool((h[0] > 0.3).any()) else h,
    "maximum read": lambda m, h: h / h.abs().max().item(),
    "formatted": lambda m, h: h * float(f"{h.detach().mean():.6f}"),
    "where of others": lambda m, h: torch.where(others(h) > 0, h, -h),
    "largest": lambda m, h: h / h.abs().max(),
    "numbered": lambda m, h: h * numbers(h),
    "running mean": running,
    "running mean in place": running_in_place,
    "capacity": with_capacity,
    "numbers of moved": lambda m, h: moved(
        h, lambda g: g * torch.linspace(0.5, 1.5, len(g))[:, None]
    ),
    "part of moved": lambda m, h: moved(h, lambda g: torch.cat([g[:10] * 2, g[10:]])),
    "mean of moved": lambda m, h: moved(h, lambda g: g - g[:7].mean(0)),
    "one sequence": lambda m, h: attend(h.reshape(1, -1, D)).view(h.shape),
    "coupled backward": lambda m, h: CoupledBackward.apply(h),
    "mean kept": lambda m, h: KeepsMean.apply(h),
    "other slope": lambda m, h: only_some(h, lambda x: 1.5 * x - 0.5 * x.detach()),
    "other scale": lambda m, h: only_some(h, lambda x: 1.5 * x),
    "some detached": lambda m, h: only_some(h, lambda x: x.detach()),
    "some through a layer": lambda m, h: only_some(h, m.experts[0]),
    "loop with its number": lambda m, h: torch.stack([h[i] * (i + 1) for i in range(len(h))]),
    "numpy": from_numpy,
    "numpy number": lambda m, h: h * float(h.detach().numpy().std()),
    "list": lambda m, h: h + torch.tensor(h.detach().mean((1, 2)).tolist()).mean(),
    "hook": hooked,
    "gradient clipped": clipped_gradient,
    "covariance": lambda m, h: h @ torch.cov(h.reshape(-1, D).T),
    "recurrent over samples": lambda m, h: m.recurrent(h)[0],
    "attention over samples": lambda m, h: F.scaled_dot_product_attention(
        h.transpose(0, 1), h.transpose(0, 1), h.transpose(0, 1)
    ).transpose(0, 1),
    "attention module": attention_of_samples,
    "quantile": lambda m, h: h - h.quantile(0.5),
    "best": lambda m, h: h - h.topk(1, 0)[0],
    "distances": lambda m, h: h + torch.cdist(h.flatten(1), h.flatten(1)).mean(1)[:, None, None],
    "rank": lambda m, h: h * h[:, 0, 0].argsort().argsort()[:, None, None],
    "product with first": lambda m, h: h @ (h[0].T @ h[0]).detach() / T,
    "index add": lambda m, h: torch.zeros_like(h).index_add(0, count(len(h)).flip(0), h) + h,
    "count": lambda m, h: h * (h > 0).sum(),
    "conditional": lambda m, h: torch.where(torch.tensor(len(h) > 3), h * h.mean(0), h),
    "gram": lambda m, h: ((h.flatten(1) @ h.flatten(1).T).softmax(-1) @ h.flatten(1)).view(h.shape),
    "memory of rows": memory_of_rows,
    "whitened": whitened,
    "one-hot of the best": lambda m, h: (
        h * F.one_hot(h[:, 0, 0].argmax(), len(h)).to(h)[:, None, None]
    ),
    "least": lambda m, h: h - h.amin(0, keepdim=True),
    "any": lambda m, h: h * (h > 1).any(0),
    "counted": lambda m, h: h / ((h > 0).sum(0) + 1),
    "median": lambda m, h: h - h.median(0)[0],
    "variance": lambda m, h: h / h.var(0, unbiased=False).add(1).sqrt(),
    "convolution": lambda m, h: m.conv(h.permute(1, 2, 0)).permute(2, 0, 1),
    "pool": lambda m, h: F.avg_pool1d(h.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "pad": lambda m, h: F.pad(h, (0, 0, 0, 0, 1, 0))[:-1] + h,
    "wrong view": lambda m, h: h.reshape(T, len(h), D).transpose(0, 1) + h,
    "wrong reshape": lambda m, h: h.transpose(0, 1).reshape(h.shape),
    "best added": lambda m, h: h[h.mean((1, 2)).argmax()][None] + h,
    "sum of earlier": lambda m, h: h + F.pad(h.cumsum(0)[:-1], (0, 0, 0, 0, 1, 0)),
    "overlapping writes": overlapping,
    "overlapping memory": overlapping_memory,
    "cosines": lambda m, h: F.cosine_similarity(h[:, None], h[None], dim=-1).mean(1)[..., None] * h,
    "deviation in gradient": lambda m, h: (
        h + (h.detach().std() * h - (h.detach().std() * h).detach())
    ),
    "matrix norm": lambda m, h: h / torch.linalg.matrix_norm(h.reshape(-1, D)),
    "unique": first_of_each,
    "histogram": lambda m, h: h * torch.histc(h.detach(), 4)[0],
    "counts": lambda m, h: h * torch.bincount(h.argmax(-1).reshape(-1), minlength=D).to(h),
    "masked mean": lambda m, h: h - (h * (h > 0)).sum((0, 1)) / (h > 0).sum((0, 1)).clamp(min=1),
    "sum of selected": lambda m, h: h + h[(h[:, 0, 0] > 0)].sum(0),
    "number of nonzero": lambda m, h: h * len((h > 0).nonzero()),
    "number of selected": lambda m, h: h * h[h[..., 0] > 0].shape[0],
    "sums of kinds": sums_of_kinds,
    "best gated": best_gated,
    "clipped": lambda m, h: h * (3 / h.norm()).clamp(max=1),
    "sinkhorn": sinkhorn,
    "root mean square": lambda m, h: h / h.pow(2).mean().sqrt(),
    "even and odd": lambda m, h: torch.where((count(len(h)) % 2 == 0)[:, None, None], h, -h),
    "even flipped": lambda m, h: torch.where((count(len(h)) % 2 == 0)[:, None, None], h, h.flip(0)),
    "complex": complex_pairs,
    "norm over all": lambda m, h: F.layer_norm(h, h.shape),
    "group norm over all": lambda m, h: (
        F.group_norm(h.reshape(1, -1, D).transpose(1, 2), 2).transpose(1, 2).reshape(h.shape)
    ),
    "columns of all": lambda m, h: F.unfold(h[None], (1, D)).sum() * 0.01 + h,
    "triangle of samples": lambda m, h: torch.einsum(
        "bc,ctd->btd", torch.ones(len(h), len(h)).triu(), h
    ),
    "random ranks": lambda m, h: h * (torch.rand(len(h), 1, 1).argsort(0) + 1),
    "gradient of the mean": gradient_of_mean,
    # written for this set
    "first doubled": twice_first,
    "first written": lambda m, h: written(h, 0, 0.5),
    "one entry written": lambda m, h: written(h, (0, 0), 0.5),
    "numbered column": numbered_column,
    "into numbered": into_numbered,
    "numbers written": lambda m, h: written(
        h, (slice(None), 0), lambda c: numbers(c)[:, 0].expand(len(c), D)
    ),
    "numbered index": numbered_index,
    "numbered gather": numbered_gather,
    "numbered scatter": numbered_scatter,
    "numbered mask": numbered_mask,
    "numbered write": numbered_write,
    "numbered selection": numbered_selection,
    "numbered table": numbered_embedding,
    "vmapped number": vmapped_number,
    "columns by number": columns_by_number,
    "layout by number": layout_by_number,
    "cut by number": reversed_by_number,
    "rows of one": lambda m, h: torch.stack([h[0] for _ in h]) + h,
    "first repeated": lambda m, h: h[[0, *range(len(h) - 1)]] + h if len(h) > 1 else h * 2,
    "layers by number": alternating,
    "first by another layer": split_order,
    "mean by product": lambda m, h: (
        h - (torch.ones(1, len(h)) @ h.flatten(1) / len(h)).view(1, T, D)
    ),
    "mean by bmm": lambda m, h: (
        h - torch.bmm(torch.ones(T, 1, len(h)) / len(h), h.transpose(0, 1)).transpose(0, 1)
    ),
    "next by loop": nested_loop,
    "nearest token": batch_codebook,
    "shared scale": shared_scale,
    "kept for later": memory_bank,
    "log-sum over all": lambda m, h: h - h.logsumexp((0, 1, 2)),
    "smallest distance": lambda m, h: h * torch.cdist(h[:, 0], h[:, 0]).sum(),
    "product of means": lambda m, h: h * torch.sigmoid(h.mean((1, 2))).prod(),
    "difference of samples": lambda m, h: h + F.pad(h.diff(dim=0), (0, 0, 0, 0, 1, 0)),
    "running maximum": lambda m, h: h + h.cummax(0)[0],
    "norm over samples": lambda m, h: F.normalize(h, dim=0),
    "scan of moved": lambda m, h: moved(h, lambda g: g.cumsum(0)),
    "interpolated": lambda m, h: (
        F.interpolate(h.permute(1, 2, 0), size=len(h), mode="linear").permute(2, 0, 1)
        + F.interpolate(h.permute(1, 2, 0), scale_factor=2)[..., : len(h)].permute(2, 0, 1)
    ),
    "repeated wrongly": lambda m, h: h.repeat(2, 1, 1).view(len(h), 2, T, D).mean(1),
    "interleaved wrongly": lambda m, h: h.repeat_interleave(2, 0).view(2, len(h), T, D).mean(0),
    "outer": lambda m, h: (
        h + torch.einsum("b,c->bc", h.mean((1, 2)), h.mean((1, 2))).sum(1)[:, None, None]
    ),
    "swapped features": lambda m, h: torch.cat([h[..., :4], others(h)[..., 4:]], -1),
    "target of others": lambda m, h: h + (others(h) - h).detach(),
    "median of all": lambda m, h: h - h.median(),
    "tensordot": lambda m, h: h + torch.tensordot(h, h, dims=([0, 1], [0, 1])).sum() / 99,
    "weighted by share": lambda m, h: h * (h.abs().sum((1, 2)) / h.abs().sum())[:, None, None],
}
"""By their names."""
