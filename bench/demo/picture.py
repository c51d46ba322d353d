"""Draws the demo's results: a row of panels for each task, a bar for each engine."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.demo import fairness

COLOURS = {
    "not_private": "#9aa0a6",
    "fastclip": "#1a73e8",
    "opacus_hooks": "#f29900",
    "opacus_ghost": "#a142f4",
}
FAILURE = "#b3261e"
WIDTH = 160
"""Characters of the caption in a line."""
PANELS = (  # key of a run, title, how a bar is labelled
    ("time_ratio", "Step time (lower is better)", "{:.2f}x"),
    ("memory_ratio", "Peak memory (lower is better)", "{:.2f}x"),
    ("accuracy", "Test accuracy (higher is better)", "{:.0%}"),
)


def draw(
    runs: list[dict], path: Path, where: str, warning: str | None = None,
    classes: dict[str, list[list[float]]] | None = None,
) -> None:  # fmt: skip
    """Write the picture of `runs` (see __main__.py) to `path`.

    Args:
        where: the machine. warning: what makes the times of these runs doubtful.
        classes: what fairness.py measured, for a panel of its own.
    """
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    rows = len(tasks) + (classes is not None)
    figure = plt.figure(figsize=(12, 0.6 + 3.2 * rows), layout="constrained")
    parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    if classes is not None:
        parts[-1].suptitle(
            f"{fairness.TITLE}  (ε = {fairness.EPSILON:g})", fontsize=13, fontweight="bold"
        )
        fairness.panel(parts[-1].subplots(), classes)
    for part, task in zip(parts, tasks, strict=False):
        mine = [run for run in runs if run["task"] == task]
        part.suptitle(f"{mine[0]['title']}{_budget(mine)}", fontsize=13, fontweight="bold")
        for axes, (key, title, label) in zip(part.subplots(1, 3), PANELS, strict=True):
            _panel(axes, mine, key, title, label)
    figure.supxlabel(caption(where, warning), fontsize=9, color=FAILURE if warning else None)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def caption(where: str, warning: str | None) -> str:
    """What stands below, in lines that the picture has room for."""
    told = (
        "Time and memory as multiples of training without privacy (dashed line at 1x). "
        f"One run each, same model, data and settings; {where}."
    )
    return "\n".join(textwrap.fill(line, WIDTH) for line in (told, warning) if line)


def _budget(runs: list[dict]) -> str:
    for run in runs:
        if run.get("epsilon") is not None:
            return f"  (private: ε = {run['epsilon']:.1f}, δ = {run['delta']:g})"
    return ""


def _panel(axes: Axes, runs: list[dict], key: str, title: str, label: str) -> None:
    """One measure: horizontal bars, first engine on top; a failure is written in its place."""
    first = key == PANELS[0][0]
    top = max((run[key] for run in runs if key in run), default=1.0)
    top = 1.0 if key == "accuracy" else max(top, 1.0)
    axes.set_xlim(0, top * 1.2)
    for place, run in enumerate(runs):
        if key in run:
            axes.barh(place, run[key], color=COLOURS[run["engine"]], height=0.66)
            axes.text(run[key] + top * 0.02, place, label.format(run[key]), va="center")
        elif "error" in run:
            kind = run["error"].split(":", 1)[0]
            text = axes.text(top * 0.02, place, f"FAILS ({kind})", va="center", zorder=3)
            text.set(color=FAILURE, weight="bold")
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    chance = next((run["chance"] for run in runs if "chance" in run), None)
    line = chance if key == "accuracy" else 1.0
    if line is not None:
        axes.axvline(line, color="black", linewidth=0.8, linestyle="--")
    if key == "accuracy" and chance is not None:
        axes.text(chance, -0.5, " chance", fontsize=8, va="center")
    names = [run["engine"].replace("_", " ").replace("opacus", "Opacus") for run in runs]
    axes.set_yticks(range(len(runs)), names if first else [""] * len(runs))
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:g}x")
    if key == "accuracy":
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
