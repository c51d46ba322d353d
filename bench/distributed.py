"""Measures the cost of privacy in several processes, with the same batch on 1, 2 and more ranks.

    python -m bench.distributed
    python -m bench.distributed --ranks 1 2 --rounds 20 --workload bert
    python -m bench.distributed --ranks 2 --fsdp --out fsdp.json

The ranks of one run hold two models: non-private DistributedDataParallel, and the same model made
private. They train both in turn, step by step, so other load on the machine affects both. Ranks share
the threads of the machine. Bytes are what a rank sends in the exchanges of a step (of gradients or of
sums). With --fsdp both models also gather their parameters, in the same way. Peak memory is of processes
that train one of the two models alone. `on_paper` is computed from sizes alone, for larger models and
more ranks. It is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from bench.children import Child, job, tell
from bench.measure import CpuWait, PeakMemory, busy_warning, heading, quartiles
from bench.workloads import BATCHES, PRIVATE, WARM_UP, WORKLOADS
from fastclip import FastPrivacyEngine
from fastclip.distributed import shards

OUT = Path(__file__).resolve().parent / "results" / "distributed-cpu.json"
MODES = ("non_private", "fastclip")
LIMIT = 300.0
"""Seconds to wait for a message of a rank."""
SIZES = {"BERT-base": 110e6, "ViT-L": 304e6, "Llama-8B LoRA": 21e6, "Llama-8B": 8e9}
"""Trained parameters."""
BANDWIDTH = 100e9
"""Bytes per second that a rank sends, for computed times; replace it by that of your network."""


class Training:
    """One rank of a workload in one mode."""

    def __init__(self, workload: str, mode: str, *, spread: bool = False) -> None:
        torch.manual_seed(0)
        task, ranks = WORKLOADS[workload], distributed.get_world_size()
        rows = task.batch_size // ranks
        x = task.inputs(task.batch_size * BATCHES)
        data = TensorDataset(x, task.targets(x))
        self.model: nn.Module = task.model().train()
        if spread:
            self.model = spread_by_layers(self.model)
        elif ranks > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizer: Any = torch.optim.SGD(
            self.model.parameters(), lr=task.lr, momentum=task.momentum
        )
        loader = DataLoader(data, rows, sampler=DistributedSampler(data, shuffle=False))
        self.criterion = task.criterion()
        if mode == "fastclip":
            self.model, self.optimizer, loader = FastPrivacyEngine().make_private(
                module=self.model, optimizer=self.optimizer, data_loader=loader, **PRIVATE
            )
        self._batches = self._without_end(list(loader))

    @staticmethod
    def _without_end(held: list[Any]) -> Iterator[Any]:
        while True:
            yield from held

    def step(self) -> float:
        """Takes one step, which all ranks start together, and returns its seconds."""
        x, y = next(self._batches)
        distributed.barrier()
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        output = self.model(x)
        self.criterion(getattr(output, "logits", output), y).backward()
        self.optimizer.step()
        return time.perf_counter() - begun


def spread_by_layers(model: nn.Module) -> nn.Module:
    """Shards each entry of a list of layers, then the rest of the model."""
    for layers in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer)
    return fully_shard(model)


@contextmanager
def sent() -> Iterator[Counter[str]]:
    """Counts the exchanges that this rank starts from Python, and their bytes."""
    found: Counter[str] = Counter()
    plain, to_owners = distributed.all_reduce, shards._reduce_scatter

    def count(tensor: Tensor) -> None:
        found.update({"bytes": tensor.numel() * tensor.element_size(), "exchanges": 1})

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        count(tensor)
        return plain(tensor, *args, **kwargs)

    def scattered(part: Tensor, whole: Tensor, **kwargs: Any) -> Any:
        count(whole)
        return to_owners(part, whole, **kwargs)

    distributed.all_reduce, shards._reduce_scatter = counted, scattered
    try:
        yield found
    finally:
        distributed.all_reduce, shards._reduce_scatter = plain, to_owners


def rank() -> None:
    """Joins the other ranks in a child process, trains and reports."""
    warnings.filterwarnings("ignore")
    asked = job()
    torch.set_num_threads(asked["threads"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{asked['meeting']}", rank=asked["rank"],
        world_size=asked["ranks"],
    )  # fmt: skip
    trainings = {
        mode: Training(asked["workload"], mode, spread=asked["spread"]) for mode in asked["modes"]
    }
    memory, wait = PeakMemory(), CpuWait()
    taken: dict[str, list[float]] = {mode: [] for mode in trainings}
    exchanged: dict[str, dict[str, int]] = {}
    for number in range(WARM_UP + asked["rounds"]):
        for mode, training in trainings.items():
            with sent() as bytes_sent:
                seconds = training.step()
            exchanged[mode] = dict(bytes_sent)
            if number >= WARM_UP:
                taken[mode].append(seconds)
        tell({"round": number})
    parameters = trainings[asked["modes"][0]].model.parameters()
    tell(
        {
            "step_s": taken, "exchanged": exchanged, "peak_mib": memory.above_start() / 2**20,
            "cpu_wait": wait.share(), "gradient_bytes": sum(p.numel() * 4 for p in parameters),
        }
    )  # fmt: skip
    distributed.destroy_process_group()


def launch(
    ranks: int, workload: str, modes: list[str], rounds: int, told: Callable[[], Any],
    spread: bool,
) -> list[dict]:  # fmt: skip
    """Runs the ranks and returns their final reports."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        threads = max(1, (os.cpu_count() or 1) // ranks)
        environment = {"OMP_NUM_THREADS": str(threads)}
        children = [
            stack.enter_context(Child(["-m", "bench.distributed", "--rank"], environment))
            for _ in range(ranks)
        ]
        for number, child in enumerate(children):
            child.send(
                {
                    "rank": number, "ranks": ranks, "workload": workload, "modes": modes,
                    "rounds": rounds, "threads": threads, "meeting": f"{folder}/meeting",
                    "spread": spread,
                }
            )  # fmt: skip
        found: list[dict] = []
        for child in children:
            while (message := child.message(LIMIT)) is not None and "step_s" not in message:
                if child is children[0]:
                    told()
            if message is None:
                raise RuntimeError(f"a rank has ended: {child.death()}")
            found.append(message)
        return found


