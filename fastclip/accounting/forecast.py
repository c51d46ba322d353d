"""Forecast of a run: its noise and epsilon per stage, as numbers and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.epsilon import NoiseLevels, epsilon, history, split
from fastclip.accounting.rdp import quiet_orders
from fastclip.accounting.steps import Entry, Rate, TruncatedPoisson, encoded, probability
from fastclip.accounting.tuning import Trials, TunedEpsilon, hpo_epsilon
from fastclip.clipping.schedules import NoiseSchedule
from fastclip.errors import ArgumentError

COLUMNS = ("rdp", "prv")


@dataclass(frozen=True)
class Stage:
    """A stage of equal noise, and epsilon at its end by each accountant."""

    steps: int
    noise: NoiseLevels
    epsilon: dict[str, float]


@dataclass(frozen=True)
class Forecast:
    """A planned run. `tuned` is the privacy cost of a hyperparameter search over such runs."""

    sample_rate: Rate
    steps: int
    delta: float
    accountant: str
    stages: tuple[Stage, ...]
    tuned: TunedEpsilon | None

    @property
    def epsilon(self) -> float:
        """Epsilon of one whole run by its accountant."""
        return self.stages[-1].epsilon[self.accountant]

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as plain values. An infinite epsilon is None."""
        return {
            "sample_rate": encoded(self.sample_rate),
            "steps": self.steps,
            "delta": self.delta,
            "accountant": self.accountant,
            "epsilon": _finite(self.epsilon),
            "stages": [
                {
                    "steps": stage.steps,
                    "sigma": stage.noise.total,
                    "sigma_gradients": stage.noise.gradients,
                    "sigma_counts": stage.noise.counts,
                    "epsilon": {name: _finite(spent) for name, spent in stage.epsilon.items()},
                }
                for stage in self.stages
            ],
            "search": self.tuned and {k: _finite(v) for k, v in self.tuned._asdict().items()},
        }


def forecast(
    schedule: NoiseSchedule,
    noise_multiplier: float,
    sample_rate: Rate,
    steps: int,
    delta: float,
    *,
    accountant: str = "prv",
    count_noise_ratio: float | None = None,
    trials: Trials | None = None,
) -> Forecast:
    """Return noise and epsilon of a run of `steps` >= 1 steps, per stage.

    Args:
        schedule: as in `history`.
        noise_multiplier: as in `history`.
        sample_rate: as in `history`.
        steps: as in `history`.
        delta: in (0, 1).
        accountant: accountant of the total. "rdp" and "prv" are computed as well, or NaN if they
            cannot compose the run. They are left out if they do not support the sampling.
        count_noise_ratio: as in `split`.
        trials: number of runs of a hyperparameter search, or None for a single run.

    Raises:
        ArgumentError: for a value out of range, or one that an accountant cannot handle.
    """
    entries = history(schedule, noise_multiplier, sample_rate, steps)
    others = [
        name for name in COLUMNS
        if not isinstance(sample_rate, TruncatedPoisson)
        and (name == "prv" or not isinstance(sample_rate, RandomAllocation))
    ]  # fmt: skip
    columns = dict.fromkeys((*others, accountant))
    each = sample_rate.steps if isinstance(sample_rate, RandomAllocation) else 1
    stages = [
        Stage(
            entry[2] * each,
            split(entry[0], count_noise_ratio),
            {
                name: _spent(entries[: end + 1], delta, name, asked=name == accountant)
                for name in columns
            },
        )
        for end, entry in enumerate(entries)
    ]
    tuned = hpo_epsilon(entries, delta, trials) if trials else None
    return Forecast(sample_rate, steps, delta, accountant, tuple(stages), tuned)


def table(planned: Forecast) -> str:
    """Return the forecast as text, one row per stage."""
    names = list(planned.stages[0].epsilon)
    head = ["stage", "steps", "sigma", "gradients", "counts", *(f"eps ({n})" for n in names)]
    rows = [
        [
            str(number),
            str(stage.steps),
            *(_decimal(level) for level in stage.noise),
            *(_decimal(stage.epsilon[name]) for name in names),
        ]
        for number, stage in enumerate(planned.stages, 1)
    ]
    lines = [*_aligned([head, *rows]), ""]
    sampling = f"sample rate {probability(planned.sample_rate):.6g}"
    if isinstance(planned.sample_rate, RandomAllocation):
        sampling = f"{planned.sample_rate.times} of {planned.sample_rate.steps} steps of an epoch"
    lines.append(
        f"{planned.steps} steps at {sampling}: "
        f"epsilon = {planned.epsilon:.4f} ({planned.accountant}) at delta = {planned.delta:.3g}"
    )
    if planned.tuned:
        lines.append(
            f"search: epsilon = {planned.tuned.epsilon:.4f} for the released best run "
            f"(RDP order {planned.tuned.order:g}; one run {planned.tuned.base_epsilon:.4f})"
        )
    return "\n".join(lines)


def _spent(entries: Sequence[Entry], delta: float, accountant: str, *, asked: bool) -> float:
    """Return epsilon, or NaN if an accountant that was not requested cannot compose the run."""
    with quiet_orders():
        try:
            return epsilon(entries, delta, accountant)
        except ArgumentError:
            if asked:
                raise
            return math.nan


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _decimal(number: float | None) -> str:
    return "-" if number is None or math.isnan(number) else f"{number:.4f}"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
