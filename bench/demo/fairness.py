"""The demo's third part: what a clipping strategy does to a rare class, digit by digit.

The task and the training of examples/strategies.py (digits with a tenth of class 8 to train on, epsilon
8), with a constant threshold and with adaptive ones, unbounded and bounded below: only `clipping=`
differs.
"""

from __future__ import annotations

from statistics import fmean

from matplotlib.axes import Axes
from tqdm import tqdm

from examples.strategies import EPSILON, KEPT, RARE, STRATEGIES, train

TITLE = f"Digits with {KEPT:.0%} of class {RARE}: accuracy of each digit"
SEEDS = 3
COMPARED = {  # strategy: name, colour, mark
    "dp_sgd": ("constant threshold", "#7f868c", "D"),
    "unbounded_adaptive": ("adaptive, unbounded", "#d55e00", "v"),
    "bounded_adaptive": ("adaptive, bounded", "#1a73e8", "o"),
}
NOT_PRIVATE = "accuracies look at raw test data: not private"


def measure(seeds: int = SEEDS, epochs: int | None = None) -> dict[str, list[list[float]]]:
    """Accuracy of each class, [k], for each seed and strategy."""
    plan = [(name, seed) for name in COMPARED for seed in range(seeds)]
    found: dict[str, list[list[float]]] = {name: [] for name in COMPARED}
    options = {} if epochs is None else {"epochs": epochs}
    for name, seed in tqdm(plan, unit="run", desc="fairness"):
        found[name].append(train(STRATEGIES[name], seed, **options)["classes"])
    return found


def means(runs: list[list[float]]) -> list[float]:
    """Of the seeds, for each class."""
    return [fmean(of_class) for of_class in zip(*runs, strict=True)]


def table(found: dict[str, list[list[float]]]) -> str:
    """The accuracies as text."""
    head = "".join(f"{digit:>6}" for digit in range(10))
    lines = [f"\n{TITLE} (epsilon {EPSILON:g})", f"  {'':<28}{head}{'worst':>8}"]
    for name, (shown, _, _) in COMPARED.items():
        values = means(found[name])
        cells = "".join(f"{value:>6.0%}" for value in values)
        lines.append(f"  {shown:<28}{cells}{min(values):>8.0%}")
    return "\n".join(lines)


def panel(axes: Axes, found: dict[str, list[list[float]]]) -> None:
    """A mark for each digit and strategy, with the range of the seeds."""
    axes.axvspan(RARE - 0.5, RARE + 0.5, color="#fef3e0", zorder=0)
    axes.text(RARE, 1.02, "rare", ha="center", va="bottom", fontsize=9)
    for place, (name, (shown, colour, mark)) in enumerate(COMPARED.items()):
        x = [digit + (place - 1) * 0.22 for digit in range(10)]
        values = means(found[name])
        by_class = list(zip(*found[name], strict=True))
        label = f"{shown}: worst digit {min(values):.0%}, mean {fmean(values):.0%}"
        axes.plot(x, values, mark, color=colour, label=label)
        axes.vlines(
            x, [min(of) for of in by_class], [max(of) for of in by_class], color=colour, lw=1
        )
    axes.set_xticks(range(10))
    axes.set_xlabel(f"digit; mean and range of {_seeds(found)}; {NOT_PRIVATE}")
    axes.set_ylim(-0.03, 1.1)
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.set_ylabel("test accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e8eaed")
    axes.set_axisbelow(True)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _seeds(found: dict[str, list[list[float]]]) -> str:
    count = max(len(runs) for runs in found.values())
    return f"{count} seed{'s' * (count != 1)}"
