"""Draws what bench.load found: curves of the long run, and every figure beside its limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

GOOD, BAD, LINE = "#1a73e8", "#b3261e", "#2f6f9f"
CURVES = (
    ("rss_mib", "memory [MiB]"),
    ("handles", "open handles"),
    ("step_ms", "time of a step [ms]"),
)


def draw(result: Mapping[str, Any], path: Path) -> int:
    """Draw the cases to `path`; how many figures there are.

    Args:
        result: what `python -m bench.load` has written.

    Raises:
        ValueError: nothing was measured.
    """
    figures = [(row["case"], f) for row in result["rows"] for f in row.get("verdicts", ())]
    if not figures:
        raise ValueError("the file holds no figure: nothing to draw")
    curves = [row["curve"] for row in result["rows"] if "curve" in row]
    figure = plt.figure(figsize=(12, 6.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15))
    for axes, (key, label) in zip(left.subplots(3, 1, sharex=True), CURVES, strict=True):
        for curve in curves:
            axes.plot(curve["step"], curve[key], color=LINE)
        axes.set_ylabel(label, fontsize=9)
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.15)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("steps")
    _figures(right.subplots(), figures)
    figure.supxlabel(
        f"{result['command']}, {result['date'][:10]}, torch {result['versions']['torch']}",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return len(figures)


def _figures(axes: Axes, figures: list[tuple[str, Mapping[str, Any]]]) -> None:
    """A bar for each figure: how much of its limit it is; where the limit is 0, what is there."""
    for y, (_, found) in enumerate(figures):
        share = (
            found["value"] / found["limit"] if found["limit"] else float(found["value"] > 0) * 1.3
        )
        axes.barh(y, min(max(share, 0.0), 1.3), color=GOOD if found["holds"] else BAD, height=0.6)
        unit = f" {found['unit']}" if found["unit"] else ""
        axes.text(
            1.34, y, f"{found['value']:.3g} of {found['limit']:g}{unit}", va="center", fontsize=8
        )
    axes.axvline(1, color=BAD, linewidth=1)
    axes.set_yticks(
        range(len(figures)), [f"{case}: {f['what']}" for case, f in figures], fontsize=8
    )
    axes.set_xlim(0, 1.3)
    axes.set_xticks([0, 0.5, 1], ["0", "half", "limit"], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
