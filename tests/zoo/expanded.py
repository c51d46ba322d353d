"""Parameters of all samples, expanded, repeated, concatenated; in lists; written in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, T, words

EXPANDED = Family("expanded")
LISTS = Family("lists")
WRITES = Family("writes")


@EXPANDED.member
class Positions(nn.Module):
    """x + p[:, :t]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = parameter(1, T + 3, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table[:, : x.shape[1]])


@EXPANDED.member
class ClassToken(nn.Module):
    """cat([p.expand(b, -1, -1), x]), and positions for all."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table, self.layer = (
            parameter(1, 1, D),
            parameter(1, T + 1, D),
            nn.Linear(D, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.table
        return self.layer(tokens.tanh())


@EXPANDED.member
class OnlyTheToken(nn.Module):
    """A head on the class token: most of the sequence has a gradient through attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = parameter(1, 1, D), parameter(1, T + 1, D)
        self.qkv, self.head = nn.Linear(D, 3 * D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.table
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head((x + F.scaled_dot_product_attention(q, k, v))[:, 0])


@EXPANDED.member
class RepeatedQueries(nn.Module):
    """repeat, stack and repeat_interleave, with layers on what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.memory, self.start = parameter(3, D), parameter(2, D), parameter(D)
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b = len(x)
        queries = self.q(self.queries[None].repeat(b, 1, 1))
        memory = self.k(torch.stack([self.memory] * b))
        start = self.start[None].repeat_interleave(b, 0)[:, None]
        keys = torch.cat([memory, x, start], 1)
        return (queries @ keys.mT).softmax(-1) @ keys


@EXPANDED.member
class QueriesThroughLayers(nn.Module):
    """Learned queries pass a layer before they meet the batch; the same layer sees the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.layer, self.norm = parameter(1, 3, D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(self.layer(self.queries))
        return (queries @ self.layer(x).mT).softmax(-1) @ x


@EXPANDED.member
class BroadcastTo(nn.Module):
    """broadcast_to, expand_as, broadcast_tensors, unsqueeze."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = parameter(D), parameter(T, 1), parameter(T, D)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.broadcast_to(self.a, x.shape) * x + self.b.expand_as(x)
        one, other = torch.broadcast_tensors(self.c, y)
        return torch.tanh(one * other) + self.c.unsqueeze(0)


@EXPANDED.member
class Interpolated(nn.Module):
    """A position table resized to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = parameter(1, D, 3), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = F.interpolate(self.table, size=x.shape[1], mode="linear", align_corners=False)
        return self.layer(torch.tanh(x + table.transpose(1, 2)))


@EXPANDED.member
class InitialState(nn.Module):
    """A learned state of a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.layer = parameter(1, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.state.expand(len(x), -1)
        for step in x.unbind(1):
            h = torch.tanh(self.layer(torch.cat([step, h], -1)))
        return h


@EXPANDED.member
class Prompt(nn.Module):
    """A prompt made by an embedding and a small network, of constants alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, D)
        self.net = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D))
        self.register_buffer("ids", torch.arange(3))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.net(self.words(self.ids))[None].expand(len(x), -1, -1)
        x = torch.cat([prompt, x], 1)
        return self.head(x * x.mean(1, keepdim=True))


