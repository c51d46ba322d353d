"""Draws the worst that was found: a row a target, the room for rounding that it has used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from bench.worst_case.targets import TARGETS

_PANELS = (
    ("contribution", "Contribution over C", "#1a73e8"),
    ("underestimate", "Exact norm over the norm that is used", "#f29900"),
)
_LEAST = -0.1
"""Where what is further from the bound than no room at all is drawn."""
_BEYOND = "#b3261e"
_UNCLAIMED = "#9aa0a6"


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the targets to `path`.

    Raises:
        ValueError: there is none.
    """
    names = [name for name in TARGETS if name in found]
    if not names:
        raise ValueError("the file holds no target of this version: nothing to draw")
    figure, panels = plt.subplots(
        1, 2, figsize=(10.5, 1.3 + 0.21 * len(names)), sharey=True, layout="constrained"
    )
    for axes, (measure, title, colour) in zip(panels, _PANELS, strict=True):
        for i, name in enumerate(names):
            row = found[name].get(measure)
            if row is None:
                continue
            limit = TARGETS[name].limit(measure)
            beyond = limit is not None and not row["ratio"] <= limit
            shade = _BEYOND if beyond else _UNCLAIMED if limit is None else colour
            used = row["room_used"]
            shape = "<" if used < _LEAST else "D" if beyond else "o"
            axes.plot(max(used, _LEAST), i, shape, color=shade, markersize=4.5)
        room = 1.0 if measure == "contribution" else 2.0
        axes.axvline(room, color=_BEYOND, linewidth=1)
        most = max([room, *(row[measure]["room_used"] for row in found.values() if measure in row)])
        if most > 4:
            axes.set_xscale("symlog", linthresh=4.0, linscale=2.0)
            powers = [10.0**k for k in range(3, 40, 6) if 10.0**k < 2 * most]
            axes.set_xticks([1.0, *powers])
            axes.minorticks_off()
        axes.set_xlim(_LEAST - 0.1, (1.25 if most <= 4 else 3) * most)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="both", color="#e8eaed", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    first, second = panels
    first.set_yticks(range(len(names)), names, fontsize=7.5)
    first.set_ylim(len(names) - 0.4, -0.6)
    first.set_xlabel(
        "room for rounding used, 0: none, 1: all\n(red line: a contribution of C)", fontsize=8
    )
    second.set_xlabel(
        "the same scale: 1 is a norm that is exact; red line: one room below it\n"
        "(grey: the norm is of the very numbers that are summed; nothing else is claimed)", fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=120)
    plt.close(figure)
