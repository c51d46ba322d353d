"""Measures the cost of a clipping strategy in a step, as a share of a ResNet-18 step on the CPU.

    python -m bench.strategies

A strategy's own calls are, in each backward pass, norms to scales and counts. In each real step they are
noise on the counts, new thresholds, sensitivity and noise level. They are timed on squared norms of
ResNet-18's 62 parameter tensors for 32 samples. The whole step runs in its own process, in the same run.
`flat` shows the cost of any strategy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from bench.measure import machine, now, versions
from bench.processes import run_module
from fastclip import clipping
from fastclip.backward.clipping_state import ClippingState

BATCH, LAYERS, GROUPS, STEPS = 32, 62, 8, 1000
LIMIT = 0.01
OUT = Path(__file__).resolve().parent / "results" / "strategies-cpu.json"
STRATEGIES = {
    "flat": clipping.dp_sgd(),
    "per_layer": clipping.per_layer(),
    "normalized_dp_sgd": clipping.normalized_dp_sgd(),
    "automatic": clipping.automatic(),
    "fixed_soft": clipping.fixed_soft(),
    "adaptive": clipping.adaptive(),
    "soft_ada_clip": clipping.soft_ada_clip(),
    "unbounded_adaptive": clipping.unbounded_adaptive(),
    "bounded_adaptive": clipping.bounded_adaptive(0.5),
    "global_adapt": clipping.global_adapt(1.0),
    "dpsgd_f": clipping.dpsgd_f(GROUPS),
    "dpsgd_f (previous_step)": clipping.dpsgd_f(GROUPS, thresholds="previous_step"),
    "naive_reweighting": clipping.naive_reweighting(GROUPS),
    "sad_dpsgd": clipping.sad_dpsgd(STEPS),
    "auto_s": clipping.auto_s(STEPS),
    "auto_l": clipping.auto_l(STEPS),
    "tanh, bounded, per group, staged noise": clipping.Clipping(
        clipping.Tanh(),
        clipping.Quantile("above", tau=2.5, lower=0.5, num_groups=GROUPS),
        clipping.StagedNoise(STEPS),
    ),
}


def own_seconds(strategy: clipping.Clipping, calls: int) -> float:
    """Median seconds of the strategy's calls in one step."""
    torch.manual_seed(0)
    per_layer = strategy.threshold.per_layer
    state = ClippingState(strategy, [1.0] * LAYERS if per_layer else 1.0, LAYERS)
    state.expected_batch_size = BATCH
    state.noise_multiplier = 1.0
    norm_sq = torch.rand(LAYERS, BATCH) / 10  # [l, b]
    groups = torch.arange(BATCH) % GROUPS
    layers = torch.arange(LAYERS) if per_layer else None
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        state.set_groups(groups)
        state.clip(norm_sq, layers, fresh=True, placeholder=False)
        float(state.gradient_noise() * state.sensitivity())
        state.release(1)
        state.advance()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main(arguments: list[str] | None = None) -> None:
    """Measures, writes the JSON file and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.strategies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20, help="timed ResNet-18 steps")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    step = run_module(
        "bench.train",
        ["--one", "resnet18", "fastclip", "--steps", str(options.steps), "--seconds", "inf"],
    )
    if "error" in step:
        raise SystemExit(f"the ResNet-18 step failed: {step['error']}")
    whole = step["step_s"][1]
    rows = []
    for name, strategy in tqdm(STRATEGIES.items(), unit="strategy"):
        own = own_seconds(strategy, options.calls)
        rows.append({"strategy": name, "own_s": own, "share": own / whole})
    result = {
        "command": f"python -m bench.strategies --calls {options.calls} --steps {options.steps}",
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "resnet18_step_s": whole,
        "calls": options.calls,
        "summary": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nResNet-18 step: {whole * 1e3:.0f} ms (median); a strategy's own calls:")
    for row in rows:
        mark = "" if row["share"] <= LIMIT else "  above 1%"
        print(f"  {row['strategy']:<40}{row['own_s'] * 1e6:>8.0f} us {row['share']:>8.3%}{mark}")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
