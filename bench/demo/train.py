"""Training with and without privacy: what a user changes is one function call.

`train` below never asks which engine it runs. The functions above it do, and they are the whole
difference: each turns the same (model, optimizer, loader) into private ones, or leaves them.
`opacus_hooks` becomes `fastclip` by changing one name; `opacus_ghost` also wraps the criterion.

    python -m bench.demo.train digits fastclip   # one run, printed as JSON
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from bench.demo.tasks import TASKS, Task
from bench.measure import CpuWait, PeakMemory, quartiles
from bench.processes import report


def not_private(
    model: nn.Module, optimizer: Optimizer, criterion: nn.Module, loader: DataLoader, budget: dict
) -> tuple:
    """No privacy; the same Poisson batches, so that time and memory compare like with like."""
    return None, model, optimizer, criterion, DPDataLoader.from_data_loader(loader)


def fastclip(
    model: nn.Module, optimizer: Optimizer, criterion: nn.Module, loader: DataLoader, budget: dict
) -> tuple:
    """One backward pass, ordinary criterion."""
    from fastclip import FastPrivacyEngine

    engine = FastPrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, **budget
    )
    return engine, model, optimizer, criterion, loader


def opacus_hooks(
    model: nn.Module, optimizer: Optimizer, criterion: nn.Module, loader: DataLoader, budget: dict
) -> tuple:
    """Opacus' default: the gradient of every sample is kept until the step."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, **budget
    )
    return engine, model, optimizer, criterion, loader


def opacus_ghost(
    model: nn.Module, optimizer: Optimizer, criterion: nn.Module, loader: DataLoader, budget: dict
) -> tuple:
    """Opacus' ghost clipping: two backward passes, hidden in a criterion of its own."""
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        grad_sample_mode="ghost",
        **budget,
    )
    return engine, model, optimizer, criterion, loader


ENGINES: dict[str, Callable[..., tuple]] = {
    engine.__name__: engine for engine in (not_private, fastclip, opacus_hooks, opacus_ghost)
}


def train(task: Task, make_private: Callable[..., tuple]) -> dict:
    """Train and test one model.

    Returns:
        accuracy on the test set (and chance: the largest class' share of it), epsilon spent at
        delta (None if not private), noise multiplier, peak_mib: peak memory above what the
        process held before the first step, and step_s: the lower quartile of the steps' seconds
        (other programs on the machine only ever add time) with median_step_s beside it,
        and cpu_wait: the share of the time in which some process waited for a core.
    """
    torch.manual_seed(0)
    train_set, test_set, names = task.data()
    model = task.model(len(names)).train()
    engine, model, optimizer, criterion, loader = make_private(
        model,
        torch.optim.Adam(model.parameters(), lr=task.lr),
        nn.CrossEntropyLoss(),
        DataLoader(train_set, task.batch_size, generator=torch.Generator().manual_seed(1)),
        {
            "epochs": task.epochs,
            "target_epsilon": task.target_epsilon,
            "target_delta": task.target_delta,
            "max_grad_norm": task.max_grad_norm,
        },
    )
    memory, wait = PeakMemory(), CpuWait()
    seconds = []
    for _ in tqdm(range(task.epochs), unit="epoch", position=1, leave=False):
        for x, y in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    peak, busy = memory.above_start(), wait.share()
    fast, middle, _ = quartiles(seconds[2:])  # the first two steps warm up
    accuracy, chance = test(model, test_set)
    return {
        "accuracy": accuracy,
        "chance": chance,
        "epsilon": None if engine is None else engine.get_epsilon(task.target_delta),
        "delta": task.target_delta,
        "noise_multiplier": None if engine is None else float(optimizer.noise_multiplier),
        "steps": len(seconds),
        "step_s": fast,
        "median_step_s": middle,
        "peak_mib": peak / 2**20,
        "cpu_wait": busy,
        "train_samples": len(train_set),
        "test_samples": len(test_set),
        "classes": names,
    }


@torch.no_grad()
def test(model: nn.Module, test_set: TensorDataset) -> tuple[float, float]:
    """Accuracy of the model, and of always naming the commonest class."""
    model.eval()
    x, y = test_set.tensors
    predicted = torch.cat([model(part).argmax(dim=1) for part in x.split(256)])  # [n]
    return (predicted == y).double().mean().item(), (y.bincount().max() / len(y)).item()


def main() -> None:
    """Train one task with one engine and print the result as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--epochs", type=int, help="instead of the task's own number")
    options = parser.parse_args()
    task = TASKS[options.task]
    if options.epochs:
        task = dataclasses.replace(task, epochs=options.epochs)
    warnings.filterwarnings("ignore")  # Opacus and torch warn about hooks at every start
    report(lambda: train(task, ENGINES[options.engine]))


if __name__ == "__main__":
    main()
