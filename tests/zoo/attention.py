"""Tables of positions inside attention, torch's own attention, heads and memories written by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, T, sequence

TABLES = Family("position tables")
TORCH = Family("torch's attention")
HEADS = Family("attention by hand")


class Attention(nn.Module):
    """Two heads of three; a subclass adds a bias [2, t, t] to the scores, or turns queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def bias(self, q: Tensor, k: Tensor) -> Tensor | float:
        return 0.0

    def turned(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 3).permute(2, 0, 3, 1, 4)
        q, k = self.turned(q), self.turned(k)
        weights = (q @ k.mT / math.sqrt(3) + self.bias(q, k)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, D))


def distances(t: int = T) -> Tensor:
    """j - i + t - 1."""
    steps = torch.arange(t)
    return steps[None] - steps[:, None] + t - 1


@TABLES.member
class Buckets(Attention):
    """T5: an embedding of distances, one number a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * T - 1, 2)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return self.table(distances(q.shape[-2])).permute(2, 0, 1)[None]


@TABLES.member
class Swin(Attention):
    """A raw table, indexed by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = parameter(2 * T - 1, 2)
        self.register_buffer("index", distances())

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return self.table[self.index.view(-1)].view(T, T, 2).permute(2, 0, 1).contiguous()[None]


@TABLES.member
class Beit(Attention):
    """A raw table and rows of it for a class token, put together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = parameter(2 * T - 1 + 3, 2)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        inner = self.table[:-3][distances(T - 1)]
        whole = torch.cat([self.table[-1].expand(T - 1, 1, 2), inner], 1)
        first = torch.cat([self.table[-3:-2], self.table[-2:-1].expand(T - 1, 2)])
        return torch.cat([first[None], whole]).permute(2, 0, 1)


@TABLES.member
class Logarithmic(Attention):
    """Swin v2: a network over constant coordinates, and a clamped logit scale of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
        self.scale = parameter(2, 1, 1)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        coordinates = torch.linspace(-1, 1, 2 * T - 1, dtype=q.dtype)[:, None]
        table = 16 * torch.sigmoid(self.net(coordinates))[distances()].permute(2, 0, 1)
        scale = torch.clamp(self.scale, max=math.log(100.0)).exp()
        return table + F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale


@TABLES.member
class Disentangled(Attention):
    """DeBERTa: content to position and back, gathered, through the same projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(2 * T - 1, D), nn.LayerNorm(D)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        table = self.norm(self.table.weight)
        keys = F.linear(table, self.qkv.weight[D : 2 * D], self.qkv.bias[D : 2 * D])
        keys = keys.view(-1, 2, 3).transpose(0, 1)
        index = distances()[None, None].expand(len(q), 2, -1, -1)
        there = torch.gather(q @ keys.mT, -1, index)
        back = torch.gather(k @ keys.mT, -1, index).mT
        return there + back


@TABLES.member
class Shaw(Attention):
    """Relative keys [t, t, d] by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * T - 1, 3)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhid,ijd->bhij", q, self.table(distances()))


@TABLES.member
class TransformerXL(Attention):
    """Two biases of queries, and distances by padding and reshaping."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.r = parameter(2, 1, 3), parameter(2, 1, 3), nn.Linear(3, 6, bias=False)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        angles = torch.arange(T, dtype=q.dtype)[:, None] / torch.tensor(
            [1.0, 3.0, 9.0], dtype=q.dtype
        )
        r = self.r(angles.sin()).view(T, 2, 3).transpose(0, 1)
        scores = F.pad((q + self.v) @ r.mT, (1, 0))
        b, h, i, j = scores.shape
        shifted = scores.view(b, h, j, i)[:, :, 1:].view(b, h, i, j - 1)
        return shifted + self.u @ k.mT


@TABLES.member
class Slopes(Attention):
    """ALiBi with learned slopes, a causal mask, a learned sink."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.sinks = parameter(2), parameter(2)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        behind = distances() - T + 1
        bias = self.slopes.exp()[:, None, None] * behind
        return bias.masked_fill(behind > 0, -1e4) + self.sinks[:, None, None] * (behind == 0)


@TABLES.member
class Rotary(Attention):
    """With learned frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = parameter(1)

    def turned(self, y: Tensor) -> Tensor:
        angle = torch.arange(y.shape[-2], dtype=y.dtype)[:, None] * self.frequencies
        c, s = angle.cos(), angle.sin()
        a, b, rest = y.split(1, -1)
        return torch.cat([a * c - b * s, a * s + b * c, rest], -1)


@TABLES.member
class Axial(nn.Module):
    """A table of rows and one of columns, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.layer = (
            parameter(2, 1, D),
            parameter(1, 2, D),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor) -> Tensor:
        table = (self.rows + self.columns).reshape(1, 4, D)
        return self.layer(torch.tanh(x[:, :4] + table))


