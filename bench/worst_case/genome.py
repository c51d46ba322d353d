"""Genomes: named numbers that decide an input, how they are drawn, and how they are varied.

A genome is a plain dictionary that JSON holds without loss: whoever has it can make the input again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Genome = dict[str, Any]


class Gene(Protocol):
    """One number, or name, of a genome."""

    def drawn(self, rng: random.Random) -> Any:
        """A value, from anywhere."""

    def near(self, value: Any, rng: random.Random) -> Any:
        """One like `value`."""


Space = Mapping[str, Gene]


@dataclass(frozen=True)
class Choice:
    """One of some values; one that is there twice comes twice as often."""

    values: tuple[Any, ...]

    def drawn(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def near(self, value: Any, rng: random.Random) -> Any:
        return rng.choice(self.values)


@dataclass(frozen=True)
class Real:
    """A number between two, each as likely as any other."""

    low: float
    high: float

    def drawn(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)

    def near(self, value: float, rng: random.Random) -> float:
        step = (self.high - self.low) * 10 ** rng.uniform(-4, -0.5)
        return min(max(value + rng.gauss(0, step), self.low), self.high)


@dataclass(frozen=True)
class Exponent:
    """A power of ten: three times of four a usual one, else anywhere in the range of float32."""

    low: float = -45.0
    high: float = 30.0
    usual: float = 3.0

    def drawn(self, rng: random.Random) -> float:
        if rng.random() < 0.75:
            return rng.uniform(-self.usual, self.usual)
        return rng.uniform(self.low, self.high)

    def near(self, value: float, rng: random.Random) -> float:
        return min(max(value + rng.gauss(0, 10 ** rng.uniform(-3, 1)), self.low), self.high)


@dataclass(frozen=True)
class Count:
    """A whole number between two, both included; small ones come as often as large ones."""

    low: int
    high: int

    def drawn(self, rng: random.Random) -> int:
        return self._inside(
            round(math.exp(rng.uniform(*(math.log(n + 1) for n in self._ends)))) - 1
        )

    def near(self, value: int, rng: random.Random) -> int:
        if rng.random() < 0.5:
            return self._inside(value + rng.choice((-2, -1, 1, 2)))
        return self._inside(round(value * 2 ** rng.uniform(-1, 1)))

    @property
    def _ends(self) -> tuple[int, int]:
        return self.low, self.high

    def _inside(self, value: int) -> int:
        return min(max(value, self.low), self.high)


class Seed:
    """Of a generator: no value is like another."""

    def drawn(self, rng: random.Random) -> int:
        return rng.randrange(2**31)

    def near(self, value: int, rng: random.Random) -> int:
        return self.drawn(rng)


def drawn(space: Space, rng: random.Random) -> Genome:
    """A genome from anywhere in the space."""
    return {name: gene.drawn(rng) for name, gene in space.items()}


def mutated(space: Space, genome: Genome, rng: random.Random) -> Genome:
    """The same with one to four numbers varied."""
    names = rng.sample(sorted(space), min(len(space), rng.choice((1, 1, 2, 4))))
    return {**genome, **{name: space[name].near(genome[name], rng) for name in names}}


def crossed(one: Genome, other: Genome, rng: random.Random) -> Genome:
    """Each number from one of the two."""
    return {name: rng.choice((one[name], other[name])) for name in one}
