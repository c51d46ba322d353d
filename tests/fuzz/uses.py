"""Parts that use parameters outside layers: functions, derived values, folds, routing, writes, tuples.

Every part maps [b, t, d] to [b, t, d]; what it is made of is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

D, EXPERTS = 4, 3


def raw(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.6 * torch.randn(shape))


# Derived values: a chain of functions of parameters, drawn

_OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda w: (0.3 * w).exp(),
    "tanh": torch.tanh,
    "transposed": lambda w: w.T,
    "normalized": lambda w: F.normalize(w, dim=-1),
    "softmax": lambda w: w.softmax(-1),
    "triangle": torch.tril,
    "over its norm": lambda w: w / w.norm(),
    "summed up": lambda w: w.cumsum(0),
    "flipped": lambda w: w.flip(0),
    "itself": lambda w: w,
}
_OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda w, v: w + v,
    "product": lambda w, v: w * v,
    "matrix product": lambda w, v: w @ v,
    "half and half": lambda w, v: torch.cat([w[:2], v[2:]]),
    "rows of the other": lambda w, v: w[v[:, 0].argsort()],
}


def _written(w: Tensor, v: Tensor) -> Tensor:
    w = w * 1
    w[0] = v[1]
    w[:, 1] += v[2]
    return w


class Chain(nn.Module):
    """A matrix [d, d] made of two parameters by functions that are drawn."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.a, self.b = raw(D, D), raw(D, D)
        self.steps = [draw.choice(sorted(_OF_ONE)) for _ in range(draw.randint(0, 2))]
        self.other = draw.choice([None, "in place", *sorted(_OF_TWO)])

    def forward(self) -> Tensor:
        w: Tensor = self.a
        for step in self.steps:
            w = _OF_ONE[step](w)
        if self.other is None:
            return w
        return (_written if self.other == "in place" else _OF_TWO[self.other])(w, self.b)


_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "einsum": lambda x, w: torch.einsum("btd,de->bte", x, w),
    "scale": lambda x, w: x * w[1] + w.sum(0),
    "norm": lambda x, w: F.layer_norm(x, (D,), w[0], w[1]),
    "looked up": lambda x, w: w[(x[..., 0] > 0).long() + (x[..., 1] > 0).long()] * x,
    "embedding": lambda x, w: F.embedding((x[..., 0] > 0).long(), w) + x,
    "prototypes": lambda x, w: (x @ w.T).softmax(-1) @ w,
    "expanded": lambda x, w: x + w[0].expand(len(x), x.shape[1], D),
    "concatenated": lambda x, w: torch.cat([x, w[0].expand(*x.shape[:-1], D)], -1)[..., 2:-2],
    "where": lambda x, w: torch.where(x[..., :1] > 0, w[2], x),
    "convolution": lambda x, w: F.conv1d(x.mT, w[:, :, None], w[3]).mT,
    "filter": lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w[0]), n=D),
    "by rows": lambda x, w: torch.stack([row @ w for row in x]) if len(x) else x @ w,
    "by time": lambda x, w: torch.stack([step @ w for step in x.unbind(1)], 1),
    "power": lambda x, w: (x * x + 1) ** w[0].tanh(),
}  # fmt: skip
_FOLDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": (lambda x: x, lambda y, x: y),
    "sample-major": (lambda x: x.reshape(-1, 1, D), lambda y, x: y.reshape(x.shape)),
    "time-major": (
        lambda x: x.transpose(0, 1).reshape(-1, 1, D),
        lambda y, x: y.reshape(x.shape[1], x.shape[0], D).transpose(0, 1),
    ),
    "time first": (lambda x: x.transpose(0, 1), lambda y, x: y.transpose(0, 1)),
    "twice as many": (
        lambda x: torch.stack([x, -x], 1).flatten(0, 1),
        lambda y, x: y.unflatten(0, (len(x), 2)).sum(1),
    ),
    "between": (
        lambda x: torch.stack([x, -x]).permute(2, 1, 0, 3).reshape(-1, 1, D),
        lambda y, x: y.reshape(x.shape[1], x.shape[0], 2, D).sum(2).transpose(0, 1),
    ),
}


