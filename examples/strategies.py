"""One training loop, every clipping strategy: `python -m examples.strategies`.

Only `clipping=` changes between runs. The task is unfair by design, as in the papers. Of the digits'
class 8, a tenth is kept for training (14 images among 1,312). So samples fall into two groups, common
and rare. The script prints a table and draws build/strategies/strategies.png. It takes a minute or two.

Adam's steps do not change with the scale of the gradients. So one learning rate works for strategies
that divide by C and for those that do not. Learning rate, epochs and epsilon were chosen with dp_sgd
alone, which at epsilon 3 hardly learns 14 images. The bound of bounded_adaptive is half of C_0. All
other settings are the strategies' defaults.

This is a small example, not a ranking. About 5 samples of a batch are rare. dpsgd_f and
naive_reweighting count them with a noise of about 30, so their rare thresholds and weights are mostly
noise here.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from examples.data import digits
from fastclip import FastPrivacyEngine, clipping
from fastclip.clipping import Clipping

RARE, KEPT = 8, 0.1
EPSILON, DELTA = 8.0, 1e-5
EPOCHS, BATCH_SIZE, LEARNING_RATE, MAX_GRAD_NORM = 60, 512, 0.03, 1.0

STRATEGIES: dict[str, Callable[[int], Clipping]] = {  # from the number of steps
    "dp_sgd": lambda steps: clipping.dp_sgd(),
    "automatic": lambda steps: clipping.automatic(),
    "soft_ada_clip": lambda steps: clipping.soft_ada_clip(),
    "unbounded_adaptive": lambda steps: clipping.unbounded_adaptive(),
    "bounded_adaptive": lambda steps: clipping.bounded_adaptive(lower=0.5),
    "dpsgd_f": lambda steps: clipping.dpsgd_f(num_groups=2),
    "naive_reweighting": lambda steps: clipping.naive_reweighting(num_groups=2),
    "sad_dpsgd": lambda steps: clipping.sad_dpsgd(total_steps=steps),
}
COLORS = dict(zip(STRATEGIES, plt.get_cmap("Dark2").colors, strict=True))
SCORES = {"accuracy": "accuracy", "rare": f"class {RARE}", "worst": "worst class"}
NOT_PRIVATE = (
    "Accuracies use raw test data and are NOT private: on private data, choosing a strategy by "
    "them\nwould cost a budget of its own."
)


def data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Digits with few training samples of class RARE; the removed ones join the test set."""
    train_set, test_set, _ = digits()
    x, y = train_set.tensors
    rare = torch.where(y == RARE)[0]
    rare = rare[torch.randperm(len(rare), generator=torch.Generator().manual_seed(seed))]
    out = torch.zeros(len(y), dtype=torch.bool)
    out[rare[round(KEPT * len(rare)) :]] = True
    tested = zip(test_set.tensors, (x[out], y[out]), strict=True)
    return TensorDataset(x[~out], y[~out]), TensorDataset(*map(torch.cat, tested))


def train(strategy: Callable[[int], Clipping], seed: int, epochs: int = EPOCHS) -> dict:
    """Train one model privately, and test it.

    Returns:
        accuracy: mean of the classes' accuracies, as on a balanced test set; rare: that of class
        RARE; worst: the lowest; classes: of each. thresholds: of every step, a list if groups
        have their own. noise_multiplier: of the first step. epsilon: spent at DELTA.
    """
    torch.manual_seed(seed)
    train_set, test_set = data(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    )
    loader = DataLoader(train_set, BATCH_SIZE, generator=torch.Generator().manual_seed(seed))
    engine = FastPrivacyEngine(accountant="rdp")  # finds its noise faster than "prv"
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        data_loader=loader,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=MAX_GRAD_NORM,
        clipping=strategy(epochs * len(loader)),  # the only difference between runs
    )
    noise_multiplier, thresholds = optimizer.noise_multiplier, []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            engine.set_groups((y == RARE).long())  # strategies without groups ignore it
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            thresholds.append(optimizer.threshold.tolist())
    accuracies = test(model, test_set)
    return {
        "accuracy": accuracies.mean().item(),
        "rare": accuracies[RARE].item(),
        "worst": accuracies.min().item(),
        "classes": accuracies.tolist(),
        "thresholds": thresholds,
        "noise_multiplier": noise_multiplier,
        "epsilon": engine.get_epsilon(DELTA),
    }


@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset) -> Tensor:
    """Accuracy of each class, [k]."""
    x, y = test_set.tensors
    right = (model.eval()(x).argmax(dim=1) == y).double()
    return torch.stack([right[y == k].mean() for k in range(10)])


