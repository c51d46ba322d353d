"""Reports what this machine can run, which backend is used and why: `python -m fastclip.doctor`.

Given a script, it traces the first private step without taking it, and says whether samples are
independent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fastclip.backward import bare
from fastclip.core.building import state_of
from fastclip.errors import FastclipError
from fastclip.ops.dispatch import LOOPS, OPERATIONS, backend_of
from fastclip.ops.planner import cache_file, costs_of, device_name, measure, save
from fastclip.samples import runs
from fastclip.trace.findings import TraceLog

_VARIABLES = (
    "FASTCLIP_BACKEND", "FASTCLIP_NODES", "FASTCLIP_BUILD", "FASTCLIP_CACHE", "TRITON_INTERPRET",
)  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvcc() -> str | None:
    """Version of the CUDA compiler, if there is one."""
    path = shutil.which("nvcc")
    if path is None:
        return None
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "found, but it does not answer"
    release = [line for line in text.splitlines() if "release" in line]
    return release[0].split("release", 1)[1].split(",")[0].strip() if release else "found"


def _core() -> dict[str, Any]:
    """What the CUDA C++ extension is built for and finds on this machine, or why it is missing."""
    try:
        import fastclip.ops.cuda  # noqa: F401  (its error says why not)
        from fastclip import _C
    except ImportError as error:
        return {"built": False, "why": str(error)}
    found = {"built": True, **_C.versions()}
    try:
        return {**found, "devices": _C.device_count()}
    except _C.CudaError as error:
        return {**found, "devices": 0, "why": str(error)}


def _core_line(core: dict[str, Any]) -> str:
    """The same in one line."""
    if not core["built"]:
        return f"CUDA C++ core: {core['why']}"

    def release(version: int) -> str:
        return f"{version // 1000}.{version % 1000 // 10}"

    driver = f"driver for CUDA {release(core['driver'])}" if core["driver"] else "no NVIDIA driver"
    line = f"CUDA C++ core: CUDA {release(core['cudart'])}, {', '.join(core['architectures'])}; "
    line += f"{driver}, {core['devices']} devices"
    return f"{line} ({core['why']})" if "why" in core else line


def _loops() -> dict[str, Any]:
    """The compiler and vector width of the C++ loops for the CPU, or why they are missing."""
    try:
        import fastclip.ops.host  # noqa: F401  (its error says why not)
        from fastclip import _host
    except ImportError as error:
        return {"built": False, "why": str(error)}
    return {"built": True, **_host.versions(), "lanes": _host.product_lanes()}


def _loops_line(loops: dict[str, Any]) -> str:
    """The same in one line."""
    if not loops["built"]:
        return f"C++ loops for the CPU: {loops['why']}"
    vectors = f"{max(loops['lanes'])} numbers in a vector" if loops["lanes"] else (
        "no vectors from this processor or compiler (AVX2 and GCC have them). PyTorch computes norms "
        "and noise"
    )  # fmt: skip
    return f"C++ loops for the CPU: {loops['compiler']}, {vectors}"


def _paths() -> dict[str, Any]:
    """Whether calls are followed through the operators of torch, or why not."""
    return {"followed": runs.FOLLOWS, **_origin("_path", runs.WHY_NOT)}


def _nodes() -> dict[str, Any]:
    """Whether layers run as single autograd nodes in C++ or Python, and why not in C++."""
    found = {"serve": bare.SERVES, "compiled": not bare.WHY_NOT}
    return {**found, **_origin("_step", bare.WHY_NOT)}


def _origin(name: str, why_not: str) -> dict[str, str]:
    """Where a module that is built for one version of torch comes from, or why it is missing."""
    state = state_of(name)
    if not why_not:
        return {"state": state.kind, "from": state.text}
    if state.kind == "package":  # it was not searched for
        return {"state": "off", "why": why_not}
    return {"state": state.kind, "why": state.text}


def _nodes_line(found: dict[str, Any]) -> str:
    """The same in one line."""
    if found["compiled"]:
        return f"layers: one C++ node per layer, from the third step on ({found['from']})"
    kind = "one Python node per layer" if found["serve"] else "no single nodes"
    return f"layers: {kind}, not in C++: {found['why']}"


def _paths_line(found: dict[str, Any]) -> str:
    """The same in one line."""
    if found["followed"]:
        return f"models that change what they compute: detected in every step ({found['from']})"
    return f"models that change what they compute: not detected in every step: {found['why']}"


def _between_processes() -> list[str]:
    """Backends of torch.distributed in this build with which ranks can train."""
    if not distributed.is_available():
        return []
    return [name for name in ("gloo", "nccl") if distributed.is_backend_available(name)]


def _devices() -> list[torch.device]:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [*gpus, torch.device("cpu")]


def examine() -> dict[str, Any]:
    """Collects everything that the doctor reports, as plain data.

    Returns:
        The versions of packages (None if missing), the backends for several processes, the
        environment, and the devices. Each device has the origin of its planner rates, and for each
        operation the backend and the reason.
    """
    devices = []
    for device in _devices():
        found: dict[str, Any] = {
            "device": str(device),
            "name": device_name(device),
            "rates": "measured" if cache_file(device_name(device)).exists() else "built in",
            "operations": {},
        }
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            found["capability"] = f"{major}.{minor}"
            found["memory_gib"] = round(
                torch.cuda.get_device_properties(device).total_memory / 2**30, 1
            )
        for name in sorted(OPERATIONS if device.type == "cuda" else OPERATIONS | LOOPS):
            backend, why = backend_of(name, device)
            found["operations"][name] = {"backend": backend, "why": why}
        devices.append(found)
    packages = ("torch", "opacus", "triton", "transformers", "cryptography")
    return {
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in packages},
        "cuda_of_torch": torch.version.cuda,
        "nvcc": _nvcc(),
        "core": _core(),
        "loops": _loops(),
        "paths": _paths(),
        "nodes": _nodes(),
        "between_processes": _between_processes(),
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
        "devices": devices,
    }


def report(found: dict[str, Any]) -> str:
    """Formats the result of `examine` as text."""
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in found["versions"].items())
    lines = [f"python {found['python']}, {versions}"]
    lines.append(
        f"torch built for CUDA: {found['cuda_of_torch'] or 'no'}; nvcc: {found['nvcc'] or 'missing'}"
    )
    lines.append(_core_line(found["core"]))
    lines += [_loops_line(found["loops"]), _paths_line(found["paths"])]
    lines.append(_nodes_line(found["nodes"]))
    lines.append(f"between processes: {', '.join(found['between_processes']) or 'no backend'}")
    lines += [f"{name}={value}" for name, value in found["environment"].items() if value]
    if not any(device["device"].startswith("cuda") for device in found["devices"]):
        lines.append(
            "no NVIDIA GPU that torch can use: PyTorch and the C++ loops (host) run on the CPU"
        )
    for device in found["devices"]:
        more = ""
        if "capability" in device:
            more = f", {device['memory_gib']} GiB, sm {device['capability']}"
        lines.append(
            f"\n{device['device']}: {device['name']}{more}; planner rates {device['rates']}"
        )
        for name, choice in device["operations"].items():
            lines.append(f"  {name:<26}{choice['backend']:<11}{choice['why']}")
    return "\n".join(lines)


PROVEN, REFUSED, NOT_REACHED = 0, 1, 2
"""Exit statuses of `check_script`."""


class _Judged(BaseException):
    """Raised after the first private step was traced; a script's `except Exception` cannot catch it."""


