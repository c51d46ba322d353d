"""Host time and launches of a private step on a GPU, measured where there is none.

    python -m bench.host
    python -m bench.host --profile 40

A step runs on a device that computes nothing (bench/null_gpu), at the workload's real sizes and under
bfloat16 autocast, so what is timed is the host: Python, PyTorch's dispatcher and autograd, Triton's
launcher. Not in it: the CUDA runtime's own time of a launch (2 to 5 us each on most machines), and
what fastclip._C does with the arguments of its two or three calls. The first look at the model and the
search for configurations lie in the steps before.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench import null_gpu
from bench.measure import CpuWait, heading, quartiles
from bench.models import bert
from bench.workloads import PRIVATE

OUT = Path(__file__).resolve().parent / "results" / "host.json"
WARM_UP = 3
CLASSES = 10
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batch.

    Attributes:
        build: the model, of full size or as small as it can be with the same modules.
        vocabulary: of the ids. shape: of a batch of them, [b, t].
        targets: what belongs to ids. criterion: builds the loss.
    """

    build: Callable[[bool], nn.Module]
    vocabulary: int
    shape: tuple[int, int]
    targets: Callable[[torch.Tensor], torch.Tensor] = lambda x: x[:, 0] % CLASSES
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss


def _bert(small: bool) -> nn.Module:
    sizes = (12, 24, 12, 48) if small else (12, 768, 12, 3072)
    return bert(*sizes, vocab=30522, num_labels=CLASSES)


CASES = {"bert_base": Case(_bert, 30522, (32, 128))}


def non_private(model: nn.Module, criterion: nn.Module, case: Case) -> tuple[nn.Module, Any]:
    """Ordinary training."""
    model = model.to("cuda")
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def fastclip(model: nn.Module, criterion: nn.Module, case: Case) -> tuple[nn.Module, Any]:
    """This project's engine, with what it found out about a small twin on the CPU: that needs values."""
    from fastclip import FastPrivacyEngine
    from fastclip.samples.watch import Watch

    def private(model: nn.Module) -> tuple[Any, Any]:
        device = next(model.parameters()).device
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = torch.zeros(case.shape, dtype=torch.int64, device=device)
        loader = DataLoader(TensorDataset(x), batch_size=len(x))
        model, optimizer, _ = FastPrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, **PRIVATE
        )
        return model, optimizer

    small, _ = private(case.build(True).train())
    x = torch.randint(case.vocabulary, case.shape)
    out = small(x)
    criterion(getattr(out, "logits", out), case.targets(x)).backward()
    layouts = small.keeper.calls.layouts
    raw = model.to("cuda")
    model, optimizer = private(raw)
    watch = Watch(raw, (x.to("cuda"),), {})
    large = {name: parameter for parameter, name in model.keeper.names.items()}
    for layout in layouts.values():
        layout.watch = watch
        layout.proxied = {large[small.keeper.names[parameter]] for parameter in layout.proxied}
    model.keeper.calls.layouts = layouts
    return model, optimizer


MODES: dict[str, Callable[..., tuple]] = {mode.__name__: mode for mode in (non_private, fastclip)}


def prepared(name: str, mode: str) -> tuple[Step, nn.Module]:
    """A step of a workload, and its model; some steps have run."""
    null_gpu.install()
    case = CASES[name]
    torch.manual_seed(0)
    criterion = case.criterion()
    x = torch.randint(case.vocabulary, case.shape)
    inputs, targets = x.to("cuda"), case.targets(x).to("cuda")
    model, optimizer = MODES[mode](case.build(False).train(), criterion, case)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(inputs)
            loss = criterion(getattr(out, "logits", out), targets)
        loss.backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    return step, model


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of so many steps in every mode, which take turns; no garbage is collected.

    Seconds of a processor: the thread of the backward pass and that of the program wait for each
    other, so theirs add up to the time that passes where no other program runs.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for mode, step in steps.items():
                start = time.process_time()
                step()
                seconds[mode].append(time.process_time() - start)
    finally:
        gc.enable()
    return seconds


def functions(step: Step, most: int) -> list[dict[str, Any]]:
    """Where the time goes: functions by the time in themselves, in ms a step, under Python's profiler
    (which makes calls of Python slower than they are)."""
    profile = cProfile.Profile(time.perf_counter)
    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees its own thread alone
        step()
        profile.enable()
        for _ in range(5):
            step()
        profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # its stubs leave it out
    rows = [
        {
            "function": f"{Path(file).name}:{line} {name}",
            "calls": calls / 5, "own_ms": own / 5e-3, "ms": whole / 5e-3,
        }
        for (file, line, name), (_, calls, own, whole, _) in stats.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["own_ms"])[:most]


def measure(name: str, rounds: int, profile: int) -> dict[str, Any]:
    """Launches and host times of a step, not private and private.

    Returns:
        launches, step_ms (the least, which no other program has made longer, and quartiles) by mode;
        added_us_a_linear: what the private step takes longer, for each of its Linear layers.
    """
    wait = CpuWait()
    ready = {mode: prepared(name, mode) for mode in MODES}
    steps = {mode: step for mode, (step, _) in ready.items()}
    row: dict[str, Any] = {"workload": name, "shape": CASES[name].shape}
    for mode, step in steps.items():
        null_gpu.launches(True)
        step()
        found = null_gpu.launches(False)
        row[mode] = {"launches": {k: sum(n.values()) for k, n in found.items()}, "by_kernel": found}
    for mode, seconds in timed(steps, rounds).items():
        row[mode]["step_ms"] = [1e3 * s for s in (min(seconds), *quartiles(seconds))]
    if profile:
        row["fastclip"]["functions"] = functions(steps["fastclip"], profile)
    row["linear_layers"] = sum(isinstance(m, nn.Linear) for m in ready["fastclip"][1].modules())
    ordinary, private = (row[mode] for mode in MODES)
    row["added_launches"] = sum(private["launches"].values()) - sum(ordinary["launches"].values())
    row["added_ms"] = private["step_ms"][0] - ordinary["step_ms"][0]
    row["added_us_a_linear"] = 1e3 * row["added_ms"] / row["linear_layers"]
    row["cpu_wait"] = wait.share()
    return row


def table(rows: list[dict]) -> str:
    """A line for each workload and mode."""
    lines = [f"{'':<24}{'ms':>8}{'aten':>7}{'triton':>8}{'_C':>4}"]
    for row in rows:
        for mode in MODES:
            n = row[mode]["launches"]
            lines.append(
                f"{row['workload']:<12}{mode:<12}{row[mode]['step_ms'][0]:>8.1f}{n['aten']:>7}"
                f"{n['triton']:>8}{n['extension']:>4}"
            )
        lines.append(
            f"  added: {row['added_launches']} launches, {row['added_ms']:.1f} ms, "
            f"{row['added_us_a_linear']:.0f} us a Linear"
        )
        for found in row["fastclip"].get("functions", ()):
            lines.append(
                f"{found['own_ms']:>9.2f} ms own {found['ms']:>9.2f} ms {found['calls']:>7.0f} calls  "
                f"{found['function']}"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table and write the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each mode")
    parser.add_argument("--profile", type=int, default=0, help="functions to show")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = [measure(name, options.rounds, options.profile) for name in options.workloads]
    result = {**heading("bench.host", arguments), "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
