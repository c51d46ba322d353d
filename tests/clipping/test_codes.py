"""The one table of codes and limits: complete, and what csrc/ says in its own words."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest
import torch

from fastclip import clipping
from fastclip.clipping import Clipping, Constant, Hard, Quantile, Tanh, ThresholdPolicy
from fastclip.clipping.codes import (
    POLICIES,
    SCALES,
    PolicyCode,
    ScaleCode,
    clip_numbers,
    step_numbers,
)
from fastclip.clipping.policy import LARGEST, SMALLEST
from fastclip.core.numerics import margin
from fastclip.ops.clip import TYPES

CSRC = Path(__file__).resolve().parents[2] / "csrc" / "cuda"


def enum_of(file: str, name: str) -> list[str]:
    """The members of an enum of csrc/cuda, in order, as Python has them: kGlobalAdapt, GLOBAL_ADAPT."""
    found = re.search(rf"enum class {name} : int32_t {{(.*?)}};", (CSRC / file).read_text(), re.S)
    assert found is not None
    members = [member.strip() for member in found[1].split(",")]
    return [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", m.removeprefix("k")).upper() for m in members]


@pytest.mark.parametrize(("name", "codes"), [("Scale", ScaleCode), ("Policy", PolicyCode)])
def test_csrc_has_the_same_codes(name: str, codes: type[IntEnum]) -> None:
    assert enum_of("clip_scale.cuh", name) == [code.name for code in codes]
    assert list(codes) == list(range(len(codes)))


def test_csrc_has_the_same_limit() -> None:
    found = re.search(r"kLargest = ([^;]+);", (CSRC / "clip_scale.cuh").read_text())
    assert found is not None
    assert float(found[1]) == LARGEST


def test_csrc_has_the_same_types() -> None:
    names = [str(dtype).removeprefix("torch.").upper() for dtype in TYPES]
    assert enum_of("clip_values.cuh", "Type") == names


def test_every_part_has_a_code() -> None:
    parts = [getattr(clipping, name) for name in clipping.__all__]
    kinds = [
        part for part in parts if isinstance(part, type) and part is not clipping.ScaleFunction
    ]
    assert {part for part in kinds if hasattr(part, "sensitivity")} == {*SCALES, Clipping}
    policies = {part for part in kinds if issubclass(part, ThresholdPolicy)}
    assert policies - {ThresholdPolicy} == {*POLICIES}
    counting = {kind for kind, code in POLICIES.items() if code}
    assert counting == {part for part in policies if part.count is not ThresholdPolicy.count}


class Own(Hard):
    """A subclass may do anything: no kernel knows it."""


class OwnPolicy(Quantile):
    """As above."""


def test_parts_of_ones_own_have_none() -> None:
    assert clip_numbers(Clipping(Own())) is None
    assert clip_numbers(Clipping(Hard(), OwnPolicy())) is None
    assert step_numbers(OwnPolicy()) is None
    assert step_numbers(Constant()) is None


def test_numbers() -> None:
    """Room for rounding is left on one side only, and limits are those of thresholds."""
    room = 1 - margin(torch.float32)
    for scale, expected in ((Hard(), (1.0, room)), (Tanh(eps=0.3), (room, 1.0))):
        numbers = clip_numbers(Clipping(scale))
        assert numbers is not None
        assert (numbers.room, numbers.within) == expected
        assert numbers.parameter == getattr(scale, "eps", 0.0)
    moved = step_numbers(Quantile(learning_rate=0.5, upper=2.0, count_as="below"))
    assert moved is not None
    assert (moved.rate, moved.lower, moved.upper) == (-0.5, SMALLEST, 2.0)
