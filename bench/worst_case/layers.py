"""Targets that are whole layers, through the engine: forward, one backward pass, what it has summed.

Index letters: b sample, t position, d input feature, p output feature.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.worst_case.genome import Choice, Count, Genome, Space
from bench.worst_case.operands import in_batch, pair, pair_genes
from bench.worst_case.products import BATCH_GENES, NOTHING_KEPT
from bench.worst_case.ratios import THRESHOLD_GENES, Ratios, of_parts, threshold_of
from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError
from fastclip.ops.planner import Planner


class Reused(nn.Module):
    """One linear map, over two halves of the positions."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, p)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(half) for half in x.tensor_split(2, 1)], 1)


class Einsum(nn.Module):
    """A product with a parameter that is no layer's."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(p, d))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,pd->btp", x, self.weight)


class Elementwise(nn.Module):
    """A scale and a shift."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Tied(nn.Module):
    """A table that is looked up, and applied to what is added: the same weight twice."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(p, d), nn.Linear(d, p, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]) % self.table.num_embeddings
        return self.head(x + self.table(ids.expand(x.shape[:2])))


class Table(nn.Module):
    """A table, at positions that are given by the size of the input."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.table = nn.Embedding(p, d)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]) % self.table.num_embeddings
        return self.table(ids.expand(x.shape[:2])) + 0 * x


class Grouped(nn.Module):
    """Two experts, each for half of the positions, in one grouped product."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16, 16))
        self.spread = nn.Parameter(torch.ones(d, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x @ self.spread).transpose(0, 1).reshape(-1, 16)
        half = len(rows) // 2
        if x.dtype == torch.float64:  # the reference: torch has it in no finer type than float32
            made = torch.cat([rows[:half] @ self.weight[0], rows[half:] @ self.weight[1]])
        else:
            ends = torch.tensor([half, len(rows)], dtype=torch.int32)
            made = torch._grouped_mm(rows, self.weight, offs=ends)
        return made.view(x.shape[1], x.shape[0], 16).transpose(0, 1)


class Channels(nn.Module):
    """A layer of channels first, over x [b, t, d]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


class Recurrent(nn.Module):
    """The outputs of an LSTM."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d, p, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Attention(nn.Module):
    """Self-attention, one head."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@dataclass(frozen=True)
class Case:
    """A layer of d input and p output features.

    Attributes:
        longest: of its positions. claims: its norms are never below those of float64 autograd, however
            they are computed. product: its gradient is one of what is put in.
        dtypes: that it is run in.
    """

    build: Callable[[int, int], nn.Module]
    longest: int = 512
    claims: bool = False
    product: bool = False
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "float16", "float64")


_WIDE = ("float32", "float32", "float64")
CASES: dict[str, Case] = {
    "linear": Case(lambda d, p: nn.Linear(d, p, bias=False), product=True),
    "linear, bias": Case(nn.Linear),
    "conv": Case(lambda d, p: Channels(nn.Conv1d(d, p, 3, padding=1, bias=False)), 256),
    "embedding": Case(Table, claims=True),
    "tied": Case(Tied, dtypes=_WIDE),
    "reused": Case(Reused),
    "einsum": Case(Einsum, product=True),
    "grouped": Case(Grouped, 64, dtypes=("float32", "bfloat16")),
    "elementwise": Case(Elementwise),
    "layer norm": Case(lambda d, p: nn.LayerNorm(d)),
    "rms norm": Case(lambda d, p: nn.RMSNorm(d)),
    "group norm": Case(lambda d, p: Channels(nn.GroupNorm(1, d))),
    "lstm": Case(Recurrent, 8, dtypes=_WIDE),
    "attention": Case(Attention, 16, dtypes=_WIDE),
}


def space(case: Case) -> Space:
    """Genes of a layer and its operands."""
    return {
        **pair_genes(), **BATCH_GENES, **THRESHOLD_GENES, "dtype": Choice(case.dtypes),
        "clipping": Choice(("hard",)), "t": Count(1, case.longest), "d": Count(1, 16),
        "p": Count(1, 16), "keeps": Choice((False, True)),
    }  # fmt: skip


def measured(case: Case) -> Callable[[Genome], Ratios]:
    """The measure of one layer: once for the norm, once clipped far below it."""

    def measure(genome: Genome) -> Ratios:
        t, d, p, b = (genome[name] for name in ("t", "d", "p", "batch"))
        place = genome["place"] % b
        torch.manual_seed(genome["seed"])
        model = case.build(d, p)
        try:
            with torch.no_grad():
                width = model(torch.zeros(1, t, d)).shape[2]
        except ValueError as error:  # torch's GroupNorm takes no single value
            raise ArgumentError(f"the layer itself refuses its input: {error}") from error
        gradient = None
        if case.product:

            def gradient(x: Tensor, y: Tensor) -> Tensor:
                return y.mT @ x

        x, g = pair(genome, ((t, d), (t, width)), gradient)
        model = model.to(x.dtype)
        x_batch, g_batch = (in_batch(own, b, place) for own in (x, g))
        found, _ = passed(model, x_batch, g_batch, genome, 1.0)
        bound = threshold_of(genome, found[place].item())
        norms, sums = passed(model, x_batch, g_batch, genome, bound)
        exact = None
        if x.dtype != torch.float64:
            exact = alone(model, x[None].double(), g[None].double())
        about = f"x [{b}, {t}, {d}], output [{b}, {t}, {width}], {genome['dtype']}"
        return of_parts(norms[place].item(), sums, bound, exact, about)

    return measure


def passed(
    model: nn.Module, x: Tensor, g: Tensor, genome: Genome, bound: float
) -> tuple[Tensor, list[Tensor]]:
    """Norms [b] and clipped sums of one private pass, whose loss is <output, g>."""
    twin = copy.deepcopy(model)
    planner = Planner() if genome["keeps"] else NOTHING_KEPT
    optimizer: Any = torch.optim.SGD(twin.parameters(), lr=0.1)
    private, optimizer, _ = FastPrivacyEngine(planner=planner).make_private(
        module=twin, optimizer=optimizer, noise_multiplier=0.0, max_grad_norm=bound,
        data_loader=DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=len(x)),
        loss_reduction="sum", poisson_sampling=False,
    )  # fmt: skip
    (private(x) * g).sum().backward()
    sums = [getattr(p, "summed_grad", None) for p in twin.parameters()]
    return optimizer.per_sample_norms, [s for s in sums if s is not None]


def alone(model: nn.Module, x: Tensor, g: Tensor) -> float:
    """Norm of the gradient of one sample, float64, by ordinary autograd."""
    twin = copy.deepcopy(model).double()
    (twin(x) * g).sum().backward()
    grads = [p.grad.flatten() for p in twin.parameters() if p.grad is not None]
    return torch.cat(grads).norm().item()
