"""Monitors a private run: epsilon, thresholds and noise, each reading marked private or not.

monitor = Monitor(engine, optimizer, delta=1e-5, to=[tensorboard(SummaryWriter())])
...
plot_privacy(engine, delta=1e-5, budget=3.0).savefig("privacy.png")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastclip.accounting.epsilon import epsilon
from fastclip.core.checks import between, positive, whole
from fastclip.engine.release import divisor_of
from fastclip.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 24
"""Points of the curve of `plot_privacy`. Each one needs its own epsilon."""


class Reading(NamedTuple):
    """A number of one step.

    Attributes:
        step: real steps so far, this one included.
        name: "epsilon", "threshold" (with "/k" for group or layer k), "noise_multiplier",
            "noise_to_signal" or "clipped".
        value: the number.
        private: whether it follows from the releases of the run, which epsilon covers. Otherwise it
            depends on raw samples.
    """

    step: int
    name: str
    value: float
    private: bool


class Monitor:
    """Reads a private optimizer every `every` real steps. Steps in between do not wait for it.

    Formal guarantee: readings marked private are functions of the noisy gradients, the noisy counts and
    public numbers of steps that the accountant has recorded. "clipped" depends on raw samples.

    Args:
        engine: the engine of the run.
        optimizer: the optimizer that make_private returned.
        delta: delta of epsilon, in (0, 1).
        to: functions that are called with each `Reading`.
        every: real steps from one reading to the next. A reading waits for the device once.
        raw: also read "clipped", the share of samples of the last physical batch whose norm is above
            its threshold. It is NOT private.

    Raises:
        ArgumentError, ArgumentTypeError: for an optimizer of another kind, or a value out of range.
    """

    def __init__(
        self, engine: Any, optimizer: Any, *, delta: float,
        to: Sequence[Callable[[Reading], None]], every: int = 100, raw: bool = False,
    ) -> None:  # fmt: skip
        if not hasattr(optimizer, "grad_state") or not hasattr(optimizer, "attach_step_hook"):
            raise ArgumentTypeError(
                "Monitor expects the optimizer that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}."
            )
        self.delta = between("delta", delta, 0, 1)
        self.every = whole("every", every, 1)
        self.steps = 0
        self._engine, self._to, self._raw = engine, tuple(to), raw
        optimizer.attach_step_hook(self._read)

    def _read(self, optimizer: Any) -> None:
        """Step hook, called after the release and its record and before the weights move."""
        self.steps += 1
        if self.steps % self.every:
            return
        private = float(optimizer.noise_multiplier) > 0
        readings = {
            "epsilon": self._engine.get_epsilon(self.delta),
            "noise_multiplier": float(optimizer.noise_multiplier),
            "noise_to_signal": noise_to_signal(optimizer),
        }
        thresholds = optimizer.threshold.detach().cpu().reshape(-1).tolist()
        many = len(thresholds) > 1
        readings |= {f"threshold/{k}" if many else "threshold": c for k, c in enumerate(thresholds)}
        for name, value in readings.items():
            self._emit(Reading(self.steps, name, value, private))
        norms = optimizer.per_sample_norms
        if self._raw and norms is not None and not many and len(norms):
            share = (~(norms <= optimizer.threshold)).double().mean().item()
            self._emit(Reading(self.steps, "clipped", share, False))

    def _emit(self, reading: Reading) -> None:
        for listener in self._to:
            listener(reading)


def noise_to_signal(optimizer: Any) -> float:
    """Return the expected norm of the step's noise over the norm of the released gradient.

    A value of 1 means that the step is nothing but noise. It is NaN if parameters are sharded, or before
    a step. It follows from the release, so it is private. Call it in a step hook, as `Monitor` does.
    Later a noise schedule, or a changed `noise_multiplier`, gives the next step's noise.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]
                 if p.requires_grad and p.grad is not None]  # fmt: skip
    if not gradients or any(hasattr(g, "placements") for g in gradients):
        return math.nan
    state, batches = optimizer.grad_state.clipping, optimizer.grad_state.batch.accumulated
    divisor, sensitivity = divisor_of(optimizer, batches), state.strategy.sensitivity(state.paid)
    entries = sum(g.numel() for g in gradients)
    std = optimizer.noise_levels.gradients * float(sensitivity) / divisor
    norm = torch.stack([g.detach().double().norm() for g in gradients]).norm().item()
    return std * math.sqrt(entries) / norm if norm else math.nan


def tensorboard(writer: Any) -> Callable[[Reading], None]:
    """Return a function that writes readings to a SummaryWriter, as "private/" or "not private/"."""

    def write(reading: Reading) -> None:
        kind = "private" if reading.private else "not private"
        writer.add_scalar(f"{kind}/{reading.name}", reading.value, reading.step)

    return write


def spending(engine: Any, delta: float) -> list[tuple[int, float]]:
    """Return (steps recorded, epsilon) from the first step to the last, at most `POINTS` pairs.

    Steps are those of the ledger. Without Poisson sampling, a pass over the data is one step.

    Raises:
        ArgumentError: before the first step, or for a delta outside (0, 1).
    """
    history = list(engine.accountant.history)
    total = sum(int(steps) for *_, steps in history)
    if total == 0:
        raise ArgumentError(
            "The engine has taken no step yet, so it has no privacy cost to plot. Train at least one "
            "step first.",
            doc="privacy-budget",
        )
    marks = sorted({max(1, round(total * k / POINTS)) for k in range(1, POINTS + 1)})
    name = engine.accountant.mechanism()
    return [(mark, epsilon(_first(history, mark), delta, name)) for mark in marks]


def _first(history: Sequence[tuple[float, Any, int]], steps: int) -> list[tuple[float, Any, int]]:
    """Return the history of the first `steps` steps."""
    found, left = [], steps
    for sigma, rate, count in history:
        if left <= 0:
            break
        found.append((sigma, rate, min(int(count), left)))
        left -= int(count)
    return found


def plot_privacy(engine: Any, *, delta: float, budget: float | None = None) -> Figure:
    """Plot epsilon over the recorded steps of an engine (see `spending`), and the rest of a budget.

    Args:
        engine: the engine, whose ledger is plotted.
        delta: in (0, 1).
        budget: the promised epsilon. None plots no budget.

    Returns:
        A matplotlib figure, for `.savefig(path)`.

    Raises:
        ArgumentError: before the first step, for values out of range, or without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "plot_privacy needs matplotlib, which is not installed. Run pip install matplotlib.",
            doc="missing-libraries",
        ) from error
    if budget is not None:
        budget = positive("budget", budget)
    points = spending(engine, delta)
    steps, spent = zip(*points, strict=True)
    figure = Figure(figsize=(6.0, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot((0, *steps), (0.0, *spent), color="#0072b2", linewidth=2)
    axes.set(xlabel="steps recorded", ylabel=f"epsilon at delta {delta:g}", xlim=(0, steps[-1]))
    title = f"Spent: epsilon {spent[-1]:.3g} in {steps[-1]} steps recorded"
    if budget is not None:
        over = spent[-1] > budget
        axes.axhline(budget, color="#d55e00", linestyle="--")
        axes.axhspan(min(spent[-1], budget), budget, color="#d55e00", alpha=0.08)
        axes.annotate(f"budget {budget:g}", (0, budget), (4, 4), textcoords="offset points")
        left = "over the budget by" if over else "left of the budget:"
        title += f"; {left} {abs(budget - spent[-1]):.3g}"
        axes.set_ylim(0, 1.12 * max(budget, spent[-1]))
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(alpha=0.3)
    return figure