def on_paper() -> list[dict[str, Any]]:
    """Exchanges and noise of a step, computed from sizes (a ring sends 2 (W - 1) / W of the sums)."""
    rows = []
    for name, parameters in SIZES.items():
        for ranks in (8, 64, 512):
            sent_bytes = 2 * (ranks - 1) / ranks * 4 * parameters
            rows.append(
                {
                    "model": name, "ranks": ranks, "bytes_of_a_rank": round(sent_bytes),
                    "seconds_at_100_gb_s": sent_bytes / BANDWIDTH,
                    "values_of_noise_of_a_rank": round(parameters / ranks),
                    "in_one_process": round(parameters),
                }
            )  # fmt: skip
    return rows


def measure(
    ranks: int, workload: str, rounds: int, told: Callable[[], Any], *, spread: bool
) -> dict[str, Any]:
    """Measures the time of both modes in turn, then the memory of each alone."""
    found = launch(ranks, workload, list(MODES), rounds, told, spread)
    row: dict[str, Any] = {"ranks": ranks, "cpu_wait": found[0]["cpu_wait"]}
    for mode in MODES:
        alone = launch(ranks, workload, [mode], 3, told, spread)
        row[mode] = {
            "step_s": quartiles(found[0]["step_s"][mode]),
            "peak_mib": max(each["peak_mib"] for each in alone),
            "exchanged": found[0]["exchanged"][mode],
        }
    row["non_private"]["exchanged"] = {"bytes": found[0]["gradient_bytes"] if ranks > 1 else 0}
    pairs = zip(*(found[0]["step_s"][mode] for mode in MODES), strict=True)
    row["ratio"] = quartiles([private / plain for plain, private in pairs])
    row["memory_ratio"] = row["fastclip"]["peak_mib"] / row["non_private"]["peak_mib"]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The table, with one line per number of ranks."""
    names = ("non-private", "private", "ratio", "memory", "sent MiB")
    lines = [
        f"{'ranks':>5} {names[0]:>12} {names[1]:>9} {names[2]:>22} {names[3]:>8} {names[4]:>9}"
    ]
    for row in rows:
        plain, own = (row[mode]["step_s"][1] for mode in MODES)
        low, middle, high = row["ratio"]
        lines.append(
            f"{row['ranks']:>5} {plain:>10.3f} s {own:>7.3f} s {middle:>8.2f}x [{low:.2f}-{high:.2f}]"
            f" {row['memory_ratio']:>7.2f}x"
            f" {row['fastclip']['exchanged'].get('bytes', 0) / 2**20:>9.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs all numbers of ranks, prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.distributed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workload", choices=WORKLOADS, default="bert")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each mode")
    parser.add_argument("--fsdp", action="store_true", help="use fully_shard instead of DDP")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    rounds = [options.rounds + WARM_UP, *(3 + WARM_UP for _ in MODES)]
    with tqdm(total=len(options.ranks) * sum(rounds), unit="step") as progress:
        rows = [
            measure(ranks, options.workload, options.rounds, progress.update, spread=options.fsdp)
            for ranks in options.ranks
        ]
    result = {
        **heading("bench.distributed", arguments), "workload": options.workload,
        "model": "fully_shard" if options.fsdp else "DistributedDataParallel", "rows": rows,
        "on_paper": on_paper(),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    warning = busy_warning([(f"{row['ranks']} ranks", row["cpu_wait"]) for row in rows])
    if warning:
        print(warning)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank()
    else:
        main()