@EXPANDED.member
class MaskToken(nn.Module):
    """where(mask, p, x) and a mask of every row."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = parameter(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x[..., :1] > 0.3
        return self.layer(torch.where(hidden, self.token, x).tanh())


@EXPANDED.member
class BatchLastExpanded(nn.Module):
    """expand to [d, t, b]."""

    def __init__(self) -> None:
        super().__init__()
        self.p = parameter(D, T, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.p.expand(-1, -1, len(x)).permute(2, 1, 0) * x).tanh()


# Lists


@LISTS.member
class Matrices(nn.Module):
    """A ParameterList in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([parameter(D, D) for _ in range(3)])
        self.biases = nn.ParameterList([parameter(D) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for w, b in zip(self.layers, self.biases, strict=True):
            x = torch.tanh(x @ w + b)
        return x


@LISTS.member
class Dictionary(nn.Module):
    """A ParameterDict, some of it unused, some by key of the position."""

    def __init__(self) -> None:
        super().__init__()
        held = {"scale": parameter(D), "shift": parameter(D), "unused": parameter(D)}
        self.held = nn.ParameterDict(held | {f"t{i}": parameter(D) for i in range(T)})

    def forward(self, x: Tensor) -> Tensor:
        steps = [step * self.held[f"t{i}"] for i, step in enumerate(x.unbind(1))]
        return torch.stack(steps, 1) * self.held["scale"] + self.held["shift"]


@LISTS.member
class Stacked(nn.Module):
    """torch.stack of a list of parameters, and cat."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([parameter(D) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        w = torch.stack(list(self.rows))
        return torch.tanh(x @ w.T) + torch.cat(tuple(self.rows)).view(4, D).sum(1)


@LISTS.member
class PlainList(nn.Module):
    """Parameters registered one by one, and held in a list of Python too."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(2):
            self.register_parameter(f"p{i}", parameter(D))

    def forward(self, x: Tensor) -> Tensor:
        held = [getattr(self, f"p{i}") for i in range(2)]
        return torch.tanh(x * held[0]) * held[1] + held[0]


@LISTS.member
class Ensemble(nn.Module):
    """BatchEnsemble: r and s of each member, chosen in a loop, one layer for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)
        self.r, self.s = parameter(2, D), parameter(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x * self.r[i]) * self.s[i] for i in range(2)], 1).tanh()


# Writes in place


@WRITES.member
class FirstPosition(nn.Module):
    """x[:, 0] = p."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.layer = parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h[:, 0] = self.p
        return (h * h.mean(1, keepdim=True)).tanh()


@WRITES.member
class Buffer(nn.Module):
    """buf = zeros; buf[...] = what parameters and the batch give."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.layer = parameter(D), parameter(2, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(len(x), T + 3, D, dtype=x.dtype)
        buffer[:, 0] = self.p
        buffer[:, 1:3] = self.q
        buffer[:, 3:] = self.layer(x)
        return (buffer * buffer.mean(1, keepdim=True)).tanh()


@WRITES.member
class AddedInPlace(nn.Module):
    """add_, mul_, sub_ and += on what the batch gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.layer = (*(parameter(D) for _ in range(3)), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h.add_(self.a)
        h *= self.b
        h -= 0.5 * self.c
        h[:, 1] += self.a
        return h.tanh_()


@WRITES.member
class AlphaInPlace(nn.Module):
    """add_ with alpha, addcmul_, lerp_, div_."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.layer = parameter(D), parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h.add_(self.a, alpha=0.3)
        h.addcmul_(self.a, x, value=2.0)
        h.lerp_(self.b.expand_as(h), 0.25)
        return h.div_(1.5 + self.b.square())


@WRITES.member
class MaskedRows(nn.Module):
    """x[mask] = p, of a mask that differs from row to row."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.layer = parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h[x[..., 0] > 0.2] = self.p
        return (h * h.mean(1, keepdim=True)).tanh()


@WRITES.member
class ScatteredColumns(nn.Module):
    """index_copy, index_add, scatter with parameters as the source, over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parameter(2, D), parameter(2, D)
        self.register_buffer("at", torch.tensor([0, 3]))

    def forward(self, x: Tensor) -> Tensor:
        h = x.tanh().index_copy(1, self.at, self.a.expand(len(x), 2, D))
        h = h.index_add(1, self.at, self.b.expand(len(x), 2, D))
        return h * h.mean(1, keepdim=True)


@WRITES.member(inputs=words)
class TableWritten(nn.Module):
    """A table that is put together in place, of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.new = parameter(8, D), parameter(3, D)

    def forward(self, ids: Tensor) -> Tensor:
        table = torch.zeros(11, D, dtype=self.known.dtype)
        table[:8] = self.known
        table[8:] = self.new
        return F.embedding(ids, table).tanh()
