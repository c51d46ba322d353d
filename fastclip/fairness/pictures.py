"""Pictures of reports: lines over steps or budgets, dots by group. Legible at a width of 100 mm.

Colours are those of Okabe and Ito 2008, which people with any colour vision tell apart; marks and
dashes differ as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31",
    "#7f7f7f", "#5e3c99",
)  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES = ("-", "--", "-.", ":")
WIDTH = 5.2
"""Inches of a panel: 10 points of it are 7.6 at 100 mm."""
COLUMNS = 2


class Line(NamedTuple):
    """Values over something, with their errors where they have them."""

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[tuple[float, float]] | None = None
    """Low and high end of each value's interval."""


def lines(
    panels: Mapping[str, Mapping[str, Line]], xlabel: str, ylabel: str, *, share: bool = False,
    log: bool = False, xlog: bool = False, columns: int = COLUMNS,
) -> Figure:  # fmt: skip
    """A panel for each title, a line for each name; one legend below all of them.

    Args:
        share: values are shares of 1, shown in percent.
        log: logarithmic axes.
        xlog: logarithmic axes.
        columns: panels beside each other; one is legible on a telephone.
    """
    names = list(dict.fromkeys(name for of in panels.values() for name in of))
    figure, axes = _panels(list(panels), 3.3, len(names), columns)
    for place, (axis, of) in enumerate(zip(axes, panels.values(), strict=True)):
        for name, line in of.items():
            look = _look(names.index(name))
            many = len(line.x) > 12
            axis.plot(line.x, line.y, label=_text(name), markevery=max(1, len(line.x) // 8), **look)
            if line.error is not None and not many:
                _bars(axis, line, look["color"])
        axis.set_xlabel(_text(xlabel))
        axis.set_ylabel("" if place % columns else _text(ylabel))
        if log and any(value > 0 for line in of.values() for value in line.y):
            _logarithmic(axis, "y")
        if xlog:
            ticks = sorted({value for line in of.values() for value in line.x})
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5))
        if share:
            _percent(axis, "y")
    _legend(figure, axes, columns)
    return figure


def dots(
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float]]]], xlabel: str, *,
    share: bool = False, log: bool = False,
) -> Figure:  # fmt: skip
    """A panel for each title, a row for each name, a mark for each group: (value, low, high)."""
    rows = list(dict.fromkeys(row for of in panels.values() for row in of))
    groups = list(dict.fromkeys(g for of in panels.values() for row in of.values() for g in row))
    figure, axes = _panels(list(panels), 0.9 + 0.34 * len(rows), len(groups), COLUMNS)
    for place, (axis, of) in enumerate(zip(axes, panels.values(), strict=True)):
        for name, values in of.items():
            y = rows.index(name)
            known = [value for value, _, _ in values.values() if not math.isnan(value)]
            if known:
                axis.plot([min(known), max(known)], [y, y], color="#c4c7cc", linewidth=2, zorder=1)
            for group, (value, low, high) in values.items():
                look = _look(groups.index(group))
                if not math.isnan(low):
                    axis.plot([low, high], [y, y], color=look["color"], linewidth=1.2, zorder=2)
                axis.plot([value], [y], linestyle="none", marker=look["marker"], markersize=6,
                          color=look["color"], label=_text(group), zorder=3)  # fmt: skip
        axis.set_yticks(
            range(len(rows)), [""] * len(rows) if place % COLUMNS else [_text(row) for row in rows]
        )
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(_text(xlabel))
        if log:
            _logarithmic(axis, "x")
        if share:
            _percent(axis, "x")
    _legend(figure, axes, COLUMNS)
    return figure


def _panels(
    titles: Sequence[str], height: float, names: int, columns: int
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Axes beside each other, `columns` at most in a row."""
    columns = min(columns, max(1, len(titles)))
    rows = math.ceil(len(titles) / columns)
    below = 0.25 * math.ceil(names / (3 * columns)) + 0.2
    figure = Figure(figsize=(WIDTH * columns, (height + 0.4) * rows + below), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1).tolist()
    for spare in axes[len(titles) :]:
        spare.set_visible(False)
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(_text(title), loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e8eaed")
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=10)
    return figure, axes[: len(titles)]


def _text(name: str) -> str:
    """A name as matplotlib shows it: no formula between dollars, none hidden for its underscore."""
    shown = " ".join(name.split()).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _look(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def _bars(axis: Axes, line: Line, colour: str) -> None:
    for x, (low, high) in zip(line.x, line.error or (), strict=True):
        if not math.isnan(low):
            axis.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.6)


def _logarithmic(axis: Axes, which: str) -> None:
    """Few ticks with plain numbers, also within one power of ten."""
    axis.set(**{f"{which}scale": "log"})
    of = axis.xaxis if which == "x" else axis.yaxis
    low, high = of.get_view_interval()
    subs = (1, 2, 5) if high / low < 100 else (1,)
    near = high / low < 5  # powers of ten may lie outside
    of.set_major_locator(MaxNLocator(5) if near else LogLocator(subs=subs, numticks=6))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    of.set_minor_formatter(NullFormatter())


def _percent(axis: Axes, which: str) -> None:
    """Few ticks, none rounded to what it is not."""
    of = axis.xaxis if which == "x" else axis.yaxis
    of.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}%"))


def _legend(figure: Figure, axes: Sequence[Axes], columns: int) -> None:
    """Below everything, where no curve runs; each name once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        columns = min(len(found), 3 * len(axes[:columns]))
        figure.legend(
            handles=list(found.values()), labels=list(found), loc="outside lower left",
            ncols=columns, frameon=False, fontsize=10,
        )  # fmt: skip
