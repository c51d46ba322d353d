"""Targets whose gradient is g^T a: linear maps of every way and use, on operands made at will.

Index letters: b sample, t position, d input feature, p output feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.worst_case.genome import Choice, Count, Gene, Genome, Space
from bench.worst_case.operands import in_batch, pair, pair_genes
from bench.worst_case.ratios import THRESHOLD_GENES, Ratios, of_record
from fastclip import ops
from fastclip.ops.planner import NormMethod as Plan
from fastclip.ops.planner import Planner
from fastclip.ops.units import UnitSamples
from fastclip.rules import LinearRecord, LookupRecord, Record, joint_record
from fastclip.rules.contraction import GroupedRecord, ProductRecord, RoutedRecord
from fastclip.rules.contribution import FoldedRecord
from fastclip.rules.linear import linear_record
from fastclip.rules.records import ViewedRecord, kept_record
from fastclip.rules.reuse import RegionsRecord, geometry_of
from fastclip.samples.batch_axis import BatchAxis

BATCH_GENES: Space = {"batch": Choice((1, 1, 1, 2, 3)), "place": Choice((0, 1, 2))}
NOTHING_KEPT = Planner(memory_factor=0.0)
_MOST = 2**15
"""Numbers of an operand, from which on its rows are no longer than 16."""
Make = Callable[[Tensor, Tensor], Record]


class Keeps:
    """In the place of a layer's call: gradients are to be kept."""

    def __init__(self) -> None:
        self.last_input = ops.LastInput()

    def plan_linear(self, a: Tensor, g: Tensor, name: str = "weight") -> Plan:
        return Plan("keep", 0.0, 0)

    def plan_conv(self, x: Tensor, g: Tensor, geometry: Any, name: str = "weight") -> Plan:
        return Plan("keep", 0.0, 0)


def space(longest: int, widest: int = 4096) -> Space:
    """Genes of a linear map's operands, of at most so many positions and features."""
    sizes: dict[str, Gene] = {
        "t": Count(1, longest), "d": Count(1, widest), "p": Count(1, widest),
    }  # fmt: skip
    return {**pair_genes(), **sizes, **BATCH_GENES, **THRESHOLD_GENES}


