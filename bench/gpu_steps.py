"""Times whole training steps on a GPU, one model in one mode per process, for bench.gpu_card.

The process reports its results part by part. Every mode trains the same model on the same random data
with SGD(momentum 0.9). The private modes are those of bench.workloads. Kernels are tuned by a step of
the batch that is timed.
"""

from __future__ import annotations

import gc
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
from bench.gpu_profile import chosen_configurations, plan_of, profiled
from bench.gpu_tasks import TASKS, Trainer
from bench.gpu_ways import Turn, step_of
from bench.kernels import tuning
from bench.kernels.check import WrongResult
from bench.kernels.clock import CpuClock, clock_for
from bench.measure import PeakMemory, first_line, quartiles
from bench.processes import frames

WARM_UP, STEPS = 3, 10
ALONE = 5  # steps of which the host's time is taken
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
    """Operation -> backend that was used, or why only the reference was."""
    from fastclip.ops import dispatch

    found = {name: dispatch.backend_of(name, device) for name in sorted(dispatch.OPERATIONS)}
    return {
        name: backend if why in ("launched", "available") else f"{backend}: {why}"
        for name, (backend, why) in found.items()
    }


def looks_of(model: Any) -> list[tuple[int, float]]:
    """fastclip's dry runs of a private model: passes and seconds of each."""
    grad_state = getattr(model, "grad_state", None)
    return (
        []
        if grad_state is None
        else [(look.passes, look.seconds) for look in grad_state.calls.looks]
    )


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


def measure(
    trainer: Trainer, mode: str, way: str, memory: CudaPeak | PeakMemory, turn: Turn,
    steps: int = STEPS, inductor: bool = True,
) -> Iterator[dict]:  # fmt: skip
    """Time `steps` training steps in one way after `WARM_UP` others; profile them.

    Yields, to be joined in one dictionary:
        at once "first_step_s", in which kernels are compiled and searched for and the step is recorded
        (without waits for the device), and fastclip's "looks" at the model before it: (passes, seconds);
        what `timed` returns, "peak_mib": memory above the built model, "loss"; of a step as it is also
        "host_syncs": waits of the CPU for the GPU, and for fastclip what `check` found, "kernels",
        "plan" and "configurations"; then "profile" (gpu_profile).
    """
    device, clock = trainer.device, clock_for(trainer.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "graph" and isinstance(memory, CudaPeak):
            memory.restart()  # a replay allocates nothing: what counts is its capture
        begin, waited = time.perf_counter(), turn.waited
        step = step_of(trainer, mode, way, turn, inductor)
        clock.synchronize()
        seconds = time.perf_counter() - begin - (turn.waited - waited)
        first: dict[str, Any] = {"first_step_s": seconds}
        if way == "eager":
            first["looks"] = looks_of(trainer.model)
        yield first
        row: dict[str, Any] = {}
        if (mode, way) == ("fastclip", "eager"):
            row |= check(trainer)
        for _ in range(WARM_UP):
            step()
        clock.synchronize()
        if way != "graph" and isinstance(memory, CudaPeak):
            memory.restart()
        row |= timed(step, clock, steps)
        row["peak_mib"] = memory.above_start() / 2**20
        row["memory_method"] = memory.method
        row["loss"] = float(step().item())
        if way == "eager" and device.type == "cuda":
            row["host_syncs"] = host_syncs(trainer)
    row["warnings"] = sorted({str(w.message) for w in caught if "kernel of" in str(w.message)})
    if (mode, way) == ("fastclip", "eager"):
        row["kernels"] = kernels_in_use(device)
        row["plan"] = plan_of(trainer.optimizer)
        row["configurations"] = chosen_configurations()
    yield row
    yield {"profile": _looked_at(step, row, device)}


def measure_ways(order: Mapping[str, Any]) -> Iterator[dict]:
    """The ways of one model in one mode, one after another, in this process.

    On a GPU a way that fails is the last one: what breaks there may leave CUDA's state behind it.

    Yields:
        {"begin": way} before each, parts of what `measure` tells, {"end": way} after it.
    """
    device, turn = torch.device(order["device"]), Turn(order.get("turn"))
    turn.take()
    task, mode, tiny = order["task"], order["mode"], order["tiny"]
    trainer: Trainer | None = None
    for way in order["ways"]:
        yield {"begin": way}
        try:
            if trainer is None:
                trainer = Trainer(task, mode, device, tiny)
                title = f"{task}, tiny" if tiny else TASKS[task].title.format(b=trainer.batch)
                memory = CudaPeak(device) if device.type == "cuda" else PeakMemory()
            yield {"title": title, "batch": trainer.batch}
            yield from measure(
                trainer, mode, way, memory, turn, order["steps"], order.get("inductor", True)
            )
        except Exception as error:
            yield {"error": first_line(error), "detail": frames(error.__cause__ or error)}
            if device.type == "cuda":
                yield {"end": way}
                return
        yield {"end": way}
        if trainer is not None:
            trainer.optimizer.zero_grad()
        gc.collect()  # the memory of a step that was recorded
        if device.type == "cuda":
            torch.cuda.empty_cache()


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
    """Reports progress every few seconds, because a first step may exceed its time limit."""
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


def main() -> None:
    """Runs what bench.gpu_card asks for on standard input, and reports it part by part."""
    order = job()  # everything is imported by now
    try:
        if share := order.get("share"):
            device = torch.device(order["device"])
            tell(compile_ahead(order["task"], device, order["tiny"], (share[0], share[1])))
        else:
            tuning.anew()
            with telling():
                for part in measure_ways(order):
                    tell(part)
    except Exception as error:
        tell({"error": first_line(error), "detail": frames(error)})
    tell({"finished": True})


if __name__ == "__main__":
    main()
