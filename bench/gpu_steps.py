"""Whole training steps on a GPU: the workloads, and `measure`, which times one of them in one mode.

    python -m bench.gpu_steps                      every workload and mode, one after another
    python -m bench.gpu_steps --tiny --device cpu  the same code on small models, anywhere

bench.gpu runs each pair in a process of its own. Every mode trains the same model on the same random
data with SGD(momentum 0.9); the private ones are those of bench.workloads.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from itertools import pairwise

import torch

from bench.children import job
from bench.gpu_tasks import TASKS, Trainer
from bench.kernels import tuning
from bench.kernels.check import WrongResult
from bench.kernels.clock import clock_for
from bench.measure import PeakMemory, quartiles
from bench.processes import report
from bench.workloads import MODES

WARM_UP, STEPS = 3, 10
SLACK = 0.01  # relative error of a clipped gradient that two orders of summing may leave


class CudaPeak:
    """Peak of the memory that tensors take on a GPU, above what they took when this was made."""

    method = "max_memory_allocated"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.start = torch.cuda.memory_allocated(device)  # bytes

    def restart(self) -> None:
        """Forget the peak so far (warm-up tunes kernels, which takes memory of its own)."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def above_start(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self.start


def check(trainer: Trainer) -> dict[str, float]:
    """How far kernels and reference are from the reference in float32, over the whole model.

    Relative errors of the clipped gradient and of the per-sample norms. In bfloat16 both are far
    (ResNets more than BERT), so that the reference's own distance is the measure.

    Raises:
        WrongResult: the kernels are farther than the reference by more than rounding explains.
    """
    with trainer.without_dropout():
        exact = trainer.clipped("reference", autocast=False)
        reference, found = trainer.clipped("reference"), trainer.clipped("auto")
    row = {}
    for i, name in enumerate(("gradient", "norm")):
        size = exact[i].norm()
        row[f"{name}_error"] = ((found[i] - exact[i]).norm() / size).item()
        row[f"{name}_error_of_reference"] = ((reference[i] - exact[i]).norm() / size).item()
        if not row[f"{name}_error"] <= 2 * row[f"{name}_error_of_reference"] + SLACK:
            raise WrongResult(f"kernels disagree with the reference: {row}")
    return row


def host_syncs(trainer: Trainer) -> int:
    """How often the CPU waits for the GPU in one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in caught)


def kernels_in_use(device: torch.device) -> dict[str, str]:
    """Operation -> backend that has served it, or why only the reference does."""
    from fastclip.ops import dispatch

    found = {name: dispatch.backend_of(name, device) for name in sorted(dispatch.OPERATIONS)}
    return {
        name: backend if why in ("launched", "available") else f"{backend}: {why}"
        for name, (backend, why) in found.items()
    }


def measure(
    name: str, mode: str, device: torch.device, steps: int = STEPS, tiny: bool = False
) -> dict:
    """Time `steps` training steps after `WARM_UP` others, in this process.

    Returns:
        "step_s": first quartile, median and third of a step; "host_s": median time until a step is
        queued; "host_syncs": waits of the CPU for the GPU in a step; "peak_mib": memory above the
        built model; "loss". For fastclip also what `check` found, and "kernels".
    """
    clock = clock_for(device)
    with warnings.catch_warnings(record=True) as caught:
        trainer = Trainer(name, mode, device, tiny)
        title = f"{name}, tiny" if tiny else TASKS[name].title.format(b=trainer.batch)
        row: dict = {"title": title, "batch": trainer.batch}
        if mode == "fastclip":
            row |= check(trainer)
        memory = CudaPeak(device) if device.type == "cuda" else PeakMemory()
        for _ in range(WARM_UP):
            loss = trainer.step()
        clock.synchronize()
        if isinstance(memory, CudaPeak):
            memory.restart()
        stamps, host = [clock.stamp()], []
        for _ in range(steps):
            begin = time.perf_counter()
            loss = trainer.step()
            stamps.append(clock.stamp())
            host.append(time.perf_counter() - begin)
        clock.synchronize()
        peak = memory.above_start()
        row["host_syncs"] = host_syncs(trainer) if device.type == "cuda" else None
    row["step_s"] = quartiles([clock.seconds(a, b) for a, b in pairwise(stamps)])
    row |= {"host_s": statistics.median(host), "steps": steps, "loss": float(loss.item())}
    row |= {"peak_mib": peak / 2**20, "built_mib": memory.start / 2**20}
    row["memory_method"] = memory.method
    row["warnings"] = sorted({str(w.message) for w in caught if "kernel of" in str(w.message)})
    if mode == "fastclip":
        row["kernels"] = kernels_in_use(device)
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measure the pairs asked for here; or, as bench.gpu's child, the one that it sends."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tuning.short()
    if options.child:
        order = job()  # everything is imported by now; the parent says when the GPU is free
        pair = (order["task"], order["mode"], torch.device(order["device"]))
        report(lambda: measure(*pair, order["steps"], order["tiny"]))
        return
    for task in options.tasks:
        for mode in options.modes:
            print(task, mode)
            pair = (task, mode, torch.device(options.device))
            report(lambda pair=pair: measure(*pair, options.steps, options.tiny))


if __name__ == "__main__":
    main()
