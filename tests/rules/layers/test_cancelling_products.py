"""Products that cancel along positions: what is summed must be what the norm was taken of.

One large vector at every position under gradients that add up to nearly nothing: two float32 products
of the same operands, cut or ordered differently, then differ by tens of times what is left. The norm
bounds the contribution only if the sum adds up the very numbers that were normed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip import FastPrivacyEngine, ops
from fastclip.ops.planner import Planner
from fastclip.rules import KeptRecord, LinearRecord, LookupRecord, Record, joint_record
from fastclip.rules.contraction import GroupedRecord, ProductRecord, RoutedRecord
from fastclip.rules.contribution import FoldedRecord
from fastclip.rules.records import ConvRecord, ViewedRecord
from fastclip.rules.reuse import RegionsRecord, geometry_of
from fastclip.samples.batch_axis import BatchAxis
from tests import oracle
from tests.units import unit_samples

ROUNDING = 1e-6
LENGTHS = [384, 2048, 4096]
EVERYTHING = Planner(memory_factor=0.0)
POINTWISE = ops.ConvGeometry((1, 1, 1), (1,), (0,), (1,), 1)
WIDE = ops.ConvGeometry((1, 1, 3), (1,), (1,), (1,), 1)


def canceling(t: int, seed: int) -> tuple[Tensor, Tensor]:
    """a and g [1, t, 1]: one number everywhere, under ones and what takes them back."""
    generator = torch.Generator().manual_seed(seed)
    a = (1 + torch.rand(1, generator=generator)).expand(1, t, 1).contiguous()
    last = t // (3 + seed % 7)
    g = torch.ones(1, t, 1)
    g[:, t - last :] = -(t - last) / last
    g = g * (0.5 + torch.rand(1, generator=generator))
    return a, g.flip(1).contiguous() if seed % 2 else g


def _linear(a: Tensor, g: Tensor) -> Record:
    return LinearRecord(a, g, ghost=False)


def _twice(a: Tensor, g: Tensor) -> Record:
    half = a.shape[1] // 2
    uses = zip(a.split(half, 1), g.split(half, 1), strict=True)
    return joint_record([LinearRecord(*use, ghost=False) for use in uses], EVERYTHING)


def _mixed(a: Tensor, g: Tensor) -> Record:
    """A linear use and gradients that were computed outright."""
    kept = KeptRecord(torch.full((1, 1, 1), 1e-5))
    return joint_record([LinearRecord(a, g, ghost=True), kept], EVERYTHING)


def _tied(a: Tensor, g: Tensor) -> Record:
    table = LookupRecord.from_dense(torch.zeros(1, 1, dtype=torch.int64), g[:, :1] * 1e-6, 1)
    return joint_record([LinearRecord(a, g, ghost=False), table], EVERYTHING)


def _units(a: Tensor, g: Tensor) -> Record:
    rows = (x.view(8, -1, 1) for x in (a, g))
    return LinearRecord(*rows, ghost=False).of_units(unit_samples([0] * 8, "sum"))


def _scattered(a: Tensor, g: Tensor) -> Record:
    """Rows of two units that are not side by side, one of which has nothing."""
    rows = [torch.stack([x.view(8, -1, 1), torch.zeros(8, x.shape[1] // 8, 1)], 1) for x in (a, g)]
    both = (x.flatten(0, 1) for x in rows)
    return LinearRecord(*both, ghost=False).of_units(unit_samples([0, 1] * 8, "sum"))


def _units_twice(a: Tensor, g: Tensor) -> Record:
    units, half = unit_samples([0] * 4, "sum"), a.shape[1] // 2
    uses = zip(a.split(half, 1), g.split(half, 1), strict=True)
    records = [
        LinearRecord(x.reshape(4, -1, 1), y.reshape(4, -1, 1), ghost=False).of_units(units)
        for x, y in uses
    ]
    return joint_record(records, EVERYTHING)


def _conv(geometry: ops.ConvGeometry) -> Callable[[Tensor, Tensor], Record]:
    return lambda a, g: ConvRecord(a.mT, g.mT, geometry, ghost=False)


def _conv_units(a: Tensor, g: Tensor) -> Record:
    rows = (x.view(8, 1, -1) for x in (a, g))
    return ConvRecord(*rows, WIDE, ghost=False).of_units(unit_samples([0] * 8, "sum"))


def _routed(a: Tensor, g: Tensor) -> Record:
    owner = torch.zeros(a.shape[1], dtype=torch.int64)
    return RoutedRecord(a[0], g[0], owner, batch=1)


def _grouped(a: Tensor, g: Tensor) -> Record:
    owner = torch.zeros(a.shape[1], dtype=torch.int64)
    return GroupedRecord(
        a[0], g[0], owner, owner, batch=1, members=1, total=lambda x, y: (x.mT @ y)[None]
    )


def _einsum(a: Tensor, g: Tensor) -> Record:
    return ProductRecord([g, a], ["btp", "btd"], "b", "pd")


def _folded(a: Tensor, g: Tensor) -> Record:
    rows = (x.view(8, -1, 1) for x in (a, g))
    return FoldedRecord(LinearRecord(*rows, ghost=True), BatchAxis(0, 1, 8), 1)


def _regions(a: Tensor, g: Tensor) -> Record:
    """Two parts of a parameter with a common entry."""
    whole, half = torch.zeros(3), a.shape[1] // 2
    uses = zip(a.split(half, 1), g.split(half, 1), strict=True)
    parts = [whole[:2], whole[1:]]
    records = [
        (geometry_of(part, whole), LinearRecord(x.expand(-1, -1, 2).contiguous(), y, ghost=True))
        for part, (x, y) in zip(parts, uses, strict=True)
    ]
    viewed = [(geometry, ViewedRecord(record, torch.Size([2]))) for geometry, record in records]
    return RegionsRecord(whole.shape, viewed, EVERYTHING)


KINDS: dict[str, Callable[[Tensor, Tensor], Record]] = {
    "linear": _linear, "twice": _twice, "mixed": _mixed, "tied": _tied, "units": _units,
    "scattered units": _scattered, "units twice": _units_twice, "pointwise": _conv(POINTWISE),
    "conv": _conv(WIDE), "conv of units": _conv_units, "routed": _routed, "grouped": _grouped,
    "einsum": _einsum, "folded": _folded, "regions": _regions,
}  # fmt: skip


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_record(kind: str, t: int) -> None:
    for seed in range(12):
        record = KINDS[kind](*canceling(t, seed))
        norms = record.norm_sq().sqrt()
        threshold = 0.3 * norms[0].item()
        scale = (threshold / norms).clamp_max(1).nan_to_num()
        contribution = record.clipped_sum(scale).double().norm().item()
        assert contribution <= threshold * (1 + ROUNDING)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,pd->btp", x, self.weight)


class Folded(nn.Module):
    """Rows of a sample as samples of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(len(x) * 8, 1, -1)).reshape(x.shape)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(half) for half in x.chunk(2, 1)], 1)


MODELS = {
    "linear": lambda: nn.Linear(1, 1, bias=False), "einsum": Einsum, "folded": Folded,
    "twice": Twice,
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through the engine, with planners that keep and that do not."""
    planner = Planner() if keeps else EVERYTHING
    monkeypatch.setattr(oracle, "FastPrivacyEngine", lambda: FastPrivacyEngine(planner=planner))
    for seed in range(6):
        a, g = canceling(4096, seed)
        model = MODELS[name]()
        _, private, _, _ = oracle.make_private(model, max_grad_norm=1e-4, loss_reduction="sum")
        (private(a) * g).sum().backward()
        sums = oracle.summed(dict(model.named_parameters())).values()
        contribution = torch.cat([s.double().flatten() for s in sums]).norm().item()
        assert contribution <= 1e-4 * (1 + ROUNDING)
