"""What is searched: a name, the space of its inputs, and the two ratios of each input."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.worst_case import fields, layers, products
from bench.worst_case.genome import Genome, Space
from bench.worst_case.ratios import Ratios
from fastclip.core.numerics import margin
from fastclip.errors import FastclipError
from fastclip.ops.dispatch import use_backend

LONGEST, INTERPRETED = 4096, 96
BOUND = 1.0
"""What the contribution may be, in the arithmetic in use: no more room than that."""
UNDER = 1 + margin(torch.float32)
"""What an exact norm may be of one that claims not to be below it: the scales keep the rest."""


@dataclass(frozen=True)
class Target:
    """One way to a norm and a sum.

    Attributes:
        name: of it; space: of its inputs. measure: the ratios of one.
        backend: of fastclip.ops.dispatch. interpreted: in Triton's interpreter, a process of its own.
        claims: its norm is never below the exact one. Others are of the very numbers that are summed,
            so that only the contribution is bounded.
    """

    name: str
    space: Space
    measure: Callable[[Genome], Ratios]
    backend: str = "auto"
    claims: bool = True

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton"

    def ratios(self, genome: Genome) -> Ratios | None:
        """The ratios of one input; None where fastclip refuses it."""
        with warnings.catch_warnings(), use_backend(self.backend):
            warnings.simplefilter("ignore")
            try:
                return self.measure(genome)
            except FastclipError:
                return None

    def limit(self, measure: str) -> float | None:
        """What no ratio may exceed; None where nothing is claimed."""
        if measure == "contribution":
            return BOUND
        return UNDER if self.claims else None


def _all() -> list[Target]:
    """Every target: the operations' records first, then the kernels, then layers in the engine."""
    found = []
    for kind in products.KINDS:
        gram = kind in products.EXACT or kind == "twice/planned"
        space = products.space(LONGEST // 4 if gram else LONGEST)
        claims = kind in products.EXACT
        found.append(Target(kind, space, products.measured(kind), claims=claims))
    for way in ("ghost", "recomputed", "kept"):
        space, measure = fields.conv_space(1024), fields.conv_measured(way)
        found.append(Target(f"conv/{way}", space, measure, claims=way == "ghost"))
    found += [
        Target(
            "conv/ghost in PyTorch",
            fields.conv_space(1024),
            fields.conv_measured("ghost"),
            "reference",
        ),
        Target("lookup", fields.lookup_space(LONGEST), fields.lookup_measure),
    ]
    for kind in ("layer", "rms", "group"):
        space, measure = fields.norm_space(LONGEST), fields.norm_measured(kind)
        found.append(Target(f"{kind} norm", space, measure, claims=False))
    space = fields.materialised_space()
    found += [
        Target("clip_accumulate", space, fields.materialised_measure),
        Target("host/clip_accumulate", space, fields.materialised_measure, "cuda"),
        Target(
            "host/clip_scale", products.space(64), products.measured("linear/kept"), "cuda", False
        ),
    ]
    return [*found, *_interpreted(), *_layers()]


def _interpreted() -> list[Target]:
    space = products.space(INTERPRETED, 40)
    kinds = ("linear/ghost", "linear/recomputed", "linear/kept", "twice/planned")
    found = [
        Target(f"triton/{k}", space, products.measured(k), "triton", k in products.EXACT)
        for k in kinds
    ]
    space = fields.conv_space(INTERPRETED, 8)
    for way in ("ghost", "recomputed", "kept"):
        measure = fields.conv_measured(way)
        found.append(Target(f"triton/conv/{way}", space, measure, "triton", way == "ghost"))
    space = fields.lookup_space(INTERPRETED)
    found.append(Target("triton/lookup", space, fields.lookup_measure, "triton"))
    space = fields.norm_space(INTERPRETED)
    for kind in ("layer", "rms", "group"):
        measure = fields.norm_measured(kind)
        found.append(Target(f"triton/{kind} norm", space, measure, "triton", claims=False))
    return found


def _layers() -> list[Target]:
    return [
        Target(f"engine/{name}", layers.space(case), layers.measured(case), claims=case.claims)
        for name, case in layers.CASES.items()
    ]


TARGETS: dict[str, Target] = {target.name: target for target in _all()}
