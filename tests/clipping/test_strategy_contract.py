"""A strategy of one's own that states too small a sensitivity is refused before it sees a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fastclip.clipping import (
    Automatic,
    Clipping,
    Constant,
    Group,
    Hard,
    PerLayer,
    Quantile,
    Reweighted,
    StagedThreshold,
    ThresholdPolicy,
)
from fastclip.clipping.contract import _some_groups, check_contract
from tests.oracle import make_private
from tests.refusal import refused
from tests.strategies import COMBINATIONS, PRESETS, label

LAYERS = 3


def initial(strategy: Clipping, value: float = 1.0) -> object:
    return strategy.initial([value] * LAYERS if strategy.threshold.per_layer else value, LAYERS)


@dataclass(frozen=True)
class Own:
    """A scale function made of one expression."""

    function: object
    stated: float = 1.0
    normalized: bool = False
    cutoff: float | None = None

    def __call__(self, norms, thresholds):
        return self.function(norms, thresholds)

    def sensitivity(self, thresholds):
        return thresholds * self.stated


FALSE = {
    "no clipping": Own(lambda n, c: torch.ones_like(n)),
    "a little more": Own(lambda n, c: 1.001 * c / n.maximum(c)),
    "half stated": Own(lambda n, c: c / n.maximum(c), stated=0.5),
    "nothing stated": Own(lambda n, c: c / n.maximum(c), stated=0.0),
    "not a number stated": Own(lambda n, c: c / n.maximum(c), stated=float("nan")),
    "infinite at 0": Own(lambda n, c: c / n),
    "huge norms": Own(lambda n, c: (c / n.maximum(c)).clamp(min=1e-9)),
    "a bump at the threshold": Own(
        lambda n, c: c / n.maximum(c) * (1 + 0.1 * ((n - c).abs() < 1e-3 * c))
    ),
    "beyond twice the threshold": Own(lambda n, c: torch.where(n > 2 * c, c, c / n.maximum(c))),
    "right for C = 1 only": Own(lambda n, c: 1 / n.clamp(min=1)),
    "negative": Own(lambda n, c: -c / n.maximum(c)),
    "not a number": Own(lambda n, c: (c / n.maximum(c)).log().sqrt()),
    "half precision": Own(lambda n, c: (c / n.maximum(c)).half().to(n.dtype)),
    "float32 alone": Own(
        lambda n, c: c / n.maximum(c) * (1.01 if n.dtype == torch.float32 else 1.0)
    ),
    "float64 alone": Own(
        lambda n, c: c / n.maximum(c) * (1.01 if n.dtype == torch.float64 else 1.0)
    ),
}
POLICIES = {
    "constant": Constant(),
    "per layer": PerLayer(),
    "groups": Group(3),
    "weights": Reweighted(3),
    "quantile": Quantile("below"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", FALSE)
def test_a_scale_function(scale: str, policy: str) -> None:
    strategy = Clipping(FALSE[scale], POLICIES[policy])
    with refused("sensitivity"):
        check_contract(strategy, initial(strategy))


def test_at_make_private() -> None:
    model = nn.Linear(3, 2)
    with refused("sample with gradient norm .* contributes"):
        make_private(model, clipping=Clipping(FALSE["no clipping"], Constant()))
    assert "forward" not in model.__dict__
    make_private(model)  # nothing is left behind


HONEST = {
    "hard": Own(lambda n, c: c / n.maximum(c)),
    "stated too large": Own(lambda n, c: c / n.maximum(c), stated=3.0),
    "smooth": Own(lambda n, c: c / (n * n + c * c).sqrt()),
    "sharp": Own(lambda n, c: torch.where(n <= c, 1.0, 0.0).to(n.dtype)),
    "reciprocal": Own(lambda n, c: c / (n + 0.1 * c)),
}


@pytest.mark.parametrize("value", [1e-12, 1e-3, 1.0, 50.0, 1e30])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", ["hard", "stated too large", "sharp"])
def test_honest_ones(scale: str, policy: str, value: float) -> None:
    strategy = Clipping(HONEST[scale], POLICIES[policy])
    check_contract(strategy, initial(strategy, value))


@pytest.mark.parametrize("scale", HONEST)
def test_honest_functions(scale: str) -> None:
    make_private(nn.Linear(3, 2), clipping=Clipping(HONEST[scale], Constant()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("value", [1e-12, 0.3, 1e30])
def test_those_that_come_with_the_engine(value: float) -> None:
    for strategy in [*COMBINATIONS, *PRESETS.values()]:
        check_contract(strategy, initial(strategy, value))


# Whole strategies and policies of one's own


class Smallest(Clipping):
    """States the smallest threshold of its groups or layers."""

    def sensitivity(self, state):
        return state.threshold.min()


class Doubled(Clipping):
    """Scales one layer twice."""

    def scales(self, norms, state, groups=None, layer_norms=None, layers=None):
        scales = super().scales(norms, state, groups, layer_norms, layers)
        scales[-1] *= 2
        return scales


class Resurrecting(Clipping):
    """Lets a sample in whose norm is not finite."""

    def scales(self, norms, state, groups=None, layer_norms=None, layers=None):
        scales = super().scales(norms, state, groups, layer_norms, layers)
        return scales.masked_fill(norms.isinf(), 1e-30)


@pytest.mark.parametrize(
    "strategy",
    [
        Smallest(Hard(), PerLayer()),
        Smallest(Hard(), Group(3)),
        Doubled(Hard(), PerLayer()),
        Doubled(Hard(normalized=True), PerLayer()),
        Resurrecting(Hard(), Constant()),
    ],
    ids=lambda s: f"{type(s).__name__}-{label(s)}",
)
def test_a_strategy(strategy: Clipping) -> None:
    value = [0.3, 1.0, 2.5] if strategy.threshold.per_layer else 1.0
    with refused("sensitivity|non-finite norm"):
        check_contract(strategy, strategy.initial(value, LAYERS))


@dataclass(frozen=True)
class OneGroup(Group):
    """The last group's counts are twice what they should be."""

    def count(self, norms, state, groups):
        counts = super().count(norms, state, groups)
        counts[:, -1] *= 2
        return counts


