"""Mixtures of experts: rows are gathered, sorted, sent to one of several parameters, and put back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, words

EXPERTS = Family("experts")
E = 3


class Experts(nn.Module):
    """A router over tokens; subclasses compute what the experts give [n, d] of rows [n, d]."""

    k = 1

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        """rows [n, d], share and chosen [n, k]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        rows = h.reshape(-1, D)
        share, chosen = self.router(rows).softmax(-1).topk(self.k, -1)
        return self.last(
            h + self.mixed(rows, share / share.sum(-1, keepdim=True), chosen).view(x.shape)
        )


class Layers(Experts):
    """Experts are a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 4), nn.ReLU(), nn.Linear(4, D)) for _ in range(E)
        )


class Tensors(Experts):
    """Experts are raw tensors [e, ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = parameter(E, D, 4), parameter(E, 4, D), parameter(E, D)


@EXPERTS.member
class IndexAdd(Layers):
    """Mixtral of old: where, index, index_add."""

    k = 2

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        mask = F.one_hot(chosen, E).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, (expert(rows[token]) * share[token, slot, None]).to(out.dtype))
        return out


@EXPERTS.member
class BooleanMask(Layers):
    """out[mask] = expert(rows[mask])."""

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = chosen[:, 0] == e
            if mask.any():
                out[mask] = expert(rows[mask]) * share[mask]
        return out


@EXPERTS.member
class IndexSelect(Layers):
    """nonzero, index_select, index_copy; experts that no token chose are skipped."""

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = rows.clone()
        for e, expert in enumerate(self.experts):
            at = (chosen[:, 0] == e).nonzero().squeeze(-1)
            if not at.numel():
                continue
            out = out.index_copy(0, at, expert(rows.index_select(0, at)))
        return out * share


