"""Whole training steps on a GPU: the workloads, and `measure`, which times one of them in one mode.

    python -m bench.gpu_steps                      every workload and mode, one after another
    python -m bench.gpu_steps --tiny --device cpu  the same code on small models, anywhere

bench.gpu runs each pair in a process of its own, which tells what it has found part by part. Every
mode trains the same model on the same random data with SGD(momentum 0.9); the private ones are those
of bench.workloads. Kernels are tuned by a step of the very batch that is timed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from bench.children import job, tell
from bench.gpu_graph import CapturedStep, NotCaptured
from bench.gpu_profile import chosen_configurations, plan_of, profiled
from bench.gpu_tasks import TASKS, Trainer
from bench.kernels import tuning
from bench.kernels.check import WrongResult
from bench.kernels.clock import CpuClock, clock_for
from bench.measure import PeakMemory, first_line, quartiles
from bench.processes import frames
from bench.workloads import MODES

WARM_UP, STEPS = 3, 10
ALONE = 5  # steps of which the host's time is taken
GRAPHS = ("non_private", "fastclip")  # modes whose step is also tried as a CUDA graph
TOLD_EVERY = 5.0  # seconds
AHEAD = 16  # samples of a step that only compiles: a multiple of 16, as every batch that is timed
AHEAD_MEMORY = (
    0.4  # of the card, that such a process may take: GPT-2 takes 23 GiB, the others a few
)
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
        reference, found = trainer.clipped("reference"), trainer.clipped(None)
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
    # when the mode is first set, PyTorch warns of the mode itself
    return sum("called a synchronizing" in str(w.message) for w in caught)


def kernels_in_use(device: torch.device) -> dict[str, str]:
    """Operation -> backend that has served it, or why only the reference does."""
    from fastclip.ops import dispatch

    found = {name: dispatch.backend_of(name, device) for name in sorted(dispatch.OPERATIONS)}
    return {
        name: backend if why in ("launched", "available") else f"{backend}: {why}"
        for name, (backend, why) in found.items()
    }


def looks_of(model: Any) -> list[tuple[int, float]]:
    """fastclip's looks at a private model: passes and seconds of each."""
    keeper = getattr(model, "keeper", None)
    return [] if keeper is None else [(look.passes, look.seconds) for look in keeper.calls.looks]


def timed(step: Callable[[], Any], clock: CpuClock, steps: int) -> dict[str, Any]:
    """Run `step` this often.

    Returns:
        "step_s": first quartile, median and third of a step on the device; "host_s": median time
        until a step is queued on a device that has nothing to do; "steps".
    """
    clock.synchronize()
    stamps = [clock.stamp()]
    for _ in range(steps):
        step()
        stamps.append(clock.stamp())
    clock.synchronize()
    times = quartiles([clock.seconds(a, b) for a, b in pairwise(stamps)])
    host = []
    for _ in range(min(steps, ALONE)):
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        clock.synchronize()
    return {"step_s": times, "host_s": statistics.median(host), "steps": steps}


