"""Noise schedules: factor(t) and runs(T) are the same function, and each is its paper's."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastclip.clipping.schedules import (
    ConstantNoise,
    ExponentialNoise,
    LinearNoise,
    NoiseSchedule,
    StagedNoise,
    Stages,
    StepNoise,
    TimeNoise,
)
from fastclip.errors import ArgumentError, ArgumentTypeError

COMMON = settings(max_examples=150, deadline=None, derandomize=True, database=None)
DECAY = st.floats(0.1, 1)
RATE = st.floats(0.01, 3)


@st.composite
def stages(draw: Any) -> tuple[int, int]:
    count = draw(st.integers(1, 6))
    return draw(st.integers(count, 200)), count


@st.composite
def growing(draw: Any) -> tuple[int, int, float]:
    """Total, count and length decay of stages none of which is empty."""
    (total, count), decay = draw(stages()), draw(DECAY)
    lengths = [decay**-j for j in range(count)]
    assume(total * lengths[0] / sum(lengths) > 1)
    return total, count, decay


SCHEDULE = st.one_of(
    st.just(ConstantNoise()),
    st.builds(lambda g, d: StagedNoise(g[0], g[1], d, g[2]), growing(), DECAY),
    st.builds(lambda s, d: StepNoise(*s, d), stages(), DECAY),
    st.builds(lambda s, f: LinearNoise(*s, f), stages(), st.floats(0.05, 3)),
    st.builds(lambda s, r: ExponentialNoise(*s, r), stages(), RATE),
    st.builds(lambda s, r: TimeNoise(*s, r), stages(), RATE),
)


@COMMON
@given(schedule=SCHEDULE, steps=st.integers(0, 300))
def test_factor_agrees_with_runs(schedule: NoiseSchedule, steps: int) -> None:
    """Also for runs that end before, or go on beyond, the planned length."""
    runs = schedule.runs(steps)
    assert all(length > 0 for _, length in runs)
    spread = [factor for factor, length in runs for _ in range(length)]
    assert spread == [schedule.factor(step) for step in range(steps)]


@COMMON
@given(schedule=SCHEDULE)
def test_factors_are_positive_and_start_at_one(schedule: NoiseSchedule) -> None:
    plan = getattr(schedule, "plan", None)
    total = plan.total_steps if plan else 10
    factors = [schedule.factor(step) for step in range(total + 20)]
    assert all(0 < factor < math.inf for factor in factors)
    assert factors[0] == 1
    assert len(set(factors[total - 1 :])) == 1  # beyond the plan the last stage goes on


@COMMON
@given(shape=growing())
def test_stages_cover_the_run(shape: tuple[int, int, float]) -> None:
    total, count, _ = shape
    plan = Stages(*shape)
    edges = [0, *plan.borders(), total]
    assert len(edges) == count + 1
    assert edges == sorted(set(edges))
    for stage, (start, end) in enumerate(pairwise(edges)):
        assert {plan.at(step) for step in range(start, end)} == {stage}


@COMMON
@given(count=st.integers(1, 5), decay=st.floats(0.5, 1))
def test_lengths_grow_geometrically(count: int, decay: float) -> None:
    """T_{j+1} = T_j / length_decay with sum T_j = T, up to rounding to whole steps."""
    total = 10_000
    edges = [0, *Stages(total, count, decay).borders(), total]
    lengths = [end - start for start, end in pairwise(edges)]
    first = total / sum(decay**-j for j in range(count))
    assert sum(lengths) == total
    for stage, length in enumerate(lengths):
        assert length == pytest.approx(first / decay**stage, abs=1)


def test_borders_by_hand() -> None:
    # 1 + 2 + 4 = 7 parts of 10 steps
    assert Stages(70, 3, 0.5).borders() == [10, 30]
    assert Stages(70, 1).borders() == []
    assert [Stages(70, 3, 0.5).at(step) for step in (0, 9, 10, 29, 30, 69, 500)] == [
        *(0, 0, 1, 1, 2, 2, 2)
    ]


@pytest.mark.parametrize(
    ("schedule", "levels"),
    [
        (StagedNoise(6, 3, decay=0.5, length_decay=1), [1, 2, 4]),
        (StepNoise(6, 3, decay=0.5), [1, 0.5, 0.25]),
        (LinearNoise(6, 3, final=0.5), [1, 0.75, 0.5]),
        (LinearNoise(6, 1, final=0.5), [1]),
        (ExponentialNoise(6, 3, rate=0.1), [1, math.exp(-0.1), math.exp(-0.2)]),
        (TimeNoise(6, 3, rate=0.5), [1, 1 / 1.5, 1 / 2]),
        (ConstantNoise(), [1]),
    ],
)
def test_levels_by_hand(schedule: NoiseSchedule, levels: list[float]) -> None:
    length = 6 // len(levels)
    assert schedule.runs(6) == [(pytest.approx(level), length) for level in levels]


@pytest.mark.parametrize("total", [True, 6.0, "6"])
def test_wrong_types(total: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="total_steps"):
        StagedNoise(total)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: Stages(2, 3), "total_steps"),
        (lambda: Stages(2, 0), "stages"),
        (lambda: Stages(9, 3, 0), "length_decay"),
        (lambda: Stages(9, 3, 1.1), "length_decay"),
        (lambda: StagedNoise(9, decay=0), "noise_decay"),
        (lambda: StagedNoise(9, decay=1.5), "noise_decay"),
        (lambda: StagedNoise(2, 3), "total_steps"),
        (lambda: StagedNoise(9, length_decay=math.nan), "length_decay"),
        (lambda: StepNoise(9, 3, decay=-0.5), "noise_decay"),
        (lambda: StepNoise(9, 0), "stages"),
        (lambda: LinearNoise(9, 3, final=0), "final_noise"),
        (lambda: ExponentialNoise(9, 3, rate=0), "rate"),
        (lambda: TimeNoise(9, 3, rate=math.inf), "rate"),
        (lambda: TimeNoise(2, 3), "total_steps"),
    ],
)
def test_refused(build: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} expects"):
        build()