class Use(nn.Module):
    """A derived value, or a parameter, meets the batch, folded or not."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.chain = Chain(draw)
        self.use, self.fold = draw.choice(sorted(_USES)), draw.choice(sorted(_FOLDS))
        self.again = draw.choice([None, *sorted(_USES)])

    def __repr__(self) -> str:
        made = [*self.chain.steps, self.chain.other or "alone"]
        return f"{self.fold}: {self.use}, {self.again} of {' '.join(made)}"

    def forward(self, x: Tensor) -> Tensor:
        fold, unfold = _FOLDS[self.fold]
        folded, w = fold(x), self.chain()
        folded = torch.tanh(_USES[self.use](folded, w))
        if self.again is not None:
            folded = torch.tanh(_USES[self.again](folded, w))
        return unfold(folded, x)


# Routing


class Routed(nn.Module):
    """A mixture of experts over positions, or over rows, of a kind that is drawn."""

    KINDS = ("index_add", "mask", "sorted", "slices", "batched", "gathered", "rows", "in a loop")

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind, self.router = draw.choice(self.KINDS), nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
        self.w = raw(EXPERTS, D, D)
        self.pre = draw.random() < 0.5

    def __repr__(self) -> str:
        return f"experts: {self.kind}"

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x) if self.pre else x
        if self.kind in ("rows", "in a loop"):
            return h + self._by_row(h, self.router(h.mean(1)).argmax(-1))
        rows = h.reshape(-1, D)
        share, chosen = self.router(rows).softmax(-1).max(-1)
        return (rows + self._mixed(rows, chosen) * share[:, None]).view(x.shape)

    def _by_row(self, h: Tensor, chosen: Tensor) -> Tensor:
        if self.kind == "in a loop":
            found = [self.experts[e](row) for e, row in zip(chosen.tolist(), h, strict=True)]
            return torch.stack(found) if found else h
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at = torch.where(chosen == e)[0]
            out[at] = expert(h[at])
        return out

    def _mixed(self, rows: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        if self.kind == "batched":
            every = torch.bmm(rows.expand(EXPERTS, -1, -1), self.w)
            return torch.einsum("end,ne->nd", every, F.one_hot(chosen, EXPERTS).to(rows.dtype))
        if self.kind == "gathered":
            return torch.bmm(rows[:, None], self.w[chosen])[:, 0]
        if self.kind == "sorted":
            order = chosen.argsort(stable=True)
            parts = rows[order].split(torch.bincount(chosen, minlength=EXPERTS).tolist())
            found = [e(part) for e, part in zip(self.experts, parts, strict=True)]
            return torch.cat(found)[order.argsort()]
        for e, expert in enumerate(self.experts):
            if self.kind == "mask":
                mask = chosen == e
                out[mask] = expert(rows[mask])
                continue
            at = torch.where(chosen == e)[0]
            given = rows[at] @ self.w[e] if self.kind == "slices" else expert(rows[at])
            out = out.index_add(0, at, given)
        return out


# Writes in place


class Written(nn.Module):
    """Parameters written into what the batch gave, or into zeros."""

    KINDS = ("first", "buffer", "added", "masked", "multiplied")

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind, self.p, self.layer = draw.choice(self.KINDS), raw(D), nn.Linear(D, D)

    def __repr__(self) -> str:
        return f"written: {self.kind}"

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.kind == "first":
            h[:, 0] = self.p
        elif self.kind == "buffer":
            buffer = torch.zeros_like(x)
            buffer[:, 0] = self.p
            buffer[:, 1:] = h[:, 1:]
            h = buffer
        elif self.kind == "added":
            h.add_(self.p)
            h[:, -1] -= 0.5 * self.p
        elif self.kind == "masked":
            h[x[..., 0] > 0] = self.p
        else:
            h *= self.p
        return torch.tanh(h + h.mean(1, keepdim=True))


# Position tables


class Table(nn.Module):
    """Attention with a bias of distances, from a parameter, an embedding or a network."""

    KINDS = ("raw", "embedding", "network", "keys", "gathered")

    def __init__(self, t: int, draw: random.Random) -> None:
        super().__init__()
        self.kind, self.qkv = draw.choice(self.KINDS), nn.Linear(D, 3 * D)
        wide = D if self.kind in ("keys", "gathered") else 1
        self.table = raw(2 * t - 1, wide) if self.kind == "raw" else nn.Embedding(2 * t - 1, wide)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))

    def __repr__(self) -> str:
        return f"table: {self.kind}"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        t = x.shape[1]
        steps = torch.arange(t)
        apart = steps[None] - steps[:, None] + t - 1
        if self.kind == "raw":
            bias = self.table[apart][..., 0]
        elif self.kind == "embedding":
            bias = self.table(apart)[..., 0]
        elif self.kind == "network":
            bias = self.net(apart.to(x.dtype)[..., None])[..., 0]
        elif self.kind == "keys":
            bias = torch.einsum("bid,ijd->bij", q, self.table(apart))
        else:
            scores = q @ self.table.weight.T
            bias = scores.gather(-1, apart.expand(len(x), -1, -1))
        return ((q @ k.mT + bias).softmax(-1) @ v).tanh()


# Tuples


class Pair(nn.Module):
    """(a, b) -> (a', b'): several tensors in and out, without a rule."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind = draw.choice(["rotated", "gated", "crossed", "swapped"])
        self.p, self.w = raw(D), raw(D, D)

    def forward(self, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
        a, b = pair
        if self.kind == "rotated":
            return a * self.p.cos() - b * self.p.sin(), a * self.p.sin() + b * self.p.cos()
        if self.kind == "gated":
            return a * torch.sigmoid(b * self.p), b + scale * a @ self.w
        if self.kind == "crossed":
            return (a @ self.w @ b.mT).softmax(-1) @ b, a - self.p
        return b + self.p, a


class Pairs(nn.Module):
    """Several of them in a row."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.split = nn.Linear(D, 2 * D)
        self.parts = nn.Sequential(*(Pair(draw) for _ in range(draw.randint(1, 3))))

    def __repr__(self) -> str:
        return f"pairs: {[part.kind for part in self.parts]}"

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(self.split(x).chunk(2, -1))
        return torch.tanh(a + b)


class Tied(nn.Module):
    """One layer for the batch, its weight for the way back and for a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.register_buffer("table", torch.randn(1, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.layer.weight + self.layer(self.table)


def apart(t: int, draw: random.Random) -> dict[str, Callable[[], nn.Module]]:
    """Parts that keep rows apart."""
    return {
        "use": lambda: Use(draw),
        "another use": lambda: Use(draw),
        "one more use": lambda: Use(draw),
        "routed": lambda: Routed(draw),
        "written": lambda: Written(draw),
        "table": lambda: Table(t, draw),
        "pairs": lambda: Pairs(draw),
        "tied": Tied,
        "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    }


# Coupling that meets a parameter


class Coupled(nn.Module):
    """A function of a parameter and the batch in which rows are not apart."""

    def __init__(self, kind: str, strength: float) -> None:
        super().__init__()
        self.kind, self.strength = kind, strength
        self.p, self.rows, self.w = raw(D), raw(16, D), raw(D, D)

    def forward(self, x: Tensor) -> Tensor:
        s, p = self.strength, self.p
        if self.kind == "mean by a parameter":
            return x + s * p * x.mean(0)
        if self.kind == "detached mean by a parameter":
            return x + s * p * x.detach().mean(0)
        if self.kind == "number in a derived value":
            return x * (p * (1 + s * float(x.detach().abs().max())))
        if self.kind == "statistic in a derived value":
            return x @ (self.w * (1 + s * x.detach().mean((0, 1))))
        if self.kind == "half by a parameter":
            half = (len(x) + 1) // 2
            return torch.cat([x[:half], x[half:] * (1 + s * p)])
        if self.kind == "parameter of a row":
            return x + s * self.rows[: len(x), None]
        if self.kind == "number of the row":
            return x + s * torch.arange(len(x), dtype=x.dtype)[:, None, None] * p
        if self.kind == "number of rows in a derived value":
            return x * (p * (1 + s / len(x)))
        if self.kind == "wrong fold":
            return (x.transpose(0, 1).reshape(-1, D) @ self.w).view(x.shape)
        weights = torch.softmax(s * (x.mean(1) * p) @ x.mean(1).T, -1)
        return torch.einsum("bc,ctd->btd", weights, x)


KINDS = (
    "mean by a parameter", "detached mean by a parameter", "number in a derived value",
    "statistic in a derived value", "half by a parameter", "parameter of a row", "number of the row",
    "number of rows in a derived value", "wrong fold", "attention to rows",
)  # fmt: skip


def coupling(strength: float) -> dict[str, Callable[[], nn.Module]]:
    """Parts in which a row depends on others, on its number, or on how many there are."""
    return {kind: lambda kind=kind: Coupled(kind, strength) for kind in KINDS}  # type: ignore[misc]
