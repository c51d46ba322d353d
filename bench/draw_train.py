"""Plots the results of bench.train: time and memory of whole steps, and the time of their parts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.measure import busy_warning
from bench.parts import FORWARD, INPUTS, NOISE, NORMS, OPTIMIZER, OTHER, PARTS, SUMS, WEIGHTS
from bench.workloads import WORKLOADS

BASE = "non_private"
NAMES = {
    "fastclip": "fastclip",
    "opacus_hooks": "Opacus, hooks",
    "opacus_functorch": "Opacus, functorch",
    "opacus_ghost": "Opacus, ghost clipping",
}
COLOURS = {
    "fastclip": "#1a73e8",
    "opacus_hooks": "#f29900",
    "opacus_functorch": "#c5221f",
    "opacus_ghost": "#a142f4",
}
FAILURE = "#b3261e"
PART_COLOURS = {
    FORWARD: "#9aa0a6", INPUTS: "#5f6368", WEIGHTS: "#d2c6a5", NORMS: "#1a73e8", SUMS: "#8ab4f8",
    NOISE: "#34a853", OPTIMIZER: "#f29900", OTHER: "#e8eaed",
}  # fmt: skip
PANELS = (("time_ratio", "Time of a step"), ("memory_ratio", "Peak memory"))


def draw_train(result: Mapping, path: Path) -> int:
    """Plots the workloads to `path`, one row of panels each, and returns their number.

    Args:
        result: what bench.train has written.

    Raises:
        ValueError: nothing was measured.
    """
    rows = [row for row in result["summary"] if row["mode"] != BASE]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    if not workloads:
        raise ValueError("the file holds no private step: nothing to draw")
    parts = {found["workload"]: found for found in result.get("parts", []) if BASE in found}
    columns = 3 if parts else 2
    heights = [0.9 + 0.36 * sum(row["workload"] == w for row in rows) for w in workloads]
    figure = plt.figure(figsize=(4.6 * columns, 0.9 + sum(heights)), layout="constrained")
    panels = figure.subfigures(len(workloads), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, workload in zip(panels, workloads, strict=True):
        mine = [row for row in rows if row["workload"] == workload]
        panel.suptitle(WORKLOADS[workload].title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        axes = panel.subplots(1, columns, width_ratios=(1,) * columns)
        for i, (key, name) in enumerate(PANELS):
            _ratios(axes[i], mine, key, f"{name}, multiple of non-private training", named=not i)
        if workload in parts:
            _parts(axes[2], parts[workload], explained=workload == list(parts)[-1])
        elif parts:
            axes[2].axis("off")
    warning = warning_of(result)
    figure.supxlabel(
        _where(result) + (f"\n{warning}" if warning else ""),
        fontsize=8, color=FAILURE if warning else None,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return len(workloads)


def warning_of(result: Mapping) -> str | None:
    """A warning with the number of disturbed processes if the machine was busy, else None."""
    runs = [*result["runs"], *result.get("parts", [])]
    disturbed = [run for run in runs if busy_warning([("", run.get("cpu_wait"))])]
    if not disturbed:
        return None
    return (
        f"CAUTION: other programs were busy during {len(disturbed)} of {len(runs)} processes, so "
        "their times are too long, and ratios unreliable"
    )


def _where(result: Mapping) -> str:
    host, versions = result["machine"], result["versions"]
    rounds = max((row["rounds"] for row in result["summary"]), default=0)
    return (
        f"{host['processor']}, {host['cores']} cores, torch {versions['torch']}, Opacus "
        f"{versions['opacus']}, {result['date'][:10]}; "
        + ("one round" if rounds == 1 else f"median and range of up to {rounds} rounds")
    )


def _ratios(axes: Axes, rows: Sequence[Mapping], key: str, title: str, *, named: bool) -> None:
    """Plots horizontal bars, first mode on top; a failure is written instead of its bar."""
    top = max([row[f"{key}_range"][1] for row in rows if key in row], default=1.0)
    axes.set_xlim(0, 1.25 * max(top, 1.4))
    for place, row in enumerate(rows):
        if key in row:
            low, high = row[f"{key}_range"]
            axes.barh(place, row[key], color=COLOURS[row["mode"]], height=0.62)
            if high > low:
                axes.plot([low, high], [place, place], color="black", linewidth=1)
            end = max(high, row[key])
            axes.text(end, place, f"  {row[key]:.2f}x", va="center", fontsize=9)
        else:
            reason = f"FAILS: {row['error']}" if "error" in row else "not measured"
            lines = textwrap.wrap(reason, 58, max_lines=2, placeholder=" ...")
            place_x = 0.02 * axes.get_xlim()[1]
            axes.text(place_x, place, "\n".join(lines if named else [lines[0].split(":")[0]]),
                      va="center", fontsize=7, color=FAILURE, zorder=3,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    names = [NAMES[row["mode"]] for row in rows]
    axes.set_yticks(range(len(rows)), names if named else [""] * len(rows), fontsize=9)
    _plain(axes, len(rows), title)


def _parts(axes: Axes, found: Mapping, *, explained: bool) -> None:
    """Plots the parts of a step as two stacked bars, in multiples of the non-private step."""
    whole = sum(found[BASE].values())
    for place, mode in enumerate((BASE, "fastclip")):
        left = 0.0
        for name in PARTS:
            width = max(found[mode].get(name, 0.0) / whole, 0.0)
            axes.barh(place, width, left=left, color=PART_COLOURS[name], height=0.62)
            if width > 0.06:
                axes.text(left + width / 2, place, f"{width:.2f}", ha="center", va="center",
                          fontsize=7, color="white" if name in (INPUTS, NORMS) else "black")  # fmt: skip
            left += width
    axes.set_yticks(range(2), ["non-private", "fastclip"], fontsize=9)
    if explained:
        handles = [plt.Rectangle((0, 0), 1, 1, color=PART_COLOURS[name]) for name in PARTS]
        axes.legend(handles, PARTS, fontsize=7, ncols=4, loc="upper center", frameon=False,
                    bbox_to_anchor=(0.45, -0.22), columnspacing=1, handlelength=1)  # fmt: skip
    _plain(axes, 2, "Parts of a step, multiple of the non-private step")


def _plain(axes: Axes, rows: int, title: str) -> None:
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_formatter("{x:g}x")