def product(a: Tensor, g: Tensor) -> Tensor:
    """g^T a."""
    return g.mT @ a


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [b, t, n] cut in two along t, which is even."""
    first, second = x.chunk(2, 1)
    return first, second


def _linear(ghost: bool, transposed: bool = False) -> Make:
    return lambda a, g: LinearRecord(a, g, ghost=ghost, transposed=transposed)


def _kept(a: Tensor, g: Tensor) -> Record:
    return linear_record(Keeps(), a, g)  # type: ignore[arg-type]


def _twice(ghost: bool) -> Make:
    def make(a: Tensor, g: Tensor) -> Record:
        uses = zip(halves(a), halves(g), strict=True)
        planner = Planner() if ghost else NOTHING_KEPT
        return joint_record([LinearRecord(*use, ghost=ghost) for use in uses], planner)

    return make


def _mixed(a: Tensor, g: Tensor) -> Record:
    """One half as operands, the other as gradients that are there."""
    (a1, a2), (g1, g2) = halves(a), halves(g)
    kept = kept_record(*ops.kept_gradients(a2, g2, ops.LastInput()))
    return joint_record([LinearRecord(a1, g1), kept], NOTHING_KEPT)


def _routed(gram: bool) -> Make:
    def make(a: Tensor, g: Tensor) -> Record:
        (b, t), nobody = a.shape[:2], -1
        owner = torch.arange(b).repeat_interleave(t)
        rows = [torch.cat([x.flatten(0, 1), torch.full_like(x[0, :1], 7)]) for x in (a, g)]
        owner = torch.cat([owner, torch.tensor([nobody])])
        record = RoutedRecord(rows[0], rows[1], owner, batch=b)
        record.__dict__["instantiates"] = not gram
        return record

    return make


def _grouped(a: Tensor, g: Tensor) -> Record:
    """A stack of two maps; every row goes through the first."""
    b, t = a.shape[:2]
    owner, member = torch.arange(b).repeat_interleave(t), torch.zeros(b * t, dtype=torch.int64)

    def total(x: Tensor, y: Tensor) -> Tensor:
        own = ops.widen(x).mT @ y
        return torch.stack([own, torch.zeros_like(own)])

    rows = (a.flatten(0, 1), g.flatten(0, 1))
    return GroupedRecord(*rows, owner, member, batch=b, members=2, total=total)


def _einsum(a: Tensor, g: Tensor) -> Record:
    return ProductRecord([g, a], ["btp", "btd"], "b", "pd")


def _folded(a: Tensor, g: Tensor) -> Record:
    """Halves of a sample as rows of their own."""
    rows = (x.unflatten(1, (2, -1)).flatten(0, 1) for x in (a, g))
    return FoldedRecord(LinearRecord(*rows), BatchAxis(0, 1, 2), len(a))


def _units(ghost: bool, split: bool = False) -> Make:
    """A unit of two rows; with `split`, looked at twice."""

    def make(a: Tensor, g: Tensor) -> Record:
        b = len(a)
        owner = torch.arange(b).repeat_interleave(2)
        units = UnitSamples(owner, b, 2, "sum")
        rows = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in (a, g)]
        if not split:
            return LinearRecord(*rows, ghost=ghost).of_units(units)
        uses = zip(halves(rows[0]), halves(rows[1]), strict=True)
        records = [LinearRecord(*use, ghost=ghost).of_units(units) for use in uses]
        return joint_record(records, NOTHING_KEPT)

    return make


def _regions(a: Tensor, g: Tensor) -> Record:
    """Halves of the positions at two parts of a parameter that lie one on the other."""
    shape = torch.Size((g.shape[2] * a.shape[2],))
    whole = torch.zeros(shape)
    parts = [
        (geometry_of(whole[:], whole), ViewedRecord(LinearRecord(x, y), shape))
        for x, y in zip(halves(a), halves(g), strict=True)
    ]
    return RegionsRecord(shape, parts, NOTHING_KEPT)


def _tied(a: Tensor, g: Tensor) -> Record:
    """A table that is looked up, where a head takes nearly all of it back."""
    b, t, p = g.shape
    ids = (torch.arange(t) % p).expand(b, t)
    table = LookupRecord.from_dense(ids, a, p)
    picked = torch.nn.functional.one_hot(ids, p).to(g.dtype)
    scale = -(1 - g[..., :1].tanh() * 2.0**-8)
    return joint_record([LinearRecord(a, picked * scale), table], Planner())


KINDS: dict[str, Make] = {
    "linear/ghost": _linear(True), "linear/recomputed": _linear(False), "linear/kept": _kept,
    "linear/transposed": _linear(True, True), "twice/planned": _twice(True),
    "twice/recomputed": _twice(False), "mixed uses": _mixed, "routed/ghost": _routed(True),
    "routed/recomputed": _routed(False), "grouped": _grouped, "einsum": _einsum, "folded": _folded,
    "units/ghost": _units(True), "units/recomputed": _units(False), "units/twice": _units(False, True),
    "regions": _regions, "tied": _tied,
}  # fmt: skip
EXACT = frozenset({"linear/ghost", "linear/transposed", "routed/ghost", "units/ghost", "tied"})
"""Whose norms are never below the exact ones; the others' are of the very numbers that are summed."""
_PARTS = {"twice/planned": 2, "twice/recomputed": 2, "mixed uses": 2, "folded": 2, "regions": 2,
          "units/ghost": 2, "units/recomputed": 2, "units/twice": 4}  # fmt: skip


def measured(kind: str) -> Callable[[Genome], Ratios]:
    """The measure of one kind of record."""

    def measure(genome: Genome) -> Ratios:
        parts = _PARTS.get(kind, 1)
        t = -(-genome["t"] // parts) * parts
        d = min(genome["d"], max(16, _MOST // t))
        p = min(genome["p"], max(16, _MOST // t), max(1, _MOST * 4 // d))
        a, g = pair(genome, ((t, d), (t, p)), product)
        b = genome["batch"]
        place = genome["place"] % b
        record = KINDS[kind](*(in_batch(x, b, place) for x in (a, g)))
        about = f"a [{b}, {t}, {d}], g [{b}, {t}, {p}], {genome['dtype']}"
        return of_record(genome, record, place, _exact(kind, genome, a, g), about)

    return measure


def _exact(kind: str, genome: Genome, a: Tensor, g: Tensor) -> float | None:
    if genome["dtype"] == "float64":
        return None
    if kind != "tied":
        return product(a.double(), g.double()).norm().item()
    t, p = g.shape
    ids = torch.arange(t) % p
    scale = -(1 - g[:, :1].tanh() * 2.0**-8)
    picked = (torch.nn.functional.one_hot(ids, p).to(g.dtype) * scale).double()
    table = torch.zeros(p, a.shape[1], dtype=torch.float64).index_add_(0, ids, a.double())
    return (table + product(a.double(), picked)).norm().item()
