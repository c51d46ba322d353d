"""Plots the results of bench.gpu_card, bench.train or bench.distributed.

    python -m bench.draw bench/results/gpu-CARD.json
    python -m bench.draw bench/results/train-cpu.json --out docs/pictures/train-cpu.png
    python -m bench.draw bench/results/distributed-cpu.json

Steps are plotted by bench/draw_train.py and bench/draw_distributed.py. Microbenchmarks of bench.gpu_card
have one row per case, grouped by operation. On the left is the fraction of the measured ceiling (matmul
or copy, whichever limits the case). On the right, on a logarithmic scale, is the time of PyTorch's and
Opacus' implementations over that of fastclip. Right of 1, fastclip is faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from bench.draw_distributed import draw_distributed

MOST = 60  # rows that fit on a page
COLOURS = {"arithmetic": "#2f6f9f", "memory": "#c98a2b"}
MARKS = "osD^vPX*"


def chosen(rows: Sequence[Mapping]) -> list[Mapping]:
    """Timed cases by operation; if there are too many, the first of each operation."""
    timed = [row for row in rows if "seconds" in row and "fraction" in row]
    groups: dict[str, list[Mapping]] = {}
    for row in timed:
        groups.setdefault(row["operation"], []).append(row)
    each = max(MOST // max(len(groups), 1), 1)
    return [row for name in sorted(groups) for row in groups[name][:each]]


def label(row: Mapping) -> str:
    """The name of a case without its operation."""
    sizes = " ".join(f"{name}{size}" for name, size in row["shape"].items())
    other = "  (reference)" if row["backend"] == "reference" else ""
    return f"{row['model']}  {sizes}  {row['dtype']}{other}"


def draw(result: Mapping, path: Path) -> int:
    """Plots the cases to `path` and returns their number.

    Raises:
        ValueError: there are none.
    """
    rows = chosen(result.get("kernels", {}).get("rows", []))
    if not rows:
        raise ValueError("the file holds no timed case with a measured ceiling: nothing to draw")
    places, names, y = [], {}, 0.0
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or before["operation"] != row["operation"]:
            y += 1.2
            names[row["operation"]] = y - 0.9
        places.append(y)
        y += 1.0
    figure, axes = plt.subplots(
        1, 2, sharey=True, figsize=(13, 1.8 + 0.24 * y), width_ratios=(1, 1), layout="constrained"
    )
    _fractions(axes[0], rows, places)
    _ratios(axes[1], rows, places)
    axes[0].set_yticks(places, [label(row) for row in rows], fontsize=8)
    axes[0].set_ylim(y, 0)
    for name, place in names.items():
        axes[0].text(-0.01, place, name, transform=axes[0].get_yaxis_transform(), ha="right",
                     va="center", fontweight="bold", fontsize=9)  # fmt: skip
    versions = result["versions"]
    figure.suptitle(
        f"{result['card']}, torch {versions['torch']}, Triton {versions['triton']}, "
        f"{result['date'][:10]}"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return len(rows)


def _fractions(axes: Axes, rows: Sequence[Mapping], places: Sequence[float]) -> None:
    for bound, colour in COLOURS.items():
        mine = [(p, row["fraction"]) for p, row in zip(places, rows, strict=True)
                if row["bound"] == bound]  # fmt: skip
        if mine:
            axes.barh(*zip(*mine, strict=True), color=colour, label=f"limited by {bound}")
    for place, row in zip(places, rows, strict=True):
        axes.text(row["fraction"] + 0.01, place, f"{1e6 * row['seconds'][1]:,.0f} µs",
                  va="center", fontsize=7)  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(0, max(1.15, 1.15 * max(row["fraction"] for row in rows)))
    axes.set_xlabel("fraction of the measured ceiling")
    axes.legend(loc="lower right", fontsize=8)


def _ratios(axes: Axes, rows: Sequence[Mapping], places: Sequence[float]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["others"]))
    for i, name in enumerate(names):
        mine = [(row["others"][name]["ratio"], p) for p, row in zip(places, rows, strict=True)
                if "ratio" in row["others"].get(name, {})]  # fmt: skip
        if mine:
            axes.scatter(*zip(*mine, strict=True), s=26, marker=MARKS[i % len(MARKS)], label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    for set_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "125" else ""))
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.set_xlabel("time of the other way / fastclip's")
    if names:
        axes.legend(loc="best", fontsize=8)


def main(arguments: list[str] | None = None) -> None:
    """Plots FILE.json to FILE.png next to it, or to --out."""
    parser = argparse.ArgumentParser(prog="python -m bench.draw", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "file", type=Path, help="written by bench.gpu_card, bench.train or bench.distributed"
    )
    parser.add_argument("--out", type=Path, help="image to write (default: next to the file)")
    options = parser.parse_args(arguments)
    path = options.out or options.file.with_suffix(".png")
    result = json.loads(options.file.read_text())
    if "card" in result:
        print(f"{draw(result, path)} cases plotted to {path}")
    elif "on_paper" in result:
        print(f"{draw_distributed(result, path)} numbers of ranks plotted to {path}")
    else:
        from bench.draw_train import draw_train  # imports the models, which takes seconds

        print(f"{draw_train(result, path)} workloads plotted to {path}")


if __name__ == "__main__":
    main()
