"""Checks and times the cases of bench/kernels/bench_*.py; one row a case, whatever happens.

`measure` runs one case here. As a program (`python -m bench.kernels.harness`, a job as one JSON line
on standard input) it runs many and reports each as it is done: bench.gpu_card starts it, and starts it
again where a case has taken the process or the GPU's context down.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bench.children import job, tell
from bench.gpu_profile import chosen_configurations, tuned_kernels
from bench.kernels import tuning
from bench.kernels.case import Case
from bench.kernels.catalog import by_importance, discover, is_small
from bench.kernels.check import (
    WrongResult,
    copied,
    equal,
    expected,
    poison,
    relative_error,
    served_by,
)
from bench.kernels.clock import CpuClock, ceilings, clock_for, time_functions
from bench.measure import first_line
from fastclip.ops import dispatch

OURS, REFERENCE = "fastclip", "fastclip's reference"


def describe(identifier: str, case: Case) -> dict:
    """What the row says about the case itself."""
    return {
        "id": identifier, "name": case.name, "operation": case.operation, "model": case.model,
        "shape": dict(case.shape), "dtype": str(case.dtype).removeprefix("torch."),
        "flops": case.flops, "nbytes": case.nbytes, "tolerance": case.tolerance,
    }  # fmt: skip


def measure(
    case: Case, device: torch.device, ceiling: Mapping[str, Any] | None = None,
    budget: float = 1.0, clock: CpuClock | None = None,
) -> dict:  # fmt: skip
    """Check one case against the reference, then time it beside what it is compared with.

    Args:
        case: the case. device: where it runs. ceiling: from `ceilings`, for the fractions.
        budget: seconds of timing, all functions together. clock: by default the device's.

    Returns:
        "error" where it failed or is wrong, else what `describe`'s readers want: backend, error
        against the reference, seconds, rates, fraction of the ceiling, ratios to the others.
    """
    clock = clock or clock_for(device)
    begin = time.perf_counter()
    row: dict = {}
    try:
        arguments = made(case, device)
        row |= checked(case, arguments, device)
        row |= timed(case, arguments, clock, row.pop("reference_result"), budget)
        if "seconds" in row:
            row |= rates(case, row["seconds"][1], ceiling)
    except Exception as error:
        row.pop("reference_result", None)
        row["error"] = first_line(error)
    row["took_s"] = time.perf_counter() - begin
    return row


def made(case: Case, device: torch.device) -> dict[str, Any]:
    """The case's arguments, drawn on the device where its `make` can."""
    try:
        return dict(case.make(device, torch.Generator(device).manual_seed(0)))
    except RuntimeError as error:
        if device.type == "cpu" or isinstance(error, torch.OutOfMemoryError):
            raise
        return dict(case.make(device, torch.Generator().manual_seed(0)))  # drawn on the CPU


def checked(case: Case, arguments: Mapping[str, Any], device: torch.device) -> dict:
    """Run the case twice; backend, error, whether it repeats itself bit by bit.

    Raises:
        WrongResult: the error is above the case's tolerance.
    """
    reference, reference_type = expected(case.run, arguments)

    def run() -> Any:
        return case.run(**copied(arguments))

    first, backend, why = served_by(case.operation, device, run)
    kept = copied({"result": first})["result"]
    poison(first)
    del first
    second, backend, why = served_by(case.operation, device, run)
    error = relative_error(second, reference)
    if not error <= case.tolerance:  # NaN is wrong, too
        raise WrongResult(
            f"relative error {error:.3g} above {case.tolerance:.3g}, computed by {backend}"
        )
    return {
        "backend": backend, "backend_why": why, "relative_error": error,
        "reference": reference_type, "repeatable": equal(kept, second),
        "reference_result": reference,
    }  # fmt: skip


