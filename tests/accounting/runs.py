"""Runs that several tests share, and their composition by the independent dp-accounting."""

from __future__ import annotations

from collections.abc import Sequence

import dp_accounting as dp

from fastclip.clipping.schedules import (
    ConstantNoise,
    ExponentialNoise,
    LinearNoise,
    NoiseSchedule,
    StagedNoise,
    StepNoise,
    TimeNoise,
)

STEPS = 60

CHANGING: dict[str, NoiseSchedule] = {
    "staged": StagedNoise(STEPS, 4, 0.7, 0.8),
    "step": StepNoise(STEPS, 4, 0.8),
    "linear": LinearNoise(STEPS, 4, 0.4),
    "exponential": ExponentialNoise(STEPS, 4, 0.2),
    "time": TimeNoise(STEPS, 4, 0.3),
}
SCHEDULES: dict[str, NoiseSchedule] = {"constant": ConstantNoise(), **CHANGING}


def event(entries: Sequence[tuple[float, float, int]]) -> dp.DpEvent:
    """A history as dp-accounting writes it."""
    return dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), steps)
            for sigma, rate, steps in entries
        ]
    )


def cause_and_fix(error: BaseException) -> bool:
    """A message of fastclip: one line of at most two sentences, then its anchor."""
    text, _, anchor = str(error).partition(" See errors.html#")
    return bool(text) and "\n" not in text and text.count(". ") <= 1 and " " not in anchor
