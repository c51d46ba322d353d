"""Measures the host cost of a private step of a small model: CPU seconds and calls.

    python -m bench.small
    python -m bench.small --models mlp --rounds 100
    python -m bench.small --models bert_256 --rounds 15

The models have many small layers, with batches of 8, on one thread of the CPU. bert_256 has a
realistic size. Each mode runs in its own process: a non-private step ("ordinary"), one of
torch.compile(model), and one that is traced and compiled whole with its optimizer; a private step, one
without C++ nodes (fastclip._step), one of torch.compile(private model), and one compiled whole
(engine.make_step). Each has the smallest and the median CPU time, the number of calls of Python and C
functions from Python, and the seconds of the first steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification, ViTConfig
from transformers import ViTForImageClassification as Vit

from bench.measure import heading, quartiles
from bench.models import resnet50
from bench.processes import report, run_module
from fastclip import FastPrivacyEngine
from fastclip.engine.graphs import TracedRecorder

OUT = Path(__file__).resolve().parent / "results" / "small-cpu.json"
B, D, CLASSES, LAYERS = 8, 64, 10, 24
WARM_UP = 5
RATE = 1e-6
SIZES = {
    "hidden_size": D,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 4 * D,
}
OTHERS: dict[str, Any] = {"num_labels": CLASSES}
Step = Callable[[], None]


def mlp() -> nn.Module:
    """24 layers of 64, and a head."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(D, D), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(D, CLASSES))


def bert() -> nn.Module:
    """4 layers over 16 positions."""
    options = {**SIZES, **OTHERS, "vocab_size": 500, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**options))


def vit() -> nn.Module:
    """4 layers over 16 patches."""
    return Vit(ViTConfig(**SIZES, **OTHERS, image_size=32, patch_size=8))


def resnet() -> nn.Module:
    """4 bottleneck blocks with GroupNorm, from 16 channels on."""
    return resnet50(CLASSES, (1, 1, 1, 1), 16, 4)


def bert_256() -> nn.Module:
    """4 layers of 256 over 128 positions, without dropout."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 1024}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **rates, **OTHERS, vocab_size=8192))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(B, D)),
    "bert": (bert, lambda: torch.randint(3, 500, (B, 16))),
    "vit": (vit, lambda: torch.randn(B, 3, 32, 32)),
    "resnet": (resnet, lambda: torch.randn(B, 3, 32, 32)),
    "bert_256": (bert_256, lambda: torch.randint(3, 8192, (16, 128))),
}
COMPILED = "ordinary compiled", "ordinary whole", "private compiled", "private whole"
MODES = "ordinary", "private", "without nodes", *COMPILED


def _losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out), y, reduction="none")


def ordinary_step(mode: str, model: Any, x: Tensor, y: Tensor) -> Step:
    """As it is, of a compiled model, or compiled whole, with the optimizer's operators."""
    parameters = [*model.parameters()]
    if mode == "ordinary whole":

        def whole() -> tuple[None, list[Tensor]]:
            loss = _losses(model, x, y).mean()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                trained = torch._foreach_add(parameters, gradients, alpha=-RATE)
            return None, [loss.detach(), *trained]

        graph, _ = TracedRecorder(x.device).capture(whole)

        def replay() -> None:
            graph.replay()

        return replay
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    called = torch.compile(model, dynamic=False) if mode == "ordinary compiled" else model

    def step() -> None:
        optimizer.zero_grad()
        _losses(called, x, y).mean().backward()
        optimizer.step()

    return step


def private_step(mode: str, model: Any, x: Tensor, y: Tensor) -> tuple[Step, Any]:
    """As it is, without nodes of C++, or compiled; and the private model."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, rows = FastPrivacyEngine(), len(x)
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=optimizer, noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.zeros(10 * rows, 1)), batch_size=rows),
        poisson_sampling=False,
    )  # fmt: skip
    if mode == "without nodes":
        private.grad_state.bare.layers = []
    whole = engine.make_step(private, _losses, physical_batch=rows, compile=True)
    called = torch.compile(private, dynamic=False) if mode == "private compiled" else private

    def step() -> None:
        optimizer.zero_grad()
        if mode == "private whole":
            whole(x, y)
        else:
            _losses(called, x, y).mean().backward()
        optimizer.step()

    return step, private


def step_of(mode: str, build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> tuple[Step, Any]:
    """A step that has run a few times, and the private model (None if non-private)."""
    torch.manual_seed(0)
    model: Any = build().train()
    private = None
    if mode.startswith("ordinary"):
        step = ordinary_step(mode, model, x, y)
    else:
        step, private = private_step(mode, model, x, y)
    for _ in range(WARM_UP):
        step()
    return step, private


def calls(step: Step) -> int:
    """Number of calls of Python and C functions from Python in a step, on any thread."""
    found = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        found[0] += event in ("call", "c_call")

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found[0]


def measured(name: str, mode: str, rounds: int) -> dict[str, Any]:
    """One model in one mode; a private model is alone, because it checks every backward pass."""
    build, inputs = MODELS[name]
    torch.manual_seed(1)
    x = inputs()
    y = torch.randint(CLASSES, (len(x),))
    first = time.perf_counter()
    step, model = step_of(mode, build, x, y)
    first = time.perf_counter() - first
    entered, seconds = min(calls(step), calls(step)), []  # one of two may be a proof of a graph
    for _ in range(rounds):
        begun = time.process_time()
        step()
        seconds.append(time.process_time() - begun)
    private = model is not None
    return {
        "first": first,
        "least": min(seconds),
        "median": quartiles(seconds)[1],
        "calls": entered,
        "nodes": model.grad_state.bare.listed + model.grad_state.bare.taken if private else 0,
        "layers": len(model.grad_state.plan_log.plan().rows) if private else 0,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures, writes the JSON file and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.small", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each mode")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        report(lambda: measured(*args.one, args.rounds))
        return
    results: dict[str, dict[str, Any]] = {name: {} for name in args.models}
    for name, mode in tqdm([*product(args.models, args.modes)], desc="models"):
        one = ["--one", name, mode, "--rounds", str(args.rounds)]
        results[name][mode] = run_module("bench.small", one)
        written = heading("bench.small", arguments) | {"models": results}
        args.out.write_text(json.dumps(written, indent=1) + "\n")
    print(
        "| model | mode | first steps, s | smallest, ms | median, ms | of ordinary | calls "
        "| added per layer | nodes |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, modes in results.items():
        failed = [f"{mode}: {r['error']}" for mode, r in modes.items() if "error" in r]
        if failed:
            print(f"| {name} | {'; '.join(failed)} |")
            continue
        plain = modes["ordinary"]
        for mode, r in modes.items():
            added = (r["calls"] - plain["calls"]) / r["layers"] if r["layers"] else 0
            print(
                f"| {name} | {mode} | {r['first']:.1f} "
                f"| {1e3 * r['least']:.2f} | {1e3 * r['median']:.2f} | "
                f"{r['least'] / plain['least']:.2f} | {r['calls']} | {added:.0f} | {r['nodes']} |"
            )


if __name__ == "__main__":
    main()
