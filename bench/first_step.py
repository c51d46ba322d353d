"""Measures the cost of a traced step, and of everything before the first private step ends.

    python -m bench.first_step
    python -m bench.first_step --models bert_base mlp

For each model, in its own process and on one thread, it runs a non-private step and the same step under
the tracer (`fastclip.trace`). It then runs a private model from make_private to the end of its first
step, and its third step. All times are CPU seconds, so other programs matter little. Where a measurement
can be repeated, the smallest of several counts. The result of a traced step is compared with that of
its non-private step.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from transformers import MixtralConfig, MixtralForCausalLM, ViTConfig, ViTForImageClassification

from bench.measure import heading
from bench.models import ExplicitGpt2, SampleMeanCrossEntropy, bert, resnet50
from bench.processes import report, run_module
from fastclip import FastPrivacyEngine
from fastclip.trace.tracer import Tracer

OUT = Path(__file__).resolve().parent / "results" / "first-step-cpu.json"
REPEATS = 4
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A model, what it is given, and its loss.

    Attributes:
        build: the model. shape: of its input. vocabulary: of ids; 0: numbers. loss: (output, input,
            labels) to a number.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0
    loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda out, x, y: F.cross_entropy(
        getattr(out, "logits", out), y
    )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        numbers = self.vocabulary
        x = torch.randint(3, numbers, self.shape) if numbers else torch.randn(self.shape)
        return x, torch.randint(CLASSES, self.shape[:1])


class Lstm(nn.Module):
    """Two bidirectional layers over embedded ids, and a head on the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:  # [b, t] -> [b, classes]
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


def _mlp() -> nn.Module:
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    return nn.Sequential(*layers)


def _mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, use_cache=False,
        )
    )  # fmt: skip


def _next_token(out: Any, x: Tensor, _: Tensor) -> Tensor:
    logits = getattr(out, "logits", out)
    return SampleMeanCrossEntropy()(logits[:, :-1], x[:, 1:])


CASES = {
    "bert_base": Case(
        lambda: bert(12, 768, 12, 3072, vocab=30522, num_labels=CLASSES), (4, 32), 30000
    ),
    "gpt2_small": Case(ExplicitGpt2, (4, 32), 50000, _next_token),
    "resnet50": Case(lambda: resnet50(CLASSES), (4, 3, 96, 96)),
    "vit_base": Case(
        lambda: ViTForImageClassification(ViTConfig(num_labels=CLASSES)), (4, 3, 224, 224)
    ),
    "mixtral": Case(_mixtral, (4, 32), 8000, _next_token),
    "mlp": Case(_mlp, (32, 64)),
    "lstm": Case(Lstm, (32, 20), 500),
}


def step(model: nn.Module, case: Case, batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    """CPU seconds of a forward and a backward pass, and the loss."""
    for p in model.parameters():
        p.grad = None
    torch.manual_seed(1)  # dropout
    start = time.process_time()
    loss = case.loss(model(batch[0]), *batch)
    loss.backward()
    return time.process_time() - start, loss.detach()


def traced(
    model: nn.Module, case: Case, batch: tuple[Tensor, Tensor]
) -> tuple[float, Tensor, Tracer]:
    """The same under the tracer."""
    tracer = Tracer(set(model.parameters()))
    tracer.begin()
    if not tracer.enter():
        raise RuntimeError("the tracer cannot enter here")
    start = time.process_time()
    for x in batch:
        tracer.seed(x)
    try:
        _, loss = step(model, case, batch)
        return time.process_time() - start, loss, tracer
    finally:
        tracer.leave()


def private(case: Case, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """CPU seconds from make_private to the end of the first step, and of the third."""
    torch.manual_seed(0)
    model = case.build()
    samples = case.shape[0]
    start = time.process_time()
    made, optimizer, _ = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(10 * samples, 1)), batch_size=samples),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    seconds = []
    for _ in range(3):
        optimizer.zero_grad()
        case.loss(made(batch[0]), *batch).backward()
        optimizer.step()
        seconds.append(time.process_time() - start)
        start = time.process_time()
    return {"first_step": seconds[0], "third_step": seconds[2]}


def measured(name: str) -> dict[str, Any]:
    """All of one model, on one thread."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[name]
    model, batch = case.build().train(), case.batch()
    plain = [step(model, case, batch) for _ in range(REPEATS)]
    runs = [traced(model, case, batch) for _ in range(REPEATS)]
    seconds = min(s for s, _ in plain)
    shown = runs[0][2].report
    found: dict[str, Any] = {
        "plain": seconds,
        "traced_first": runs[0][0],
        "traced": min(s for s, *_ in runs),
        "operations": shown.operations,
        "verdict": shown.verdict,
        "same_loss": all(bool(loss == plain[0][1]) for _, loss, _ in runs),
    }
    del runs, model
    found |= private(case, batch)
    found |= {f"{k}_ratio": found[k] / seconds for k in ("traced_first", "traced", "first_step")}
    overhead = (found["traced_first"] - seconds) / shown.operations
    return found | {"microseconds_an_operation": 1e6 * overhead}


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        report(lambda: measured(args.one))
        return
    results = {}
    for name in tqdm(args.models, desc="models"):
        results[name] = run_module("bench.first_step", ["--one", name])
        written = heading("bench.first_step", arguments) | {"models": results}
        args.out.write_text(json.dumps(written, indent=1) + "\n")
    print("| model | plain, s | traced | best traced | first private step | us an operation |")
    print("|---|---|---|---|---|---|")
    for name, r in results.items():
        if "error" in r:
            print(f"| {name} | {r['error']} {r['detail']} |")
            continue
        print(
            f"| {name} | {r['plain']:.4f} | {r['traced_first_ratio']:.2f} | {r['traced_ratio']:.2f} "
            f"| {r['first_step_ratio']:.1f} | {r['microseconds_an_operation']:.0f} |"
        )


if __name__ == "__main__":
    main()