def check_script(script: str, arguments: Sequence[str] = ()) -> int:
    """Runs a script until its first private step is traced and judged, and prints the result.

    Nothing is released, and no private optimizer steps.

    Args:
        script: path of a Python file. arguments: of its command line.

    Returns:
        0 if the samples of the step are independent, 1 if fastclip raised an error, 2 if the script
        ended before its first private step.
    """
    from fastclip.backward.traced_step import JUDGED
    from fastclip.engine.optimizer import FastDPOptimizer

    judged: list[TraceLog] = []
    raised: Exception | None = None

    def record(log: TraceLog) -> None:
        judged.append(log)
        raise _Judged

    def no_step(optimizer: Any, closure: Any = None) -> bool:
        if judged:
            raise _Judged
        optimizer.discard_logical_batch()
        return False

    found, plain = list(sys.argv), FastDPOptimizer.pre_step
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    JUDGED.append(record)
    FastDPOptimizer.pre_step = no_step  # type: ignore[method-assign,assignment]
    try:
        with suppress(_Judged, SystemExit):
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        raised = error
    finally:
        JUDGED.remove(record)
        FastDPOptimizer.pre_step = plain  # type: ignore[method-assign]
        sys.argv[:] = found
        sys.path.pop(0)
    return _answer(judged, raised)


def _answer(judged: Sequence[TraceLog], raised: Exception | None) -> int:
    """Prints the verdict and returns the exit status."""
    error = judged[0].error if judged else raised
    if isinstance(error, FastclipError):
        print(f"{type(error).__name__}: {error}")
    if judged:
        print(judged[0].proof)
    if judged or isinstance(error, FastclipError):
        return PROVEN if error is None else REFUSED
    if raised is not None:
        traceback.print_exception(raised)
    print("the script has ended before its first private step was traced")
    return NOT_REACHED


def show_rates(measuring: bool) -> None:
    """Prints the planner's cost rates on this machine, and measures them first if `measuring`."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in (torch.device("cpu"), *gpus):
        name = device_name(device)
        if measuring:
            print(f"measuring {name} ...", flush=True)
            save(device, measure(device))
        known = "measured" if cache_file(name).exists() else "built in; measure them with --measure"
        print(f"{name} ({known})")
        for rate, value in asdict(costs_of(device.type, device.index)).items():
            print(f"  {rate:<12}{value if isinstance(value, bool) else f'{value:.3g}'}")


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, or checks whether the samples of a script are independent."""
    parser = argparse.ArgumentParser(prog="python -m fastclip.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--rates", action="store_true", help="print the planner's rates on this machine"
    )
    parser.add_argument("--measure", action="store_true", help="measure, save and print them")
    parser.add_argument(
        "script", nargs="?", help="script to run until its first private step is traced"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if options.script is not None:
        return check_script(options.script, options.arguments)
    if options.rates or options.measure:
        show_rates(options.measure)
        return 0
    found = examine()
    print(json.dumps(found, indent=1) if options.json else report(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
