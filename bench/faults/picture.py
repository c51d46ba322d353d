"""Draws how runs went on after each fault: stacked bars, one a case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from bench.faults.outcomes import ERROR, EXACT, FAILED

COLOURS = {EXACT: "#2f7f5f", ERROR: "#c9a02b", FAILED: "#b03030"}


def draw(result: Mapping, path: Path) -> None:
    """Draw the cases of a result to `path`."""
    places, names, y = [], {}, 0.0
    before = None
    for case in result["cases"]:
        if case["group"] != before:
            y += 1.3
            before = case["group"]
            names[before] = y - 0.95
        places.append(y)
        y += 1.0
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.27 * y), layout="constrained")
    for place, case in zip(places, result["cases"], strict=True):
        left = 0.0
        for kind, colour in COLOURS.items():
            share = case["outcomes"][kind] / case["runs"]
            axes.barh(place, share, 0.8, left, color=colour)
            left += share
        failed = case["outcomes"][FAILED]
        axes.text(1.01, place, f"{case['runs']}" + (f", {failed} FAILED" if failed else ""),
                  va="center", fontsize=8)  # fmt: skip
    for name, place in names.items():
        axes.text(-0.01, place, name, transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontweight="bold", fontsize=9)  # fmt: skip
    axes.set_yticks(places, [case["title"] for case in result["cases"]], fontsize=8)
    axes.set_ylim(y, 0)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    axes.text(1.01, 0.45, "runs", fontsize=8)
    for kind, colour in COLOURS.items():
        axes.bar(0, 0, color=colour, label=kind)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(
        f"What becomes of training after a fault ({sum(c['runs'] for c in result['cases'])} runs)"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
