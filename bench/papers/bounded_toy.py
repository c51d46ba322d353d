"""Why an adaptive threshold needs a lower bound: `python -m bench.papers.bounded_toy`.

The toy of Zhao et al. 2025 (bounded adaptive clipping, sections 3.2 and 3.3), trained by the real
engine without noise: 60% of the points lie at 0 and 40% at 1, their mean 0.4 is sought by full-batch
gradient steps on (x - mu)^2 / 2, with tau = 1, gamma = 0.5, eta_C = 0.2 and C_0 = 1.

A threshold C that may shrink without bound follows the shrinking gradients of the majority. In the
end every point of the minority weighs as much as one of the majority, which is a vote, and the
majority wins it: mu goes to 0. A bound of 0.6 keeps C at the minority's gradient at the true mean,
|1 - 0.4|, so the mean is exact; at 0.5 the minority is still clipped, and 0.6 mu = 0.4 * 0.5 gives
mu = 1/3. Draws docs/pictures/bounded_toy.png.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.processes import ROOT
from fastclip import FastPrivacyEngine
from fastclip.clipping import Clipping, bounded_adaptive, dp_sgd, unbounded_adaptive

POINTS, MAJORITY = 100, 60
TRUE_MEAN = 0.4
LOW_BOUND_MEAN = 1 / 3
START = 0.5  # halfway between the two
LEARNING_RATE = 0.05
STEPS = 160
STRATEGIES: dict[str, Clipping] = {
    "constant C": dp_sgd(),
    "adaptive, unbounded": unbounded_adaptive(tau=1),
    "adaptive, lower = 0.6": bounded_adaptive(lower=0.6, tau=1),
    "adaptive, lower = 0.5": bounded_adaptive(lower=0.5, tau=1),
}
LOOKS = {  # colour, width; later ones are drawn on top
    "constant C": ("#c4c7cc", 6.0),
    "adaptive, unbounded": ("#b3261e", 2.2),
    "adaptive, lower = 0.6": ("#1a73e8", 2.2),
    "adaptive, lower = 0.5": ("#f29900", 2.2),
}


def run(strategy: Clipping, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Estimate the mean with a strategy.

    Returns:
        The estimates mu and the thresholds C, each before the first step and after every step.
    """
    x = (torch.arange(POINTS) >= MAJORITY).float()[:, None]  # [b, 1]: 60 zeros, 40 ones
    model = nn.Linear(1, 1, bias=False)  # of the input 1: its output is its weight, mu
    nn.init.constant_(model.weight, START)
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(TensorDataset(torch.ones_like(x), x), batch_size=POINTS),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        clipping=strategy,
    )
    estimates, thresholds = [START], [optimizer.max_grad_norm]
    for _ in range(steps):
        for ones, points in loader:  # one batch: all of them
            optimizer.zero_grad()
            (0.5 * (points - private(ones)) ** 2).mean().backward()
            optimizer.step()
        estimates.append(model.weight.item())
        thresholds.append(optimizer.max_grad_norm)
    return estimates, thresholds


def draw(runs: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """Estimates on the left, thresholds on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    for name, (estimates, thresholds) in runs.items():
        colour, width = LOOKS[name]
        left.plot(estimates, label=name, color=colour, linewidth=width)
        right.plot(thresholds, color=colour, linewidth=width)
    for value in (TRUE_MEAN, LOW_BOUND_MEAN):
        left.axhline(value, color="black", linewidth=0.9, linestyle=":", zorder=3)
    left.set_ylim(-0.02, 0.52)
    _right_ticks(left, [TRUE_MEAN, LOW_BOUND_MEAN, 0.0], ["true mean", "1/3", "majority"])
    left.set_title("Estimate of the mean", loc="left", fontsize=12)

    right.set_yscale("log")
    right.set_yticks([1, 0.3, 0.1, 0.03, 0.01], ["1", "0.3", "0.1", "0.03", "0.01"])
    right.yaxis.set_minor_locator(NullLocator())
    right.set_title("Clipping threshold C (log scale)", loc="left", fontsize=12)
    for axes in (left, right):
        axes.set_xlim(0, len(estimates) - 1)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e8eaed")
        axes.set_axisbelow(True)
    figure.suptitle(
        "60% of the points at 0, 40% at 1: a threshold that shrinks without bound "
        "turns the mean into a vote",
        fontsize=12,
        fontweight="bold",
    )
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _right_ticks(axes: Axes, places: list[float], names: list[str]) -> None:
    """Names of horizontal lines, outside the right edge where no curve runs."""
    twin = axes.secondary_yaxis("right")
    twin.set_yticks(places, names)
    twin.tick_params(length=0)
    twin.spines["right"].set_visible(False)


def main(arguments: list[str] | None = None) -> None:
    """Run the four strategies, print where they end, draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.papers.bounded_toy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=STEPS)
    default = ROOT / "docs" / "pictures" / "bounded_toy.png"
    parser.add_argument("--out", type=Path, default=default, help="the picture")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # Opacus warns about its random generator at every start
    runs = {name: run(strategy, options.steps) for name, strategy in STRATEGIES.items()}
    print(f"{'':<24}{'estimate':>10}{'threshold':>11}   after {options.steps} steps; true mean 0.4")
    for name, (estimates, thresholds) in runs.items():
        print(f"{name:<24}{estimates[-1]:>10.3f}{thresholds[-1]:>11.3f}")
    draw(runs, options.out)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
