"""Measures the cost of noise and of materialized clipping on the CPU, side by side in one run.

    python -m bench.noise

It compares a secure normal with `torch.randn`, the noise of one step on BERT-base's parameters with
Opacus' loop over them, and clipping of materialized per-sample gradients with Opacus'
`clip_and_accumulate`. It uses one core by default. The implementations take turns, and ratios are of
their medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import Tensor, nn
from tqdm import tqdm
from transformers import BertConfig, BertModel

from bench.measure import CpuWait, busy_warning, machine, now, quartiles, versions
from examples.models import resnet18
from fastclip import ops
from fastclip.ops.noise import NoiseSource, SecureNoise, SeededNoise

VALUES = 110_000_000
BATCH = 16  # samples of ResNet-18: 0.7 GB of per-sample gradients
LIMITS = {"secure, no guard": 2.0, "secure": 6.0}
"""Of torch.randn's time."""
OUT = Path(__file__).resolve().parent / "results" / "noise-cpu.json"
Ways = dict[str, Callable[[], Any]]


def normals() -> Ways:
    """110 M normals; the first way is the baseline."""
    out = torch.empty(VALUES)
    out.normal_()  # touches the pages

    def into(source: NoiseSource) -> Callable[[], Any]:
        return lambda: source.normal_(out)

    return {
        "torch.randn": lambda: torch.randn(VALUES),
        "normal_ in place": into(SeededNoise()),
        "secure, no guard": into(SecureNoise(guarded=False)),
        "secure": into(SecureNoise()),
    }


def finalize() -> Ways:
    """Noise, sum and division of one step for BERT-base's 199 parameters."""
    with torch.device("meta"):
        shapes = [p.shape for p in BertModel(BertConfig()).parameters()]
    parameters = [torch.zeros(shape) for shape in shapes]
    sums = [torch.ones(shape) for shape in shapes]

    def zero_grad() -> None:
        for p in parameters:
            p.grad = None

    def opacus(secure: bool) -> None:
        zero_grad()
        for p, total in zip(parameters, sums, strict=True):
            noise = _generate_noise(1.0, total, None, secure)
            p.grad = (total + noise).view_as(p)
            p.grad /= 32

    def ours(source: NoiseSource) -> None:
        zero_grad()
        gradients = ops.noise_finalize(sums, parameters, 1.0, 32.0, source)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient

    return {
        "Opacus": lambda: opacus(False),
        "fastclip, seeded": lambda: ours(SeededNoise()),
        "Opacus, guard but no cipher": lambda: opacus(True),
        "fastclip, secure": lambda: ours(SecureNoise()),
    }


def clip() -> Ways:
    """Norms, scales and weighted sums of the per-sample gradients of ResNet-18."""
    parameters = [nn.Parameter(p.detach()) for p in resnet18().parameters()]
    for p in parameters:
        p.grad_sample = torch.randn(BATCH, *p.shape) / p.numel() ** 0.5
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=BATCH,
    )  # fmt: skip

    def opacus() -> None:
        for p in parameters:
            p.summed_grad = None
            p.grad_sample.__dict__.pop("_processed", None)
        optimizer.clip_and_accumulate()

    samples: list[Tensor] = [p.grad_sample for p in parameters]
    return {
        "Opacus": opacus,
        "fastclip": lambda: ops.clip_accumulate(samples, 1.0),
    }


PARTS: dict[str, Callable[[], Ways]] = {
    f"normals ({VALUES / 1e6:.0f} M)": normals,
    "noise of a BERT-base step": finalize,
    f"clip_accumulate, ResNet-18, batch {BATCH}": clip,
}


def measure(ways: Ways, rounds: int, bar: tqdm) -> list[dict[str, Any]]:
    """Quartiles of the seconds of every way; the ways take turns, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            bar.update()
    base = statistics.median(next(iter(seconds.values())))
    return [
        {"way": name, "seconds": quartiles(found), "ratio": statistics.median(found) / base}
        for name, found in seconds.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measures, writes the JSON file and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.noise", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    with tqdm(unit="call", leave=False) as bar:
        for part, make in PARTS.items():
            wait = CpuWait()
            found = measure(make(), options.rounds, bar)
            share = wait.share()
            rows += [{"part": part, "cpu_wait": share, **row} for row in found]
    result = {
        "command": f"python -m bench.noise --rounds {options.rounds} --threads {options.threads}",
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "threads": options.threads,
        "summary": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    part = None
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            print(f"\n{part}")
        limit = LIMITS.get(row["way"], float("inf"))
        mark = "" if row["ratio"] <= limit else f"  above {limit}x"
        print(f"  {row['way']:<30}{row['seconds'][1] * 1e3:>8.0f} ms {row['ratio']:>7.2f}x{mark}")
    warning = busy_warning((row["part"], row["cpu_wait"]) for row in rows)
    print(f"\n{warning}" if warning else "", f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
