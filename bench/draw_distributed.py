"""Plots the results of bench.distributed: measured steps of several ranks, and computed larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.measure import is_busy

PLAIN, PRIVATE, FAILURE = "#9aa0a6", "#1a73e8", "#b3261e"


def draw_distributed(result: Mapping, path: Path) -> int:
    """Plots the rows to `path` and returns their number.

    Args:
        result: what bench.distributed has written.

    Raises:
        ValueError: nothing was measured.
    """
    rows = result["rows"]
    if not rows:
        raise ValueError("the file holds no step of any rank: nothing to draw")
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    _steps(axes[0], result)
    _on_paper(
        axes[1], result["on_paper"], "seconds_at_100_gb_s", 1e3,
        "sums of a real step at 100 GB/s [ms]", "Exchange, computed",
    )  # fmt: skip
    _on_paper(
        axes[2], result["on_paper"], "values_of_noise_of_a_rank", 1e-6,
        "values of noise that a rank draws [10^6]", "Noise, computed",
    )  # fmt: skip
    axes[2].legend(fontsize=8, loc="lower left")
    busy = [str(row["ranks"]) for row in rows if is_busy(row["cpu_wait"])]
    note = f"; the machine was busy at {', '.join(busy)} ranks" if busy else ""
    figure.supxlabel(
        f"{result['command']}, {result['date'][:10]}, torch {result['versions']['torch']}{note}",
        fontsize=8, color=FAILURE if busy else None,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return len(rows)


def _steps(axes: Axes, result: Mapping) -> None:
    """Medians with quartiles, and above them the cost of privacy."""
    for i, row in enumerate(result["rows"]):
        for shift, mode, colour in ((-0.2, "non_private", PLAIN), (0.2, "fastclip", PRIVATE)):
            low, middle, high = row[mode]["step_s"]
            error = [[middle - low], [high - middle]]
            label = {"non_private": "not private", "fastclip": "private"}[mode] if not i else None
            axes.bar(i + shift, middle, 0.38, yerr=error, color=colour, label=label)
        top = max(row[mode]["step_s"][2] for mode in ("non_private", "fastclip"))
        axes.text(i, 1.03 * top, f"x {row['ratio'][1]:.2f}", ha="center", fontweight="bold")
    axes.set_xticks(range(len(result["rows"])), [row["ranks"] for row in result["rows"]])
    axes.set_xlabel("ranks")
    axes.set_ylabel("step [s]")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.legend(fontsize=8, loc="upper left")
    axes.set_title(f"{result['workload']}: measured, ranks share one machine", fontsize=10)


def _on_paper(
    axes: Axes, rows: list[Mapping], key: str, scale: float, label: str, title: str
) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [(row["ranks"], scale * row[key]) for row in rows if row["model"] == model]
        axes.plot(*zip(*mine, strict=True), marker="o", label=model)
    ranks = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ranks, map(str, ranks))
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