@EXPERTS.member
class SortSplit(Layers):
    """DeepSeek: sorted by expert, split by counts, put back by the inverse order."""

    k = 2

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=E).tolist()
        parts = rows[order // self.k].split(counts)
        out = torch.cat([e(part) for e, part in zip(self.experts, parts, strict=True) if len(part)])
        back = torch.empty_like(out)
        back[order] = out
        return (back.view(*chosen.shape, D) * share[..., None]).sum(1)


@EXPERTS.member
class SlicesOfTensors(Tensors):
    """GptOss and Llama4: up[e] with the rows that chose it."""

    k = 2

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in range(E):
            token, slot = torch.where(chosen == e)
            h = torch.tanh(rows[token] @ self.up[e]) @ self.down[e] + self.bias[e]
            out.index_add_(0, token, (h * share[token, slot, None]).to(out.dtype))
        return out


@EXPERTS.member
class LoopOverHits(Tensors):
    """Mixtral of today: the number of the expert is a tensor, one of those that any token chose."""

    k = 2

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        mask = F.one_hot(chosen, E).permute(2, 1, 0)
        for e in mask.sum((-1, -2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[e])
            h = torch.tanh(rows[token] @ self.up[e]) @ self.down[e]
            out.index_add_(0, token, (h * share[token, slot, None]).to(out.dtype))
        return out


@EXPERTS.member
class Batched(Tensors):
    """Every expert sees every row: bmm, and the shares are mostly zero."""

    k = 2

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        weights = torch.zeros(len(rows), E, dtype=rows.dtype).scatter(1, chosen, share)
        h = torch.bmm(rows.expand(E, -1, -1), self.up).tanh()
        return torch.einsum("end,ne->nd", torch.bmm(h, self.down) + self.bias[:, None], weights)


@EXPERTS.member
class EinsumDispatch(Tensors):
    """GShard: one-hot dispatch and combine tensors; the capacity is what a sequence can fill."""

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        rows = rows.view(-1, 5, D)
        mask = F.one_hot(chosen.view(-1, 5), E).to(rows.dtype)
        position = (mask.cumsum(1) * mask).long() - 1
        dispatch = F.one_hot(position.clamp(min=0), 5) * mask[..., None]
        inside = torch.einsum("btec,btd->ebcd", dispatch, rows)
        h = torch.einsum("ebcd,edf->ebcf", inside, self.up).relu()
        h = torch.einsum("ebcf,efd->ebcd", h, self.down)
        return torch.einsum("ebcd,btec->btd", h, dispatch * share.view(-1, 5, 1, 1))


@EXPERTS.member
class WeightsOfTokens(Tensors):
    """up[chosen]: a weight gathered for every token."""

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        e = chosen[:, 0]
        h = torch.bmm(rows[:, None], self.up[e]).tanh()
        return (torch.bmm(h, self.down[e])[:, 0] + self.bias[e]) * share


@EXPERTS.member
class CapacityOfAll(Layers):
    """A capacity that never drops: buffers [e, n, d] filled by index_put."""

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        e = chosen[:, 0]
        mask = F.one_hot(e, E)
        place = (mask.cumsum(0) * mask).sum(1) - 1
        buffer = torch.zeros(E, len(rows), D, dtype=rows.dtype)
        buffer[e, place] = rows
        out = torch.stack([expert(part) for expert, part in zip(self.experts, buffer, strict=True)])
        return out[e, place] * share


@EXPERTS.member
class Columns(Tensors):
    """Rows of an expert are columns of what its products give: one row of them is of many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parameter(E)

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e in range(E):
            i = (chosen[:, 0] == e).nonzero()[:, 0]
            made = torch.tanh(self.up[e].T @ rows[i].T) * self.up[e, 0, :, None] * self.one[e]
            made = torch.einsum("oi,in->on", self.down[e].T, made) + self.bias[e][:, None]
            out = out.index_copy(0, i, made.T)
        return out


@EXPERTS.member
class RowsRouted(Layers):
    """A whole sequence goes to one expert."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        chosen = self.router(h.mean(1)).argmax(-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            at = torch.where(chosen == e)[0]
            out[at] = expert(h[at])
        return self.last(out)


@EXPERTS.member
class RowByRow(Layers):
    """The same in a loop over rows."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        chosen = self.router(h.mean(1)).argmax(-1).tolist()
        return self.last(
            torch.stack([self.experts[e](row) for e, row in zip(chosen, h, strict=True)])
        )


@EXPERTS.member
class ExpertsChoose(Layers):
    """Every expert takes the tokens of a sequence that fit it best: gather and scatter_add."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        share, at = self.router(h).softmax(-1).mT.topk(2, -1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            index = at[:, e, :, None].expand(-1, -1, D)
            out = out.scatter_add(1, index, expert(h.gather(1, index)) * share[:, e, :, None])
        return self.last(out)


@EXPERTS.member
class Shared(SortSplit):
    """A shared expert beside the routed ones, with a gate; one layer deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.gate = nn.Linear(D, D), nn.Linear(D, 1)

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        routed = super().mixed(rows, share, chosen)
        return routed + torch.sigmoid(self.gate(rows)) * self.shared(rows).tanh()


@EXPERTS.member
def two_in_a_row() -> nn.Module:
    return nn.Sequential(IndexAdd(), nn.Tanh(), SlicesOfTensors())


@EXPERTS.member
class LoraOfTokens(Tensors):
    """An adapter of every task: scattered back from rows that were sorted."""

    def mixed(self, rows: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        order = chosen[:, 0].argsort(stable=True)
        ends = torch.bincount(chosen[:, 0], minlength=E).cumsum(0).tolist()
        found, begin = [], 0
        for e, end in enumerate(ends):
            found.append(rows[order[begin:end]] @ self.up[e] @ self.down[e])
            begin = end
        return torch.cat(found)[order.argsort()] * share


@EXPERTS.member(inputs=words)
class HashedWords(nn.Module):
    """Routed by the word, not by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            mask = ids % E == e
            out[mask] = expert(h[mask])
        return out.tanh()


@EXPERTS.member
class DepthsOfTokens(nn.Module):
    """Mixture of depths: two tokens of every row pass a block, the others go by."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.block = nn.Linear(D, 1), nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        weights, at = self.score(x).squeeze(-1).topk(2, 1)
        index = at[..., None].expand(-1, -1, D)
        inside = self.block(x.gather(1, index)) * weights[..., None]
        return x.scatter(1, index, inside)


@EXPERTS.member
class EarlyExit(nn.Module):
    """Rows that are sure leave; the others go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).mean(1)
        on = torch.where(h[:, 0] > 0)[0]
        h = h.clone()
        h[on] = torch.tanh(self.more(h[on]))
        return self.head(h)


@EXPERTS.member
class SortedByLength(nn.Module):
    """Rows ordered by length, as packed sequences are, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.head = nn.Linear(D, D), parameter(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort(descending=True)
        h = self.layer(x[order]).tanh() * self.scale
        return self.head(h[order.argsort()])
