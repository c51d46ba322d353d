"""A private run as it goes: epsilon, thresholds and noise beside signal, each marked private or not.

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
"""Of the curve that `plot_privacy` draws: each is an epsilon of its own."""


class Reading(NamedTuple):
    """A number of one step.

    Attributes:
        step: real steps so far, this one included.
        name: "epsilon", "threshold" (with "/k" of a group or layer), "noise_multiplier",
            "noise_to_signal" or "clipped".
        value: the number.
        private: it follows from what the run releases, which epsilon covers; else it is of raw samples.
    """

    step: int
    name: str
    value: float
    private: bool


class Monitor:
    """Reads a private optimizer every so many real steps; between them a step waits for nothing.

    Formal guarantee: what is marked private is a function of the noisy gradients, the noisy counts and
    public numbers of steps that the accountant has recorded. "clipped" is of raw samples.

    Args:
        engine: of the run.
        optimizer: that make_private returned.
        delta: of epsilon, in (0, 1).
        to: called with each `Reading`.
        every: real steps from one reading to the next; a reading waits for the device once.
        raw: also "clipped", the share of the last physical batch whose norm was above its threshold:
            NOT private.

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
        optimizer.attach_step_hook(self._look)

    def _look(self, optimizer: Any) -> None:
        """A hook of a real step: after its release and its record, before the weights move."""
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
            self._tell(Reading(self.steps, name, value, private))
        norms = optimizer.per_sample_norms
        if self._raw and norms is not None and not many and len(norms):
            share = (~(norms <= optimizer.threshold)).double().mean().item()
            self._tell(Reading(self.steps, "clipped", share, False))

    def _tell(self, reading: Reading) -> None:
        for listener in self._to:
            listener(reading)


def noise_to_signal(optimizer: Any) -> float:
    """Expected norm of the step's noise over the norm of the gradient that it released.

    1 says that the step is nothing but noise; NaN where parameters are spread over ranks, or before a
    step. Of what is released, so private. To be asked in a step hook, as `Monitor` does: later on
    a noise schedule, or a `noise_multiplier` that was set, tells of the next step's noise.
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
    """Write readings to a SummaryWriter, under "private/" or "not private/"."""

    def write(reading: Reading) -> None:
        kind = "private" if reading.private else "not private"
        writer.add_scalar(f"{kind}/{reading.name}", reading.value, reading.step)

    return write


def spending(engine: Any, delta: float) -> list[tuple[int, float]]:
    """(steps recorded, epsilon) from the first step to the last, at most `POINTS` of them.

    As the ledger counts steps: without Poisson sampling a pass over the data is one.

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
    """The history of the first so many steps."""
    found, left = [], steps
    for sigma, rate, count in history:
        if left <= 0:
            break
        found.append((sigma, rate, min(int(count), left)))
        left -= int(count)
    return found


def plot_privacy(engine: Any, *, delta: float, budget: float | None = None) -> Figure:
    """Epsilon over the steps that an engine has recorded (see `spending`), and what is left of a budget.

    Args:
        engine: whose ledger is drawn.
        delta: in (0, 1).
        budget: epsilon that was promised; None draws none.

    Returns:
        A figure of matplotlib: `.savefig(path)`.

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
