"""Noise schedules: the noise multiplier of step t as a multiple of the first step's.

A schedule is public, because it depends on the step's number and never on data. The accountant records
the multiplier of each step, so a schedule composes exactly. Lengths are in real steps (logical
batches). A run that continues beyond `total_steps` stays in the last stage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

from fastclip.core.checks import between, keep, positive, whole
from fastclip.errors import ArgumentError

_FURTHEST = 1e6  # of a level from sigma_1, either way


class NoiseSchedule(Protocol):
    """Protocol of sigma_t = sigma_1 * factor(t), where sigma_1 is make_private's noise_multiplier."""

    def factor(self, step: int) -> float:
        """Return sigma_t / sigma_1 at real step `step`, counted from 0."""

    def runs(self, steps: int) -> list[tuple[float, int]]:
        """Return the first `steps` steps as (factor, number of steps with it), in order."""


@dataclass(frozen=True)
class ConstantNoise:
    """Constant noise, sigma_t = sigma_1 (Abadi et al. 2016)."""

    def factor(self, step: int) -> float:
        return 1.0

    def runs(self, steps: int) -> list[tuple[float, int]]:
        return [(1.0, steps)] if steps else []


@dataclass(frozen=True)
class Stages:
    """Consecutive stages of a run, of equal or growing length.

    Args:
        total_steps: planned number of real steps T.
        stages: number n of stages.
        length_decay: each stage is 1 / length_decay times as long as the one before it,
            T_{j+1} = T_j / length_decay with sum T_j = T (SAD-DPSGD). 1 makes them equal. Borders
            are rounded to whole steps.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, or a stage without steps.
    """

    total_steps: int
    stages: int
    length_decay: float = 1.0

    def __post_init__(self) -> None:
        keep(self, stages=whole("stages", self.stages, 1))
        keep(self, total_steps=whole("total_steps", self.total_steps, self.stages))
        keep(self, length_decay=between("length_decay", self.length_decay, 0, 1, closed=True))
        edges = (0, *self.borders(), self.total_steps)
        if any(start == end for start, end in pairwise(edges)):
            raise ArgumentError(
                f"stages={self.stages} with length_decay={self.length_decay} leaves a stage of "
                f"total_steps={self.total_steps} without any step. Plan fewer stages, or use a "
                "length_decay closer to 1."
            )

    def borders(self) -> list[int]:
        """Return the first step of every stage except the first."""
        return list(_borders(self.total_steps, self.stages, self.length_decay))

    def at(self, step: int) -> int:
        """Return the stage of real step `step`, both counted from 0."""
        return bisect_right(_borders(self.total_steps, self.stages, self.length_decay), step)


@lru_cache
def _borders(total_steps: int, stages: int, length_decay: float) -> tuple[int, ...]:
    lengths = [length_decay ** (stages - 1 - j) for j in range(stages)]
    ends = list(accumulate(lengths))
    return tuple(round(total_steps * end / ends[-1]) for end in ends[:-1])


class _InStages:
    """A noise schedule that is constant within each stage."""

    stages: int

    @cached_property
    def plan(self) -> Stages:
        raise NotImplementedError

    def _check(self) -> None:
        """Raise an ArgumentError if a stage is empty, or if the noise vanishes or explodes."""
        last = self.plan.stages - 1
        try:
            level = self.level(last)
        except OverflowError:
            level = math.inf
        if not 1 / _FURTHEST <= level <= _FURTHEST:
            raise ArgumentError(
                f"{type(self).__name__} expects the noise of its last stage within a factor of "
                f"{_FURTHEST:g} of the first stage's, got {level:g}. Choose a slower change."
            )

    def level(self, stage: int) -> float:
        """Return sigma / sigma_1 in a stage, counted from 0."""
        raise NotImplementedError

    def factor(self, step: int) -> float:
        return self.level(self.plan.at(step))

    def runs(self, steps: int) -> list[tuple[float, int]]:
        edges = [0, *(min(border, steps) for border in self.plan.borders()), steps]
        lengths = [end - start for start, end in pairwise(edges)]
        return [(self.level(j), length) for j, length in enumerate(lengths) if length]


@dataclass(frozen=True)
class StagedNoise(_InStages):
    """sigma_j = sigma_1 / decay^(j-1) in growing stages, with little noise early and more later.

    Source: SAD-DPSGD.

    Args:
        total_steps: as in `Stages`.
        stages: as in `Stages`.
        length_decay: as in `Stages`.
        decay: beta in (0, 1].
    """

    total_steps: int
    stages: int = 3
    decay: float = 0.8
    length_decay: float = 0.9

    def __post_init__(self) -> None:
        keep(self, decay=between("noise_decay", self.decay, 0, 1, closed=True))
        self._check()

    @cached_property
    def plan(self) -> Stages:
        return Stages(self.total_steps, self.stages, self.length_decay)

    def level(self, stage: int) -> float:
        return self.decay**-stage


@dataclass(frozen=True)
class _EqualStages(_InStages):
    total_steps: int
    stages: int

    @cached_property
    def plan(self) -> Stages:
        return Stages(self.total_steps, self.stages)


@dataclass(frozen=True)
class StepNoise(_EqualStages):
    """sigma_j = sigma_1 * decay^(j-1) in equal stages, 0 < decay <= 1 (Auto-DPSGD-S)."""

    decay: float = 0.9

    def __post_init__(self) -> None:
        keep(self, decay=between("noise_decay", self.decay, 0, 1, closed=True))
        self._check()

    def level(self, stage: int) -> float:
        return self.decay**stage


@dataclass(frozen=True)
class LinearNoise(_EqualStages):
    """From sigma_1 in the first stage to final * sigma_1 in the last, linearly (Auto-DPSGD-L)."""

    final: float = 0.5

    def __post_init__(self) -> None:
        keep(self, final=positive("final_noise", self.final))
        self._check()

    def level(self, stage: int) -> float:
        return 1 + (self.final - 1) * stage / max(self.stages - 1, 1)


@dataclass(frozen=True)
class ExponentialNoise(_EqualStages):
    """sigma_j = sigma_1 * exp(-rate * (j-1)) in equal stages (Auto-DPSGD's exponential decay)."""

    rate: float = 0.1

    def __post_init__(self) -> None:
        keep(self, rate=positive("rate", self.rate))
        self._check()

    def level(self, stage: int) -> float:
        return math.exp(-self.rate * stage)


@dataclass(frozen=True)
class TimeNoise(_EqualStages):
    """sigma_j = sigma_1 / (1 + rate * (j-1)) in equal stages (Auto-DPSGD's time-based decay)."""

    rate: float = 0.1

    def __post_init__(self) -> None:
        keep(self, rate=positive("rate", self.rate))
        self._check()

    def level(self, stage: int) -> float:
        return 1 / (1 + self.rate * stage)
