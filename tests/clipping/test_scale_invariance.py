"""scale_invariant: true of what three times as large gradients do not change, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fastclip import clipping
from fastclip.clipping import (
    Automatic,
    Clipping,
    Constant,
    Reweighted,
    StagedNoise,
    StagedThreshold,
    Thresholds,
)
from tests.networks import mlp, rows
from tests.oracle import make_private, relative_error, sample_loss, summed
from tests.strategies import COMBINATIONS, PRESETS, STEPS, label

LAYERS, SAMPLES = 3, 24


class Schedule(clipping.ThresholdPolicy):
    """C halves in every step: public."""

    moves = True

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        return replace(state, threshold=state.threshold / 2)


@dataclass(frozen=True)
class ByNorm(Reweighted):
    """Counts those with large gradients alone."""

    def count(self, norms: Tensor, state: Thresholds, groups: Tensor | None) -> Tensor:
        assert groups is not None
        return super().count(norms, state, groups.masked_fill(norms < 1, -1))


class Squashed(Automatic):
    """At most half of the gradient."""

    def __call__(self, norms: Tensor, thresholds: Tensor) -> Tensor:
        return super().__call__(norms, thresholds).clamp(max=0.5)


class Doubting(Clipping):
    """Leaves small gradients out."""

    def scales(self, norms, state, groups=None, layer_norms=None, layers=None):
        return super().scales(norms, state, groups, layer_norms, layers).masked_fill(norms < 1, 0)


OWN = {
    "a schedule": Clipping(Automatic(0), Schedule()),
    "noise in stages": Clipping(Automatic(0), StagedThreshold(STEPS), StagedNoise(STEPS)),
    "tiny gamma": Clipping(Automatic(1e-3), Constant()),
    "a policy": Clipping(Automatic(0), ByNorm(3)),
    "a scale function": Clipping(Squashed(0), Constant()),
    "a strategy": Doubting(Automatic(0), Constant()),
}
INVARIANT = {
    ("Constant", False), ("Constant", True), ("PerLayer", False), ("PerLayer", True),
    ("StagedThreshold", False), ("Reweighted", False), ("Reweighted", True),
}  # fmt: skip
"""Policies with which gamma = 0 is, and whether it may be normalized with them."""


def seen(strategy: Clipping, factor: float) -> Tensor:
    """All contributions and counts of some steps, of gradients times `factor`."""
    policy = strategy.threshold
    state = strategy.initial([0.3, 1.0, 2.5] if policy.per_layer else 0.7, LAYERS)
    draw = torch.Generator().manual_seed(0)
    groups = None if policy.num_groups is None else torch.arange(SAMPLES) % policy.num_groups
    found = []
    for step in range(6):
        norms = torch.rand(LAYERS, SAMPLES, dtype=torch.float64, generator=draw) * 2 * factor
        total = norms.norm(dim=0)
        scales = strategy.scales(total, state, groups, norms if policy.per_layer else None)
        counts = None
        if policy.count_noise_ratio is not None:
            counts = policy.count(total, state, groups)
            found.append(counts.flatten())
        found.append((scales * norms).flatten())
        state = policy.move(state, counts, float(SAMPLES), step)
    return torch.cat(found)


EVERY = {
    **{label(strategy): strategy for strategy in COMBINATIONS},
    **PRESETS,
    **{name: clipping.resolve(name) for name in ("flat", "per_layer", "adaptive")},
    **OWN,
}


@pytest.mark.parametrize("name", EVERY)
def test_the_law(name: str) -> None:
    strategy = EVERY[name]
    once, thrice = seen(strategy, 1.0), seen(strategy, 3.0)
    same = bool(torch.allclose(thrice, once, rtol=1e-9, atol=0))
    assert strategy.scale_invariant is same


def test_which_they_are() -> None:
    found = [s for s in COMBINATIONS if s.scale_invariant]
    assert all(s.scale == Automatic(0, s.scale.normalized) for s in found)
    assert {(type(s.threshold).__name__, s.scale.normalized) for s in found} == INVARIANT
    assert [name for name, s in PRESETS.items() if s.scale_invariant] == ["automatic_v"]
    assert {name for name, s in OWN.items() if s.scale_invariant} == {
        "a schedule", "noise in stages",
    }  # fmt: skip


@pytest.mark.parametrize("factor", [1e-6, 3.0, 1e9])
@pytest.mark.parametrize("name", ["automatic_v", "automatic"])
def test_in_a_run(name: str, factor: float) -> None:
    """The sums of a pass, whatever the loss is multiplied by."""
    found = []
    for weight in (1.0, factor):
        torch.manual_seed(0)
        model, x = mlp(), rows()
        _, private, _, _ = make_private(model, clipping=PRESETS[name])
        (weight * sample_loss(private(x)).mean()).backward()
        found.append(summed(dict(model.named_parameters())))
    assert (relative_error(found[1], found[0]) <= 1e-9) is PRESETS[name].scale_invariant
