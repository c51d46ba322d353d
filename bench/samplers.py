"""Compares samplers at equal epsilon: noise and test accuracy, on Adult and on MNIST's test images.

    python -m bench.samplers --adult FOLDER --mnist FOLDER --out bench/results/samplers-cpu.json

Every run has the same model, batch, learning rate and number of epochs. The noise multiplier is the one
that `make_private_with_epsilon` finds for the sampler. Intervals are 95% t-intervals over seeds, which
change initial weights, sampled batches and noise, and not the split.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from bench.measure import machine, now, versions
from bench.papers.data import adult, mnist
from bench.papers.data.dataset import Dataset
from fastclip import FastPrivacyEngine

SAMPLERS, EPSILONS, DELTA = ("loader", "poisson", "allocation"), (1.0, 3.0), 1e-5
BATCH, EPOCHS = 256, 5
RATES = {"adult": 2.0, "mnist": 0.5}
"""Learning rates of SGD, the same for all samplers."""


def model(data: Dataset) -> nn.Module:
    """Returns a logistic regression for tables, and two layers for images."""
    x = data.train.x[0]
    if x.dim() == 2:
        return nn.Linear(x.shape[1], len(data.classes))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(x[0].numel(), 64), nn.Tanh(), nn.Linear(64, len(data.classes))
    )


def trained(data: Dataset, lr: float, sampler: str, epsilon: float, seed: int) -> dict[str, float]:
    """Trains once; returns the noise multiplier, epsilon spent and test accuracy."""
    torch.manual_seed(seed)
    net = model(data)
    engine = FastPrivacyEngine(accountant="pld")
    loader = DataLoader(
        TensorDataset(data.train.x[0], data.train.y), BATCH, shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr), data_loader=loader,
        max_grad_norm=1.0, target_epsilon=epsilon, target_delta=DELTA, epochs=EPOCHS,
        sampling=sampler,
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        right = net(data.test.x[0]).argmax(1) == data.test.y
    return {
        "sigma": float(optimizer.noise_multiplier), "epsilon": engine.get_epsilon(DELTA),
        "accuracy": right.double().mean().item(),
    }  # fmt: skip


def interval(values: list[float]) -> list[float]:
    """A 95% t-interval of the mean."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return [float(np.mean(values) - half), float(np.mean(values) + half)]


def measured(data: dict[str, Dataset], seeds: int) -> list[dict[str, Any]]:
    """All settings, in an order in which samplers take turns."""
    runs: dict[tuple[str, float, str], list[dict[str, float]]] = {}
    settings = [
        (name, epsilon, sampler, seed)
        for name in data for epsilon in EPSILONS for seed in range(seeds) for sampler in SAMPLERS
    ]  # fmt: skip
    for name, epsilon, sampler, seed in tqdm(settings, unit="run"):
        found = trained(data[name], RATES[name], sampler, epsilon, seed)
        runs.setdefault((name, epsilon, sampler), []).append(found)
    return [
        {
            "data": name, "target_epsilon": epsilon, "sampling": sampler, "sigma": found[0]["sigma"],
            "epsilon": found[0]["epsilon"],
            "accuracy": float(np.mean([each["accuracy"] for each in found])),
            "interval": interval([each["accuracy"] for each in found]),
            "accuracies": [each["accuracy"] for each in found],
        }
        for (name, epsilon, sampler), found in runs.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--adult", type=Path, help="folder with adult.data and adult.test")
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="q = ")
    data = {}
    if given.adult is not None:
        data["adult"] = adult.load(given.adult)
    if given.mnist is not None:
        data["mnist"] = mnist.load(given.mnist, reduced_class=None)
    found = measured(data, given.seeds)
    for row in found:
        low, high = row["interval"]
        print(
            f"{row['data']:6} epsilon {row['target_epsilon']:g}  {row['sampling']:10} "
            f"sigma {row['sigma']:6.3f}  accuracy {row['accuracy']:.4f} [{low:.4f}, {high:.4f}]"
        )
    if given.out is not None:
        about = {
            "machine": machine(), "versions": versions(), "date": now(), "seeds": given.seeds,
            "batch": BATCH, "epochs": EPOCHS, "delta": DELTA, "learning_rates": RATES,
            "notes": {name: list(each.notes) for name, each in data.items()},
        }  # fmt: skip
        given.out.write_text(json.dumps({"about": about, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