def timed(
    case: Case, arguments: dict[str, Any], clock: CpuClock, reference: Any, budget: float
) -> dict:
    """Seconds of the case and of the others, in turns; the ratios other / ours."""
    others: dict[str, dict] = {}
    functions: dict[str, Callable[[], Any]] = {OURS: lambda: case.run(**arguments)}
    for name, other in case.others.items():
        others[name] = {}
        try:
            others[name]["relative_error"] = relative_error(other(**copied(arguments)), reference)
        except WrongResult:
            others[name]["relative_error"] = None  # it returns something else
        except Exception as error:
            others[name]["error"] = first_line(error)
            clock.release_memory()
            continue
        functions[name] = lambda other=other: other(**arguments)
    if case.operation in dispatch.OPERATIONS and clock.device.type == "cuda":

        def by_reference() -> Any:
            with dispatch.use_backend("reference"):
                return case.run(**arguments)

        others[REFERENCE] = {}
        functions[REFERENCE] = by_reference
    clock.release_memory()
    found = time_functions(clock, functions, budget)
    ours = found.pop(OURS)
    for name, row in found.items():
        others[name] |= row
        if "seconds" in row and "seconds" in ours:
            others[name]["ratio"] = row["seconds"][1] / ours["seconds"][1]
    return {**ours, "others": others}


def rates(case: Case, seconds: float, ceiling: Mapping[str, Any] | None) -> dict:
    """Achieved rates; the fraction is the time that the ceilings allow over the time taken."""
    row: dict = {"tflops": case.flops / seconds / 1e12, "gbps": case.nbytes / seconds / 1e9}
    if ceiling is None:
        return row
    rate = ceiling["matmul_tflops"].get(str(case.dtype).removeprefix("torch."))
    bandwidth = ceiling["copy_gbps"]
    if not isinstance(rate, float) or not isinstance(bandwidth, float):
        return row
    arithmetic, memory = case.flops / rate / 1e12, case.nbytes / bandwidth / 1e9
    row["bound"] = "arithmetic" if arithmetic > memory else "memory"
    row["fraction"] = max(arithmetic, memory) / seconds
    return row


def compile_ahead(cases: Iterable[tuple[str, Case]], device: torch.device) -> None:
    """Run each case once, so that its kernels' compiled code is on disk."""
    tuning.compile_only()
    if device.type == "cuda":  # several such processes and the tests share the card
        torch.cuda.set_per_process_memory_fraction(0.1, device.index or 0)
    for _, case in cases:
        try:
            case.run(**made(case, device))
        except Exception:
            continue  # the run that measures tells
        clock_for(device).release_memory()


def main() -> None:
    """The child of bench.gpu_card.

    The job: "device", "seconds"; "modules", "match", "small" (which cases), "skip" (identifiers),
    "last" (names of cases that come after all others), "case_seconds", "ceiling" (measured if absent),
    "share": [k, n] to compile the k-th of n parts ahead. Messages: {"plan"}, {"ceiling"}, {"start"}
    before and {"row"} after each case.
    """
    order = job()
    begin = time.monotonic()
    device = torch.device(order["device"])
    cases, failures = discover(order.get("modules"))
    match, skip = order.get("match") or "", set(order.get("skip") or ())
    cases = [c for c in by_importance(cases) if match in c[1].name]
    last = set(order.get("last") or ())
    cases.sort(key=lambda c: c[1].name in last)
    if order.get("small"):
        cases = [c for c in cases if is_small(c[1])]
    if share := order.get("share"):
        compile_ahead(cases[share[0] :: share[1]], device)
        return
    tuning.anew()
    tell({"plan": [identifier for identifier, _ in cases]})
    for row in failures:
        if row["id"] not in skip:
            tell({"row": row})
    clock = clock_for(device)
    ceiling = order.get("ceiling")
    if ceiling is None:
        ceiling = ceilings(clock)
        tell({"ceiling": ceiling})
    for identifier, case in cases:
        if identifier in skip:
            continue
        if time.monotonic() - begin > order["seconds"]:
            break
        tell({"start": identifier, **describe(identifier, case)})
        tuning.forget(kernel for _, kernel in tuned_kernels())  # each at its own batch
        row = measure(case, device, ceiling, order.get("case_seconds", 1.0), clock)
        row["configurations"] = chosen_configurations()
        tell({"row": {**describe(identifier, case), **row}})
        gc.collect()
        if "error" in row:
            clock.synchronize()  # raises where the context is lost: the parent starts afresh
        clock.release_memory()


if __name__ == "__main__":
    main()
