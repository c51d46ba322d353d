"""Sizes that tests never have: rows, logical batches, groups, vocabularies, layers."""

from __future__ import annotations

import statistics
import time
from typing import Any

import psutil
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from bench.cost import step_cost
from bench.load.training import CLASSES, FEATURES, Training, classifier, rows
from bench.load.verdicts import verdict
from bench.measure import MIB, PeakMemory
from fastclip.clipping import Clipping, Group


def many_rows(scale: float) -> dict[str, Any]:
    """Draws from 10^6 rows: their law, their time, what they hold."""
    number, draws, size = max(int(1_000_000 * scale), 10_000), 50, 1000
    data = rows(number)
    start, before = time.perf_counter(), psutil.Process().memory_info().rss
    peak = PeakMemory()
    loader = Training(classifier(), DataLoader(data, batch_size=size)).loader
    made, sizes, times = time.perf_counter() - start, [], []
    source = iter(loader.batch_sampler)
    for _ in tqdm(range(min(draws, number // size)), unit="draw"):
        start = time.perf_counter()
        sizes.append(len(next(source)))
        times.append(time.perf_counter() - start)
    rate = size / number
    error = (number * rate * (1 - rate) / len(sizes)) ** 0.5
    return {
        "case": "rows",
        "what": f"{number:,} rows",
        "make_private_s": round(made, 3),
        "draw_ms": round(statistics.median(times) * 1e3, 3),
        "verdicts": [
            verdict("mean size of draws off", abs(statistics.mean(sizes) - size) / error, 5, "s.e."),
            verdict("memory above the data", (peak.above_start() + peak.start - before) / MIB, 128,
                    "MiB"),
        ],
    }  # fmt: skip


def logical_batch(scale: float) -> dict[str, Any]:
    """A logical batch of 65,536 rows in physical ones of 512, beside one of 512 rows."""
    large, physical, hidden = max(int(65_536 * scale), 2048), 512, 1024
    data = rows(int(large * 1.5))

    def take_step(size: int) -> int:
        """Peak resident bytes so far, after one logical batch of `size` rows."""
        training = Training(classifier(hidden), DataLoader(data, batch_size=size))
        with BatchMemoryManager(
            data_loader=training.loader, max_physical_batch_size=physical,
            optimizer=training.optimizer,
        ) as parts:  # fmt: skip
            for x, y in tqdm(parts, unit="batch", total=-(-size // physical)):
                training.step(x, y)
                if training.engine.accountant.history:  # a real step
                    break
        return peak.above_start()

    peak = PeakMemory()
    small = take_step(physical)
    return {
        "case": "logical",
        "what": f"a logical batch of {large:,} rows, {physical} at a time",
        "verdicts": [
            verdict(
                "memory above a logical batch of 512", (take_step(large) - small) / MIB, 24, "MiB"
            )
        ],
    }


def many_groups(scale: float) -> dict[str, Any]:
    """A threshold for each of 10^4 groups of rows, moved by noisy counts."""
    count = max(int(10_000 * scale), 100)
    seconds, start_seconds = {}, 0.0
    for number in (2, count):
        begun = time.perf_counter()
        strategy = Clipping(threshold=Group(num_groups=number))
        training = Training(classifier(), DataLoader(rows(4000), batch_size=200), clipping=strategy)
        start_seconds = time.perf_counter() - begun
        times = []
        for x, y in training.loader:
            start = time.perf_counter()
            training.engine.set_groups(torch.randint(number, (len(y),)))
            training.step(x, y)
            times.append(time.perf_counter() - start)
        seconds[number] = statistics.median(times)
    return {
        "case": "groups",
        "what": f"{count:,} groups of rows",
        "step_ms": round(seconds[count] * 1e3, 3),
        "verdicts": [
            verdict("step's time over that of 2 groups", seconds[count] / seconds[2], 3, "x"),
            verdict("make_private", start_seconds, 30, "s"),
        ],
    }


class Tied(nn.Module):
    """Words predict words with the table that they are looked up in."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.table(ids), self.table.weight)


def vocabulary(scale: float) -> dict[str, Any]:
    """A table of 250,000 words that is looked up and predicts, private and not: the peaks of steps.

    The first step compares runs of up to eight rows, here of all, whose outputs are as large as it.
    """
    words, width, b, t = max(int(250_000 * scale), 5000), 64, 8, 8
    ids = torch.randint(words, (b, t))
    data, used = TensorDataset(ids), {}
    for mode in ("non_private", "private"):
        torch.manual_seed(0)
        model: Any = Tied(words, width)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        start = psutil.Process().memory_info().rss
        if mode == "private":
            made = Training(model, DataLoader(data, batch_size=b), poisson_sampling=False)
            model, optimizer = made.model, made.optimizer
        peaks = []
        for _ in range(3):
            peak = PeakMemory()
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(ids).mT, ids, reduction="none").mean(1)
            losses.mean().backward()
            optimizer.step()
            peaks.append((peak.above_start() + peak.start - start) / MIB)
        used[mode] = peaks[0], max(peaks[1:])
        del model, optimizer, losses
    table, all_tables = words * width * 4 / MIB, b * words * width * 4 / MIB
    first, later = (a - b for a, b in zip(used["private"], used["non_private"], strict=True))
    return {
        "case": "vocabulary",
        "what": f"{words:,} words, tied",
        "table_mib": round(table, 1),
        "tables_of_all_samples_mib": round(all_tables, 1),
        "non_private_mib": [round(x, 1) for x in used["non_private"]],
        "private_mib": [round(x, 1) for x in used["private"]],
        "verdicts": [
            verdict("first step's memory above non-private", first / table, 8, "tables"),
            verdict("later steps' memory above non-private", later / table, 4, "tables"),
        ],
    }


def many_layers(scale: float) -> dict[str, Any]:
    """1,000 layers beside 100: what a layer costs when there are many."""
    most = max(int(1000 * scale), 100)
    found: dict[int, dict[str, float]] = {}
    for number in (most // 10, most):
        torch.manual_seed(0)
        body: list[nn.Module] = [
            m for _ in range(number) for m in (nn.Linear(FEATURES, FEATURES), nn.Tanh())
        ]
        body.append(nn.Linear(FEATURES, CLASSES))
        start = time.perf_counter()
        loader = DataLoader(rows(64), batch_size=8)
        training = Training(nn.Sequential(*body), loader, poisson_sampling=False)
        batch = torch.randn(8, FEATURES), torch.randint(CLASSES, (8,))

        def take_step(training: Training = training, batch: Any = batch) -> float:
            begun = time.perf_counter()
            training.step(*batch)
            return time.perf_counter() - begun

        made = time.perf_counter() - start
        first = take_step()
        later = statistics.median(take_step() for _ in range(5))
        calls = step_cost(take_step).total["calls"]
        found[number] = {
            "make_private_ms": made / number * 1e3, "first_step_ms": first / number * 1e3,
            "step_ms": later / number * 1e3, "calls": calls / number,
        }  # fmt: skip
    few, many = found.values()
    return {
        "case": "layers",
        "what": f"{most:,} layers; a layer's share beside that of {most // 10}",
        **{key: round(value, 4) for key, value in many.items()},
        "verdicts": [
            verdict("operator calls", many["calls"] / few["calls"], 1.05, "x"),
            *(
                verdict(name, many[key] / few[key], 3, "x")
                for name, key in (("make_private", "make_private_ms"), ("first step", "first_step_ms"),
                                  ("later steps", "step_ms"))
            ),
        ],
    }  # fmt: skip
