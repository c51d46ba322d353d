"""What is read off a run as it goes, and the picture of what it spends."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

from fastclip import FastPrivacyEngine, clipping
from fastclip.accounting import epsilon
from fastclip.monitor import (
    POINTS,
    Monitor,
    Reading,
    noise_to_signal,
    plot_privacy,
    spending,
    tensorboard,
)
from tests.oracle import make_private, sample_loss

DELTA, D, B = 1e-4, 5, 8


def start(
    strategy: Any = "flat", sigma: float = 1.0, sampled: bool = True, **options: Any
) -> tuple:
    torch.manual_seed(0)
    return make_private(
        nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3)),
        dataset=TensorDataset(torch.randn(64, D)), clipping=strategy, noise_multiplier=sigma,
        poisson_sampling=sampled, batch_size=B, **options,
    )  # fmt: skip


def run(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        optimizer.zero_grad()
        sample_loss(model(x)).mean().backward()
        optimizer.step()


def test_readings_are_those_of_the_run() -> None:
    engine, model, optimizer, loader = start(clipping.adaptive())
    found: list[Reading] = []
    Monitor(engine, optimizer, delta=DELTA, to=[found.append], every=4)
    run(model, optimizer, loader)
    assert [reading.step for reading in found] == [4] * 4 + [8] * 4
    by_name = {reading.name: reading.value for reading in found if reading.step == 8}
    assert by_name["epsilon"] == engine.get_epsilon(DELTA)
    assert by_name["noise_multiplier"] == optimizer.noise_multiplier
    assert by_name["threshold"] == float(optimizer.threshold)
    assert all(reading.private for reading in found)
    half = [(sigma, rate, 4) for sigma, rate, _ in engine.accountant.history]
    assert found[0] == Reading(4, "epsilon", epsilon(half, DELTA), True)


@pytest.mark.extras
def test_noise_beside_signal() -> None:
    """Where rows contribute nothing it is all noise: 1 / ratio^2 is chi-square over its mean."""
    engine, model, optimizer, loader = start()
    ratios = []
    Monitor(
        engine, optimizer, delta=DELTA, every=1,
        to=[lambda r: ratios.append(r.value) if r.name == "noise_to_signal" else None],
    )  # fmt: skip
    for _ in range(5):
        for (x,) in loader:
            optimizer.zero_grad()
            (0.0 * model(x).mean()).backward()
            optimizer.step()
    entries = sum(p.numel() for p in model.parameters())
    mean = sum(1 / ratio**2 for ratio in ratios) / len(ratios)
    assert len(ratios) == 40
    assert abs(mean - 1) < 5 * math.sqrt(2 / (entries * len(ratios)))


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_noise_beside_signal_of_joined_batches(loss_reduction: str) -> None:
    """The noisy sum is divided by B for each of them, and so is the noise that is expected."""
    _, model, optimizer, loader = start(sampled=False, loss_reduction=loss_reduction)
    ratios: list[float] = []
    optimizer.attach_step_hook(lambda optimizer: ratios.append(noise_to_signal(optimizer)))
    for _ in range(20):
        for k, (x,) in enumerate(loader):
            optimizer.signal_skip_step(k % 4 < 3)
            optimizer.zero_grad()
            out = model(x)
            (0.0 * (out.mean() if loss_reduction == "mean" else out.sum())).backward()
            optimizer.step()
    entries = sum(p.numel() for p in model.parameters())
    assert len(ratios) == 40
    mean = sum(1 / ratio**2 for ratio in ratios) / len(ratios)
    assert abs(mean - 1) < 5 * math.sqrt(2 / (entries * len(ratios)))


def test_the_next_batch_says_nothing_of_the_last_step() -> None:
    """Its thresholds and its number of passes are its own."""
    _, model, optimizer, _ = start(clipping.adaptive(threshold_lr=2.0), sampled=False)
    x = torch.randn(B, D)
    for k in range(2):
        optimizer.signal_skip_step(k < 1)
        optimizer.zero_grad()
        sample_loss(model(x)).mean().backward()
        optimizer.step()
    found, sensitivity = noise_to_signal(optimizer), float(optimizer.sensitivity)
    optimizer.grad_state.zero_grad()  # gradients stay
    sample_loss(model(x)).mean().backward()
    assert float(optimizer.sensitivity) != sensitivity
    assert noise_to_signal(optimizer) == found


def test_without_noise_nothing_is_private() -> None:
    engine, model, optimizer, loader = start(sigma=0.0)
    found: list[Reading] = []
    Monitor(engine, optimizer, delta=DELTA, to=[found.append], every=1)
    run(model, optimizer, loader)
    assert found
    assert not any(reading.private for reading in found)
    assert {r.value for r in found if r.name == "epsilon"} == {math.inf}
    assert {r.value for r in found if r.name == "noise_to_signal"} == {0.0}


def test_thresholds_of_groups_and_the_clipped_share() -> None:
    engine, model, optimizer, loader = start(clipping.dpsgd_f(2))
    found: list[Reading] = []
    Monitor(engine, optimizer, delta=DELTA, to=[found.append], every=8, raw=True)
    for (x,) in loader:
        optimizer.zero_grad()
        engine.set_groups(torch.arange(len(x)) % 2)
        sample_loss(model(x)).mean().backward()
        optimizer.step()
    assert {r.name for r in found} >= {"threshold/0", "threshold/1"}
    assert "clipped" not in {r.name for r in found}

    engine, model, optimizer, loader = start(max_grad_norm=1e-6)
    found = []
    Monitor(engine, optimizer, delta=DELTA, to=[found.append], every=8, raw=True)
    run(model, optimizer, loader)
    (share,) = [r for r in found if r.name == "clipped"]
    assert share == Reading(8, "clipped", 1.0, False)


def test_tensorboard_says_what_is_private(tmp_path: Path) -> None:
    class Writer(SummaryWriter):
        tags: dict[str, float] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:  # type: ignore[override]
            self.tags[tag] = value

    write = tensorboard(Writer(str(tmp_path)))
    write(Reading(3, "epsilon", 0.5, True))
    write(Reading(3, "clipped", 0.25, False))
    assert Writer.tags == {"private/epsilon": 0.5, "not private/clipped": 0.25}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"delta": 2.0}, r"delta expects a number in \(0, 1\), got 2.0"),
        ({"every": 0}, "every expects"),
    ],
)
def test_bad_arguments(options: dict[str, Any], sentence: str) -> None:
    engine, _, optimizer, _ = start()
    with pytest.raises(ValueError, match=sentence):
        Monitor(engine, optimizer, **{"delta": DELTA, "to": [], **options})


def test_another_optimizer_is_refused() -> None:
    engine, _, optimizer, _ = start()
    with pytest.raises(TypeError, match="Monitor expects the optimizer that make_private returned"):
        Monitor(engine, optimizer.original_optimizer, delta=DELTA, to=[])


# The picture


def test_spending_is_epsilon_of_every_prefix() -> None:
    engine = FastPrivacyEngine(accountant="rdp")
    for sigma, steps in ((2.0, 30), (1.0, 45)):
        for _ in range(steps):
            engine.accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    points = spending(engine, DELTA)
    assert len(points) == POINTS
    assert points[-1] == (75, engine.get_epsilon(DELTA))
    for steps, spent in points:
        history = [(2.0, 0.1, min(steps, 30)), (1.0, 0.1, max(0, steps - 30))]
        assert spent == epsilon([entry for entry in history if entry[2]], DELTA, "rdp")
    assert [step for step, _ in spending(FewSteps(), DELTA)] == [1, 2, 3]


def test_a_pass_without_sampling_is_one_step_of_the_ledger() -> None:
    """However many the optimizer takes: what is counted is said."""
    engine, model, optimizer, loader = start(sampled=False)
    steps: list[int] = []
    optimizer.attach_step_hook(lambda optimizer: steps.append(1))
    run(model, optimizer, loader)
    assert len(steps) == 8
    assert spending(engine, DELTA) == [(1, engine.get_epsilon(DELTA))]
    (axes,) = plot_privacy(engine, delta=DELTA).axes
    assert axes.get_xlabel() == "steps recorded"
    said = str(engine.mechanism(delta=DELTA, epochs=2))
    assert "taken" not in said
    assert re.search(r"steps recorded +1 \(1 at sigma = 1\)", said)
    assert re.search(r"planned in all +2 \(2 at sigma = 1\)", said)
    assert "accounted without amplification, a pass as one step" in said


class FewSteps(FastPrivacyEngine):
    def __init__(self) -> None:
        super().__init__(accountant="rdp")
        for _ in range(3):
            self.accountant.step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.parametrize(
    ("budget", "said"), [(None, ""), (9.0, "left of the budget:"), (0.1, "over the budget by")]
)
def test_the_picture(budget: float | None, said: str, tmp_path: Path) -> None:
    engine = FewSteps()
    figure = plot_privacy(engine, delta=DELTA, budget=budget)
    (axes,) = figure.axes
    spent = engine.get_epsilon(DELTA)
    title = axes.get_title(loc="left")
    assert title.startswith(f"Spent: epsilon {spent:.3g} in 3 steps recorded")
    assert said in title
    assert axes.get_xlabel() == "steps recorded"
    assert axes.lines[0].get_ydata()[-1] == spent
    figure.savefig(tmp_path / "privacy.png")


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match=r"has taken no step yet.*#privacy-budget"):
        plot_privacy(FastPrivacyEngine(), delta=DELTA)
    with pytest.raises(ValueError, match="budget expects a positive finite number, got -1"):
        plot_privacy(FewSteps(), delta=DELTA, budget=-1)


def test_before_a_step_there_is_no_signal() -> None:
    _, _, optimizer, _ = start()
    assert math.isnan(noise_to_signal(optimizer))