def run(names: Sequence[str], seeds: int, epochs: int = EPOCHS) -> dict[str, list[dict]]:
    """Results of each strategy, one per seed; a seed has the same start and batches for all."""
    plan = [(seed, name) for seed in range(seeds) for name in names]
    results: dict[str, list[dict]] = {name: [] for name in names}
    with tqdm(plan, unit="run") as progress:
        for seed, name in progress:
            progress.set_description(name)
            results[name].append(train(STRATEGIES[name], seed, epochs))
    return results


def mean_and_error(runs: list[dict], key: str) -> tuple[float, float]:
    """Mean over the seeds and its standard error (NaN for a single seed)."""
    values = [one[key] for one in runs]
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def table(results: dict[str, list[dict]]) -> str:
    """The results as text."""
    head = "".join(f"{title:>15}" for title in SCORES.values())
    lines = [f"{'':<20}{head}{'last threshold':>17}{'sigma':>8}{'epsilon':>9}"]
    for name, runs in results.items():
        scores = "".join(f"{_score(runs, key):>15}" for key in SCORES)
        last = torch.tensor([one["thresholds"][-1] for one in runs]).mean(0).reshape(-1).tolist()
        thresholds = " / ".join(f"{value:.2g}" for value in last)
        sigma, epsilon = (mean_and_error(runs, key)[0] for key in ("noise_multiplier", "epsilon"))
        lines.append(f"{name:<20}{scores}{thresholds:>17}{sigma:>8.2f}{epsilon:>9.2f}")
    return "\n".join(lines)


def _score(runs: list[dict], key: str) -> str:
    mean, error = mean_and_error(runs, key)
    return f"{mean:.1%}" if math.isnan(error) else f"{mean:.1%} ± {100 * error:.1f}"


def draw(results: dict[str, list[dict]], path: Path) -> None:
    """Accuracies on the left, thresholds of the first seed on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for place, (name, runs) in enumerate(results.items()):
        color = COLORS[name]
        (common, _), (rare, error) = (mean_and_error(runs, key) for key in ("accuracy", "rare"))
        left.plot([rare, common], [place, place], color="#dadce0", linewidth=2, zorder=1)
        left.plot(common, place, "D", color=color, markerfacecolor="white")
        left.errorbar(rare, place, xerr=error, fmt="o", color=color, capsize=3, markersize=8)
    left.set_yticks(range(len(results)), list(results))
    left.invert_yaxis()
    left.set_xlim(0, 1)
    left.xaxis.set_major_formatter("{x:.0%}")
    seeds = len(next(iter(results.values())))
    left.set_title(f"Accuracy: ● class {RARE}, ◇ mean of all classes", loc="left", fontsize=11)
    left.set_xlabel(f"mean of {seeds} seeds ± standard error; raw data, not private")
    _thresholds(right, {name: runs[0]["thresholds"] for name, runs in results.items()})
    right.set_yscale("log")
    right.set_title("Clipping threshold (first seed, log scale)", loc="left", fontsize=11)
    right.set_xlabel("step")
    right.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, fontsize=9
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is left else "y", color="#e8eaed")
        axes.set_axisbelow(True)
    figure.suptitle(
        f"Digits with a tenth of class {RARE}, ε = {EPSILON:g}: only clipping= differs",
        fontweight="bold",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _thresholds(axes: Axes, thresholds: dict[str, list]) -> None:
    """A line per strategy, or per group; those that never move share one."""
    lines = {name: torch.tensor(values) for name, values in thresholds.items()}  # [t] or [t, k]
    still = [name for name, line in lines.items() if bool((line == line[0]).all())]
    for name in still[:1]:
        axes.plot(lines[name], color="#c4c7cc", linewidth=5, label="constant: all others")
    for name in [name for name in lines if name not in still]:
        columns = lines[name].reshape(len(lines[name]), -1).T  # [k, t]
        groups = [name] if len(columns) == 1 else [f"{name}, others", f"{name}, class {RARE}"]
        for label, line, width in zip(groups, columns, (1.8, 0.6), strict=False):
            axes.plot(line, color=COLORS[name], linewidth=width, label=label)


def main(arguments: list[str] | None = None) -> None:
    """Run, print the table, write the files."""
    parser = argparse.ArgumentParser(prog="python -m examples.strategies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seeds", type=int, default=5, help="runs of each strategy")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=Path("build") / "strategies", help="folder")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # Opacus warns about its random generator at every start
    torch.set_num_threads(1)  # the tensors are small: more threads would wait for each other

    start = time.perf_counter()
    results = run(options.strategies, options.seeds, options.epochs)
    draw(results, options.out / "strategies.png")
    print(table(results))
    print(
        f"\nmean ± standard error, seeds: {options.seeds}; sigma of the first step; two thresholds: "
        f"common / rare\n{NOT_PRIVATE}"
    )
    print(f"{time.perf_counter() - start:.0f} s; written to {options.out}")


if __name__ == "__main__":
    main()