@dataclass(frozen=True)
class SumOfNorms(Quantile):
    """Not a count at all."""

    def count(self, norms, state, groups):
        return norms.nan_to_num(0, 1e6).sum().double()


@dataclass(frozen=True)
class CountsTwice(Quantile):
    def count(self, norms, state, groups):
        return 2 * super().count(norms, state, groups)


@dataclass(frozen=True)
class Relative(Quantile):
    """Compared with the batch's largest: one sample moves all others."""

    def count(self, norms, state, groups):
        return (norms.nan_to_num(1e9, 1e9) > norms.nan_to_num(1e9, 1e9).max() / 10).sum().double()


@dataclass(frozen=True)
class Unclamped(Quantile):
    """An update without bounds on it."""

    def move(self, state, noisy_counts, batch_size, step):
        fraction = noisy_counts / batch_size
        return replace(state, threshold=state.threshold * (1 - fraction))


@dataclass(frozen=True)
class Sinking(ThresholdPolicy):
    """Weights that its first state does not have."""

    moves = True

    def move(self, state, noisy_counts, batch_size, step):
        return replace(state, threshold=state.threshold * float("inf"))


@pytest.mark.parametrize(
    "policy",
    [OneGroup(3), OneGroup(20), SumOfNorms("below"), CountsTwice("below"), Relative("above"),
     Unclamped("below"), Sinking()],
    ids=lambda p: type(p).__name__,
)  # fmt: skip
def test_a_policy(policy: ThresholdPolicy) -> None:
    strategy = Clipping(Hard(), policy)
    with refused("count_sensitivity|positive finite"):
        check_contract(strategy, initial(strategy))


@pytest.mark.parametrize("number", [1, 2, 255, 256, 257, 10_000])
def test_some_of_many_groups(number: int) -> None:
    """All of a few; of many some, among them the first and the last."""
    found = _some_groups(number)
    assert found == sorted({*found})
    assert (found[0], found[-1], len(found)) == (0, number - 1, min(number, 256))


class Weighing(Clipping):
    """Weights of the groups that its sensitivity forgets, once counts have moved them."""

    def _bound(self, state):
        return self.scale.sensitivity(state.threshold).max()


def test_false_only_after_a_step() -> None:
    strategy = Weighing(Hard(), Reweighted(3))
    with refused("sample with gradient norm .* contributes"):
        check_contract(strategy, initial(strategy))


