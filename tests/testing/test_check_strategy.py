"""check_strategy passes every strategy that comes with the engine, and finds false claims."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fastclip.clipping import Clipping, Constant, Hard, PerLayer, Quantile, ThresholdPolicy
from fastclip.clipping.contract import check_contract
from fastclip.clipping.resolve import resolve
from fastclip.errors import ArgumentTypeError, CheckError, FastclipError
from fastclip.testing import check_strategy
from tests.strategies import PRESETS


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", [*PRESETS, "flat", "per_layer", "adaptive"])
def test_those_that_come_with_the_engine(name: str) -> None:
    found = check_strategy(PRESETS.get(name, name), points=20_000)
    found.raise_if_wrong()
    assert found.rows[-1].what == "state saves and loads"
    assert str(found).endswith("\nok")


def test_thresholds_of_layers() -> None:
    check_strategy("per_layer", max_grad_norm=[0.1, 1.0], points=5000).raise_if_wrong()


@dataclass(frozen=True)
class Gap:
    """Hard clipping, but norms between low and high thresholds enter as they are."""

    low: float
    high: float
    normalized: bool = False
    cutoff: float | None = None

    def __call__(self, norms, thresholds):
        inside = (norms > self.low * thresholds) & (norms < self.high * thresholds)
        return torch.where(inside, 1.0, thresholds / norms.maximum(thresholds))

    def sensitivity(self, thresholds):
        return thresholds


@pytest.mark.parametrize("policy", [Constant(), PerLayer(), Quantile("below")])
def test_a_false_sensitivity(policy: ThresholdPolicy) -> None:
    found = check_strategy(Clipping(Gap(8.3, 8.5), policy))
    assert not found.ok
    assert "sample with gradient norm" in found.findings[0]
    with pytest.raises(CheckError, match=r"sample with gradient norm .* contributes"):
        found.raise_if_wrong()


def test_a_finer_grid_sees_more() -> None:
    """A gap of 0.02% lies between the points of make_private's grid, not of this one."""
    strategy = Clipping(Gap(77.7, 77.7 * 1.0002), Constant())
    check_contract(strategy, strategy.initial(1.0, 1))
    assert not check_strategy(strategy).ok


@dataclass(frozen=True)
class Counts(Quantile):
    def count(self, norms, state, groups):
        return 3 * super().count(norms, state, groups)


@dataclass(frozen=True)
class Remembering(Quantile):
    """Holds a momentum that no checkpoint knows of."""

    memory: list = field(default_factory=list)

    def move(self, state, noisy_counts, batch_size, step):
        self.memory.append(1.0)
        return replace(state, threshold=state.threshold * (1 - 0.01 * len(self.memory)))


@dataclass(frozen=True)
class Failing(Quantile):
    def count(self, norms, state, groups):
        raise KeyError("mine")


@dataclass(frozen=True)
class Eager(Quantile):
    """Moves thresholds while it reads them, but not in float64."""

    def count(self, norms, state, groups):
        if norms.dtype == torch.float32:
            state.threshold.mul_(0.9)
        return super().count(norms, state, groups)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Counts("below"), "changes the counts by 3"),
        (Remembering("below"), "moves differently after loading"),
        (Failing("below"), "KeyError: 'mine'"),
        (Eager("below"), "moves without a real step"),
    ],
    ids=lambda p: p if isinstance(p, str) else type(p).__name__,
)
def test_policies(policy: ThresholdPolicy, message: str) -> None:
    found = check_strategy(Clipping(Hard(), policy), points=5000)
    assert not found.ok
    assert message in str(found)
    assert "wrong:" in str(found)


@pytest.mark.parametrize(
    ("strategy", "message"), [("mine", "expects one of"), (Hard(), "expects a strategy")]
)
def test_arguments(strategy: Any, message: str) -> None:
    with pytest.raises(FastclipError, match=message):
        check_strategy(strategy)


@dataclass(frozen=True)
class Bare:
    """C / (n + C), and a number of a sensitivity."""

    def __call__(self, norms, thresholds):
        return thresholds / (norms + thresholds)

    def sensitivity(self, thresholds):
        return 1.0


@dataclass(frozen=True)
class Whole(Bare):
    normalized: bool = False
    cutoff: float | None = None


def test_parts_that_are_not_whole() -> None:
    """What is missing is named, by Clipping or by make_private."""
    with pytest.raises(ArgumentTypeError, match=r"Bare.* \(without normalized, cutoff\)"):
        Clipping(Bare())
    with pytest.raises(ArgumentTypeError, match=r"Whole.* \(a class, not called\)"):
        Clipping(Whole)
    with pytest.raises(ArgumentTypeError, match=r"Whole.sensitivity returns float.*shape \[\]"):
        check_contract(Clipping(Whole()), Clipping(Whole()).initial(1.0, 2))
    with pytest.raises(ArgumentTypeError, match=r"Clipping\(scale"):
        resolve(Whole())


def test_generators_are_left_alone() -> None:
    state = torch.get_rng_state()
    check_strategy("flat", points=5000)
    assert torch.equal(torch.get_rng_state(), state)