def host_parts(trainer: Trainer, clock: CpuClock) -> dict[str, float]:
    """Median seconds until each part of a step is queued, on a device that has nothing to do."""
    found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for _ in range(ALONE):
        trainer.optimizer.zero_grad()
        clock.synchronize()
        stamps = [time.perf_counter()]
        loss = trainer.loss()
        stamps.append(time.perf_counter())
        loss.backward()
        stamps.append(time.perf_counter())
        trainer.optimizer.step()
        stamps.append(time.perf_counter())
        for part, (begin, end) in zip(found.values(), pairwise(stamps), strict=True):
            part.append(end - begin)
    clock.synchronize()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure(
    name: str, mode: str, device: torch.device, steps: int = STEPS, tiny: bool = False,
    extras: bool = True, graphs: bool = True,
) -> Iterator[dict]:  # fmt: skip
    """Time `steps` training steps after `WARM_UP` others, in this process; look at them closely.

    Yields, to be joined in one dictionary:
        at once "first_step_s", in which kernels are compiled and searched for, and fastclip's "looks" at
        the model before it: (passes, seconds);
        what `timed` returns, "host_syncs": waits of the CPU for the GPU in a step, "peak_mib":
        memory above the built model, "loss"; for fastclip also what `check` found, "kernels",
        "plan" and "configurations"; "host_parts_s": what `host_parts` returns.
        With extras: "profile" (gpu_profile), then, with graphs, for `GRAPHS` "graph": the same step
        captured, with its times, "peak_mib" and "profile", or an "error" that says why not.
    """
    clock = clock_for(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(name, mode, device, tiny)
        memory = CudaPeak(device) if device.type == "cuda" else PeakMemory()
        title = f"{name}, tiny" if tiny else TASKS[name].title.format(b=trainer.batch)
        row: dict = {"title": title, "batch": trainer.batch}
        begin = time.perf_counter()
        trainer.step()  # whatever is compiled and tuned, is at the batch that is timed
        clock.synchronize()
        row["first_step_s"] = time.perf_counter() - begin
        yield {**row, "looks": looks_of(trainer.model)}
        if mode == "fastclip":
            row |= check(trainer)
        for _ in range(WARM_UP):
            trainer.step()
        clock.synchronize()
        if isinstance(memory, CudaPeak):
            memory.restart()
        row |= timed(trainer.step, clock, steps)
        peak = memory.above_start()
        row["loss"] = float(trainer.step().item())
        row["host_syncs"] = host_syncs(trainer) if device.type == "cuda" else None
        row["host_parts_s"] = host_parts(trainer, clock)
    row |= {"peak_mib": peak / 2**20, "built_mib": memory.start / 2**20}
    row["memory_method"] = memory.method
    row["warnings"] = sorted({str(w.message) for w in caught if "kernel of" in str(w.message)})
    if mode == "fastclip":
        row["kernels"] = kernels_in_use(device)
        row["plan"] = plan_of(trainer.optimizer)
        row["configurations"] = chosen_configurations()
    yield row
    if not extras:
        return
    yield {"profile": _looked_at(trainer.step, row, device)}
    if graphs and mode in GRAPHS:
        yield {"graph": as_graph(trainer, memory, clock, steps)}


def as_graph(
    trainer: Trainer, memory: CudaPeak | PeakMemory, clock: CpuClock, steps: int
) -> dict[str, Any]:
    """The same steps replayed as one CUDA graph, or {"error", "detail"}: why they cannot be.

    Nothing must be measured in this process afterwards: a capture that fails may leave CUDA's state
    behind it.
    """
    try:
        if isinstance(memory, CudaPeak):
            trainer.optimizer.zero_grad()
            torch.cuda.empty_cache()
            memory.restart()
        captured = CapturedStep(trainer)
        for _ in range(WARM_UP):
            captured.step()
        row = timed(captured.step, clock, steps)
        row["loss"] = float(captured.loss.item())
        row["peak_mib"] = memory.above_start() / 2**20
        row["profile"] = _looked_at(captured.step, row, trainer.device)
        return row
    except NotCaptured as error:
        return {"error": f"not captured: {error}", "detail": frames(error.__cause__ or error)}
    except Exception as error:
        return {"error": first_line(error), "detail": frames(error)}


def _looked_at(step: Callable[[], Any], row: Mapping, device: torch.device) -> dict[str, Any]:
    """The profile of a step, with the share of the time it takes unobserved that the GPU is busy."""
    try:
        found = profiled(step, device)
    except Exception as error:
        return {"error": first_line(error), "detail": frames(error)}
    found["busy_share"] = found["busy_s"] / row["step_s"][1]
    return found


def compile_ahead(name: str, device: torch.device, tiny: bool, share: tuple[int, int]) -> dict:
    """Compile what fastclip's step launches, a share of each search, so that it is on disk.

    One step of `AHEAD` samples, in which nothing is timed.
    """
    begin = time.perf_counter()
    tuning.compile_only(share)
    if device.type == "cuda":  # several such processes share the card
        torch.cuda.set_per_process_memory_fraction(AHEAD_MEMORY, device.index or 0)
    trainer = Trainer(name, "fastclip", device, tiny, most=AHEAD)
    trainer.step()
    clock_for(device).synchronize()
    return {"seconds": time.perf_counter() - begin}


@contextmanager
def telling() -> Iterator[None]:
    """Meanwhile tell every few seconds how far it is: a first step may outlast its time."""
    done, begin = threading.Event(), time.perf_counter()

    def tell_now() -> None:
        while not done.wait(TOLD_EVERY):
            tell({"progress": {"seconds": time.perf_counter() - begin, **tuning.SEARCHED}})

    thread = threading.Thread(target=tell_now, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def child() -> None:
    """What bench.gpu asks for on standard input; told part by part, {"finished"} at the end."""
    order = job()  # everything is imported by now; the parent says when the GPU is free
    device, tiny = torch.device(order["device"]), order["tiny"]
    try:
        if share := order.get("share"):
            tell(compile_ahead(order["task"], device, tiny, (share[0], share[1])))
        else:
            tuning.anew()
            pair = (order["task"], order["mode"])
            rest = (order["steps"], tiny, order["extras"], order.get("graphs", True))
            with telling():
                for part in measure(*pair, device, *rest):
                    tell(part)
    except Exception as error:
        tell({"error": first_line(error), "detail": frames(error)})
    tell({"finished": True})


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
    if options.child:
        child()
        return
    tuning.anew()
    for task in options.tasks:
        for mode in options.modes:
            print(task, mode, flush=True)
            try:
                device = torch.device(options.device)
                for part in measure(task, mode, device, options.steps, options.tiny):
                    tell(part)
            except Exception as error:
                tell({"error": first_line(error), "detail": frames(error)})


if __name__ == "__main__":
    main()