# torch's own


class OwnAttention(nn.Module):
    """nn.MultiheadAttention with these options."""

    def __init__(self, *, masks: bool = False, other: int | None = None, **options: object) -> None:
        super().__init__()
        wide = {} if other is None else {"kdim": other, "vdim": other}
        self.attention = nn.MultiheadAttention(D, 2, **wide, **options)  # type: ignore[arg-type]
        self.masks, self.other, self.first = masks, other, options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        keys = x if self.other is None else x[..., : self.other].cos()
        if not self.first:
            x, keys = x.transpose(0, 1), keys.transpose(0, 1)
        masks = {}
        if self.masks:
            hidden = (x if self.first else x.transpose(0, 1))[..., 0] > 0.7
            masks = {"key_padding_mask": hidden.index_fill(1, torch.tensor([0]), False)}
            masks["attn_mask"] = torch.ones(T, T).triu(1).bool()
        out, weights = self.attention(x, keys, keys, **masks)
        return out.transpose(0, 1) if not self.first else out + weights.sum(-1, keepdim=True)


@TORCH.member
def multihead_time_first() -> nn.Module:
    return OwnAttention()


@TORCH.member
def multihead_batch_first() -> nn.Module:
    return OwnAttention(batch_first=True, masks=True)


@TORCH.member
def multihead_of_other_widths() -> nn.Module:
    return OwnAttention(other=4, bias=False)


@TORCH.member
def multihead_with_learned_keys() -> nn.Module:
    return OwnAttention(batch_first=True, add_bias_kv=True, add_zero_attn=True)


@TORCH.member
def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@TORCH.member
def encoder_norm_first() -> nn.Module:
    return nn.TransformerEncoderLayer(
        D, 2, 8, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )


@TORCH.member(inputs=lambda b: (sequence(b), sequence(b)[:, :3]))
def transformer() -> nn.Module:
    return nn.Transformer(D, 2, 1, 1, 8, dropout=0.0, batch_first=True)


# By hand


@HEADS.member
class MultiQuery(nn.Module):
    """One key of all heads, projected by raw matrices in einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            parameter(2, D, 3), parameter(D, 3), parameter(D, 3), parameter(2, 3, D)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("btd,hdk->bhtk", x, self.q)
        weights = torch.einsum("bhtk,bsk->bhts", q, x @ self.k).softmax(-1)
        return torch.einsum("bhts,bsv,hvd->btd", weights, x @ self.v, self.o)


@HEADS.member
class TalkingHeads(Attention):
    """Scores mixed over the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = parameter(2, 2)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("gh,bhij->bgij", self.mix, q @ k.mT)


@HEADS.member
class NullKey(nn.Module):
    """A learned key and value beside those of the batch; a gate of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.null, self.gate = parameter(2, D), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        null_k, null_v = self.null[:, None, None].expand(2, len(x), 1, D).unbind(0)
        k, v = torch.cat([null_k, k], 1), torch.cat([null_v, v], 1)
        return x + self.gate.tanh() * F.scaled_dot_product_attention(self.q(x), k, v)


@HEADS.member
class MaskOfParameters(nn.Module):
    """A float mask of parameters in scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(D, 3 * D), parameter(T, T)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 3).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return out.transpose(1, 2).flatten(2)


@HEADS.member
class Latents(nn.Module):
    """Perceiver: learned latents ask the batch, twice, with one block."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.q, self.kv = parameter(2, D), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        latents = self.latents[None].expand(len(x), -1, -1)
        for _ in range(2):
            latents = latents + (self.q(self.norm(latents)) @ k.mT).softmax(-1) @ v
        return latents


@HEADS.member
class Slots(nn.Module):
    """Slot attention: normalized over the slots, a GRU cell over folded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.kv, self.gru = parameter(1, 3, D), nn.Linear(D, 2 * D), nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        slots = self.start.expand(len(x), -1, -1)
        for _ in range(2):
            share = (slots @ k.mT).softmax(1)
            update = (share / share.sum(-1, keepdim=True)) @ v
            slots = self.gru(update.reshape(-1, D), slots.reshape(-1, D)).view_as(slots)
        return slots
