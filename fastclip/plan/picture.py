"""A picture of a plan: noise over batch size, and epsilon over the steps of the marked choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastclip.accounting.epsilon import epsilon
from fastclip.errors import ArgumentError
from fastclip.plan.choices import SAMPLERS, Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"poisson": "#0072b2", "allocation": "#d55e00", "loader": "#008060"}
"""One color per sampler, which color-blind readers can distinguish."""
_STYLES = {"poisson": "-", "allocation": "--", "loader": "-."}
_POINTS = 10
"""Points of a curve of epsilon. Each one needs its own epsilon."""
_ABOVE = 1.6
"""Upper end of the axis of epsilon, in units of the budget."""


def draw(
    choices: Sequence[Choice], best: Choice, budget: tuple[float, float], path: str | Path, *,
    title: str, units: str,
) -> None:  # fmt: skip
    """Save the picture of a plan, 390 points wide.

    Args:
        choices: by batch size, then by sampler. best: the marked one.
        budget: (epsilon, delta).
        path: a file that ends in .svg, .png or .pdf.
        title: title of the upper half. units: what batch sizes count.

    Raises:
        ArgumentError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "--picture needs matplotlib, which is not installed. Run pip install matplotlib.",
            doc="missing-libraries",
        ) from error
    path = Path(path)
    dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastclip", "font.size": 10}):
        figure = Figure(figsize=(390 / 72, 560 / 72), layout="constrained")
        noise, spending = figure.subplots(2, 1)
        _draw_noise(noise, choices, best)
        noise.set_title(title, loc="left", fontsize="medium")
        noise.set_xlabel(f"batch size B ({units})")
        used = [name for name in SAMPLERS if any(c.sampler == name for c in choices)]
        _draw_epsilon(spending, used, best, budget)
        try:
            figure.savefig(path, dpi=144, **dated)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"--picture expects a file that can be written, such as plan.svg, got {str(path)!r} "
                f"({str(error).splitlines()[0].rstrip('.')})."
            ) from error


def _draw_noise(axes: Axes, choices: Sequence[Choice], best: Choice) -> None:
    """Draw sigma / B over B, a curve per sampler, and the marked choice."""
    for name in SAMPLERS:
        own = [c for c in choices if c.sampler == name]
        if own:
            axes.plot(
                [c.batch_size for c in own], [c.noise for c in own], _STYLES[name], marker="o",
                markersize=3.5, color=COLORS[name], label=name,
            )  # fmt: skip
    axes.plot(
        best.batch_size, best.noise, "*", color=COLORS[best.sampler], markersize=15,
        markeredgecolor="black", label=f"B = {best.batch_size}, {best.steps} steps",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", ylabel="noise of a step, sigma / B")
    _finish(axes)


def _draw_epsilon(
    axes: Axes, samplers: Sequence[str], best: Choice, budget: tuple[float, float]
) -> None:
    """Draw epsilon over steps with each sampler, at the marked batch size and noise."""
    target, delta = budget
    for name in samplers:
        points = _curve(replace(best, sampler=name), delta, _ABOVE * target)
        axes.plot(
            *zip(*points, strict=True), _STYLES[name], color=COLORS[name], label=name,
            drawstyle="default" if name == "poisson" else "steps-pre",
        )  # fmt: skip
    axes.axhline(target, color="0.4", linewidth=1, label="budget")
    axes.set(xlim=(0, best.steps), ylim=(0, _ABOVE * target), xlabel="steps", ylabel="epsilon")
    axes.set_title(
        f"Epsilon at sigma {best.sigma:.3g}, B = {best.batch_size}", loc="left", fontsize="medium"
    )
    _finish(axes)


def _curve(choice: Choice, delta: float, top: float) -> list[tuple[int, float]]:
    """Return (steps, epsilon) until epsilon is above `top`. Passes count when they begin."""
    marks = [round(choice.steps * k / _POINTS) for k in range(1, _POINTS + 1)]
    if choice.sampler != "poisson" and choice.passes <= _POINTS:
        marks = [choice.steps_per_epoch * p for p in range(1, choice.passes + 1)]
    points = [(0, 0.0)]
    for mark in sorted({min(max(mark, 1), choice.steps) for mark in marks}):
        points.append((mark, epsilon(choice.history(mark), delta)))
        if points[-1][1] > top:
            break
    return points


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", framealpha=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
