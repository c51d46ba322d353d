"""Measures the cost of clipping by privacy units, compared with clipping the same samples one by one.

    python -m bench.units

One process holds a private model of the same weights for every layout of the units. In every round
each model takes a step on the same batch, in turn, so other load on the machine affects all of them.
Units have 4 samples on average, 1 to 7 each. In `adjacent` the samples of a unit follow each other, as
in a sampler of units. In `scattered` they come in any order.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from pathlib import Path

import torch
from tqdm import tqdm

from bench.measure import CpuWait, busy_warning, machine, now, quartiles, versions
from bench.workloads import CLASSES, PRIVATE, WARM_UP, WORKLOADS
from fastclip import FastPrivacyEngine
from fastclip.ops.units import UnitSamples

SIZES = (4, 1, 7, 3, 5, 2, 6, 4)
"""Number of samples of each unit in one batch."""
LIMIT = 1.1
OUT = Path(__file__).resolve().parent / "results" / "units-cpu.json"


def owners(way: str) -> torch.Tensor | None:
    """The unit of each sample in the batch; None if samples are clipped one by one."""
    rows = [unit for unit, size in enumerate(SIZES) for _ in range(size)]
    if way == "scattered":
        random.Random(0).shuffle(rows)
    return None if way == "rows" else torch.tensor(rows, dtype=torch.int64, device="cpu")


WAYS = ("rows", "adjacent", "scattered")


class Training:
    """A private model and its step on a batch with privacy units."""

    def __init__(self, model: torch.nn.Module, lr: float, data: torch.utils.data.Dataset, way: str):
        self.owner = owners(way)
        loader = torch.utils.data.DataLoader(data, batch_size=sum(SIZES))
        self.model, self.optimizer, _ = FastPrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            data_loader=loader, **PRIVATE,
        )  # fmt: skip

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Takes one step and returns its seconds."""
        start = time.perf_counter()
        if self.owner is not None:  # units are new in every batch, and so is what follows from them
            self.optimizer.grad_state.batch.next_units = UnitSamples(
                self.owner, len(SIZES), max(SIZES)
            )
        self.optimizer.zero_grad()
        output = self.model(x)
        torch.nn.functional.cross_entropy(getattr(output, "logits", output), y).backward()
        self.optimizer.step()
        return time.perf_counter() - start


def measure(workload: str, rounds: int) -> dict:
    """Seconds of the steps of all ways, and ratios to clipping by samples, round by round."""
    torch.manual_seed(0)
    work, b = WORKLOADS[workload], sum(SIZES)
    model = work.model().train()
    x, y = work.inputs(b), torch.randint(CLASSES, (b,))
    data = torch.utils.data.TensorDataset(x, y)
    runs = {way: Training(copy.deepcopy(model), work.lr, data, way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    wait = CpuWait()
    for i in tqdm(range(WARM_UP + rounds), unit="round"):
        order = random.Random(i).sample(WAYS, len(WAYS))
        for way in order:
            own = runs[way].step(x, y)
            if i >= WARM_UP:
                seconds[way].append(own)
    ratios = {
        way: quartiles([u / r for u, r in zip(seconds[way], seconds["rows"], strict=True)])
        for way in WAYS
    }
    return {
        "workload": workload, "title": work.title, "cpu_wait": wait.share(),
        "step_s": {way: quartiles(own) for way, own in seconds.items()}, "ratio": ratios,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measures, writes the JSON file and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.units", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", default=["bert"], choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    found = [measure(workload, options.rounds) for workload in options.workloads]
    result = {
        "command": f"python -m bench.units --rounds {options.rounds}",
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "sizes": SIZES,
        "limit": LIMIT,
        "summary": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in found:
        print(
            f"\n{row['title']}: clipping by samples takes {row['step_s']['rows'][1] * 1e3:.0f} ms"
        )
        for way in WAYS[1:]:
            low, middle, high = row["ratio"][way]
            mark = "" if middle <= LIMIT else f"  above {LIMIT}x"
            print(f"  units, {way:<10}{middle:>7.3f}x  ({low:.3f} to {high:.3f}){mark}")
    print(busy_warning((row["workload"], row["cpu_wait"]) for row in found) or "")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
