"""The search: inputs from anywhere, and better ones of those that were the worst so far."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

from bench.worst_case.genome import Genome, crossed, drawn, mutated
from bench.worst_case.operands import DTYPES
from bench.worst_case.ratios import MEASURES, Ratios
from bench.worst_case.targets import Target
from fastclip.core.numerics import margin

ELITE = 8
Found = dict[str, Any]
"""What is known of a target, as the file holds it: trials, refused, and the worst of each measure."""


def room_used(ratio: float, genome: Genome) -> float:
    """How much of the room that scales leave for rounding is used: 0 none, 1 all, beyond: broken.

    The room is 2^-18 in float32, 2^-40 in float64: so types are compared with each other.
    """
    return 1 + (ratio - 1) / margin(DTYPES[genome["dtype"]])


class Search:
    """The search of one target, which goes on from what was found before.

    Args:
        seed: of all its draws. found: of earlier turns; that of other targets is not looked at.
    """

    def __init__(self, target: Target, seed: int, found: Found | None = None) -> None:
        self.target = target
        self.found: Found = dict(found or {"trials": 0, "refused": 0, "seconds": 0.0})
        # another stretch of draws than that of the turns before
        self._rng = random.Random(f"{seed} {target.name} {self.found['trials']}")
        self._elites: dict[str, list[tuple[float, Genome]]] = {
            measure: [(row["room_used"], row["genome"])] if (row := self.found.get(measure)) else []
            for measure in MEASURES
        }

    def run(self, seconds: float, most: int | None = None) -> Found:
        """Try inputs for so long, one at least; what is known then."""
        start = time.monotonic()
        tried = 0
        while True:
            self._try(self._next())
            tried += 1
            spent = time.monotonic() - start
            if spent >= seconds or (most is not None and tried >= most):
                self.found["seconds"] = self.found["seconds"] + spent
                return self.found

    def _next(self) -> Genome:
        space, rng = self.target.space, self._rng
        elite = self._elites[rng.choice(MEASURES)]
        if not elite or rng.random() < 0.3:
            return drawn(space, rng)
        parent = rng.choice(elite)[1]
        if rng.random() < 0.2:
            parent = crossed(parent, rng.choice(elite)[1], rng)
        return mutated(space, parent, rng)

    def _try(self, genome: Genome) -> None:
        ratios = self.target.ratios(genome)
        self.found["trials"] += 1
        if ratios is None:
            self.found["refused"] += 1
            return
        for measure in MEASURES:
            ratio = getattr(ratios, measure)
            if ratio is not None:
                self._keep(measure, ratio, genome, ratios)

    def _keep(self, measure: str, ratio: float, genome: Genome, ratios: Ratios) -> None:
        score = room_used(ratio, genome)
        elite = self._elites[measure]
        if not elite or score > elite[0][0]:
            self.found[measure] = {
                "ratio": ratio, "room_used": score, "about": ratios.about, "genome": genome,
            }  # fmt: skip
        elite.append((score, genome))
        elite.sort(key=lambda pair: -pair[0])
        del elite[ELITE:]


def exceeded(target: Target, found: Found) -> list[str]:
    """The measures whose worst ratio is beyond what the target may come to."""
    beyond = []
    for measure in MEASURES:
        limit, row = target.limit(measure), found.get(measure)
        if limit is not None and row is not None and not row["ratio"] <= limit:
            beyond.append(measure)
    return beyond


def replayed(target: Target, found: Found) -> Iterable[tuple[str, float, float | None]]:
    """Each worst input again: its measure, the ratio on record and the one that it has now."""
    for measure in MEASURES:
        row = found.get(measure)
        if row is not None:
            ratios = target.ratios(row["genome"])
            yield measure, row["ratio"], None if ratios is None else getattr(ratios, measure)