def test_a_plan_of_few_steps() -> None:
    """The states that are looked at are those of a run."""
    for steps in (1, 2, 3):
        strategy = Clipping(Automatic(), StagedThreshold(steps, stages=1))
        check_contract(strategy, initial(strategy))


# What a coarse grid does not see, and what is not a norm's matter


def bump(n, c, low: float, high: float):
    """Hard clipping with a gap: norms between low and high thresholds enter as they are."""
    return torch.where((n > low * c) & (n < high * c), 1.0, c / n.maximum(c))


GAPS = {
    "8.4 C at sensitivity 1": Own(lambda n, c: bump(n, c, 8.3, 8.5)),
    "130 C": Own(lambda n, c: bump(n, c, 129, 131)),
    "50000 C": Own(lambda n, c: bump(n, c, 4.9e4, 5.1e4)),
}
COUPLED = {
    "by the largest": Own(lambda n, c: c / n.nan_to_num(0, 0, 0).max().maximum(c)),
    "by the mean": Own(lambda n, c: (c / n.maximum(c)) / (1 + n.isfinite().double().mean() * 1e-3)
                       * torch.rand((), dtype=torch.float64).to(n.dtype)),
    "by the number": Own(lambda n, c: c / n.maximum(c) / n.numel()),
    "by chance": Own(lambda n, c: c / n.maximum(c) * torch.rand_like(n)),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", GAPS)
def test_a_gap(scale: str, policy: str) -> None:
    strategy = Clipping(GAPS[scale], POLICIES[policy])
    with refused("sample with gradient norm .* contributes"):
        check_contract(strategy, initial(strategy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scale", COUPLED)
def test_a_scale_that_depends_on_other_samples(scale: str, policy: str) -> None:
    strategy = Clipping(COUPLED[scale], POLICIES[policy])
    with refused("depends on other samples"):
        check_contract(strategy, initial(strategy))


class Ungrouped(Clipping):
    """Lets rows of no group in."""

    def scales(self, norms, state, groups=None, layer_norms=None, layers=None):
        return super().scales(norms, state, groups.clamp(min=0), layer_norms, layers)


@dataclass(frozen=True)
class Stray(Group):
    """Counts rows of no group with the first one's."""

    def count(self, norms, state, groups):
        return super().count(norms, state, groups.clamp(min=0))


@dataclass(frozen=True)
class Peeking(Quantile):
    """Moves its threshold by the raw norms that it counts."""

    def count(self, norms, state, groups):
        state.threshold.mul_(0.999)
        return super().count(norms, state, groups)


class Drifting(ThresholdPolicy):
    """Moves, but says that it does not: a checkpoint would forget it."""

    def move(self, state, noisy_counts, batch_size, step):
        return replace(state, threshold=state.threshold * 0.9)


@dataclass(frozen=True)
class Scalar(Group):
    """One count where it states two a group."""

    def count(self, norms, state, groups):
        return super().count(norms, state, groups).sum()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Ungrouped(Hard(), Group(3)), "scale to a sample of group -1"),
        (Clipping(Hard(), Stray(3)), "counts a sample of group -1"),
        (Clipping(Hard(), Peeking("below")), "when it computes scales or counts"),
        (Clipping(Hard(), Drifting()), "although its moves is False"),
        (Clipping(Hard(), Scalar(3)), "count_shape"),
    ],
    ids=lambda s: s if isinstance(s, str) else label(s),
)
def test_rows_and_states(strategy: Clipping, message: str) -> None:
    with refused(message):
        check_contract(strategy, initial(strategy))


@dataclass(frozen=True)
class Fading:
    """Noise that vanishes, or another plan than what is drawn."""

    last: float = 0.0
    planned: float = 0.0

    def factor(self, step: int) -> float:
        return 1.0 if step < 5 else self.last

    def runs(self, steps: int) -> list[tuple[float, int]]:
        return [(1.0, 5), (self.planned, steps - 5)]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [(Fading(), "positive finite"), (Fading(-1, -1), "positive finite"),
     (Fading(float("nan")), "positive finite"), (Fading(0.5, 2.0), "planned epsilon would be wrong")],
)  # fmt: skip
def test_a_schedule(schedule: Fading, message: str) -> None:
    strategy = Clipping(Hard(), Constant(), schedule)
    with refused(message):
        check_contract(strategy, initial(strategy))
    honest = Clipping(Hard(), Constant(), Fading(0.5, 0.5))
    check_contract(honest, initial(honest))
