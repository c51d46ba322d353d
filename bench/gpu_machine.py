"""Prepares a machine for bench.gpu_card: wheels, facts, fastclip._C, compiled kernels.

Building and compiling keep the processors busy, so nothing is timed meanwhile. A failure is reported and
stops nothing. Without fastclip._C, Triton and PyTorch are used. A kernel that was not compiled ahead is
compiled by the process that needs it. Run as a program, it reports the facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.children import Child, job, tell
from bench.deadline import Deadline
from bench.measure import first_line

INSTALL_SECONDS, FACTS_SECONDS = 60, 90.0
COMPILERS = {"bert_t128": 2, "vit_b": 2, "gpt2": 1, "resnet50": 4, "bert_t512": 2}
"""Processes that compile a task's kernels ahead, each a share of every search: most for a ResNet-50, of
which the most is compiled (`python -m bench.host --first`)."""


@contextmanager
def wheels(folder: Path | None) -> Iterator[str | None]:
    """The packages of a folder of wheels, for this process and those that it starts.

    They are unpacked into a temporary folder; nothing is fetched, and nothing installed is replaced
    or removed.

    Yields:
        why they cannot be used, or None.
    """
    if folder is None:
        yield None
        return
    found = sorted(map(str, folder.glob("*.whl")))
    if not found:
        yield f"--wheels: {folder.name} holds no *.whl"
        return
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
                   "--no-compile", "--target", site, *found]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
            )
            said = done.stderr.strip().splitlines() if done.returncode else None
        except subprocess.TimeoutExpired:
            said = [f"pip did not end within {INSTALL_SECONDS} s"]
        if said is not None:
            yield f"--wheels: {(said or ['pip failed'])[-1]}"
            return
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, before)))
        sys.path.insert(0, site)
        importlib.invalidate_caches()
        try:
            yield None
        finally:
            sys.path.remove(site)
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


def problems(device: str) -> list[str]:
    """What stands in the way, and what to do about it."""
    import torch

    found = []
    if device == "cuda" and not torch.cuda.is_available():
        found.append("torch sees no NVIDIA GPU: nothing can be measured here")
    needed = {
        "opacus": "fastclip builds on it, so neither its kernels nor its steps run: "
        "python -m pip install --no-deps 'opacus>=1.5.4', or --wheels with a wheel of it",
        "transformers": "the models of the steps need it",
    }
    for name, why in needed.items():
        if importlib.util.find_spec(name) is None:
            found.append(f"{name} is not installed: {why}")
    if not found:
        try:
            importlib.import_module("fastclip.ops")
            if device == "cuda":
                importlib.import_module("fastclip.ops.triton")
        except Exception as error:
            found.append(f"fastclip cannot be imported: {first_line(error)}")
    return found


def environment(device: str) -> dict[str, Any]:
    """The card, its driver, compilers and libraries."""
    import torch

    found: dict[str, Any] = {"card": "none: a rehearsal on the CPU", "versions": _versions()}
    found["python"] = sys.version.split()[0]
    found["nvcc"] = _first_match(["nvcc", "--version"], r"release ([\d.]+)")
    if device != "cuda":
        return found
    card = torch.cuda.get_device_properties(0)
    found |= {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "l2_mib": round(getattr(card, "L2_cache_size", 0) / 2**20),
        "driver": _first_match(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"([\d.]+)"
        ),
        "cuda": torch.version.cuda,
        "allow_tf32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
    }
    return found


def facts(device: str, module: str = "bench.gpu_machine") -> dict[str, Any]:
    """ "problems" and, if there are none, the result of `environment`, from another process."""
    with Child(["-m", module]) as child:
        child.send({"device": device})
        try:
            found = child.message(FACTS_SECONDS)
        except TimeoutError:
            return {"problems": [f"torch does not describe the GPU within {FACTS_SECONDS:.0f} s"]}
        if found is None:
            died = child.death()
            return {"problems": [f"the machine cannot be asked: {died['error']} {died['detail']}"]}
        return found


def _versions() -> dict[str, str]:
    found = {}
    for name in (
        "torch", "triton", "opacus", "transformers", "timm", "cryptography", "pytest", "fastclip",
    ):  # fmt: skip
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    fastclip = sys.modules.get("fastclip")
    if fastclip is not None:  # of this checkout, installed or not
        found["fastclip"] = fastclip.__version__
    return found


def _first_match(command: list[str], pattern: str) -> str:
    """The first group that `pattern` finds in what a command prints, or why there is none."""
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    match = re.search(pattern, done.stdout)
    return match.group(1) if match else "unknown"


BUILD_SECONDS, COMPILE_SECONDS = 150.0, 90.0
TELL = (  # asks for what it was built for without importing fastclip, which needs opacus
    "import importlib.util as i; from importlib.machinery import PathFinder as p;"
    "s = p.find_spec('_C', ['fastclip']);"
    "assert s, 'setup.py left no fastclip/_C for this Python';"
    "m = i.module_from_spec(s); s.loader.exec_module(m);"
    "from bench.children import tell; tell({'versions': m.versions()})"
)


def prepare(
    deadline: Deadline, order: Mapping, shares: Mapping[str, int], result: dict,
    save: Callable[[], None], module: str = "bench.gpu_steps",
) -> None:  # fmt: skip
    """Build fastclip._C, and compile what the steps of these tasks launch, at the same time.

    Nothing is compiled if this machine has a build that was not there at first.

    Args:
        order: "device" and "tiny", for the children. shares: processes a task.
        result: gets "build" and "ahead", saved as they come.
    """
    compiling = deadline.within(COMPILE_SECONDS)
    if result.get("ahead") and _is_built(deadline):
        return
    with ExitStack() as stack:
        children = []
        for task, share in split(shares, order):
            child = stack.enter_context(Child(["-m", module]))
            child.send({**order, "task": task, "share": share})
            children.append((task, share, child))
        result["build"] = build(deadline.within(BUILD_SECONDS))
        result["ahead"] = []
        save()
        for task, share, child in children:
            row = {"task": task, "share": share}
            try:
                message = child.message(compiling.left())
                row |= child.death() if message is None else message
            except TimeoutError:
                row["error"] = f"stopped after {COMPILE_SECONDS:.0f} s; the rest compiles later"
            result["ahead"].append(row)
            save()


def split(shares: Mapping[str, int], order: Mapping) -> list[tuple[str, list[int]]]:
    """(task, [k, n]) of the processes: one per core, or one per task without a GPU."""
    if order["device"] != "cuda":
        return [(task, [0, 1]) for task in shares][: max((os.cpu_count() or 1) - 1, 1)]
    wanted = [(task, [k, n]) for task, n in shares.items() for k in range(n)]
    room = max((os.cpu_count() or 1) - 2, 1)  # the compiler of fastclip._C needs some
    if len(wanted) > room:  # fewer and longer
        wanted = [(task, [0, 1]) for task in shares][:room]
    return wanted


def _is_built(deadline: Deadline) -> dict | None:
    """What fastclip._C was built for, if it fits this Python and these sources."""
    from fastclip.core.build_recipe import is_current

    there, _ = _told(deadline)
    return there if there is not None and is_current("cuda", there.get("sources", "")) else None


def build(deadline: Deadline) -> dict:
    """fastclip._C in place, by setup.py and this Python, and what it was built for.

    Returns:
        "built", "seconds"; "versions", or "why" it is not there and what the build "said" last.
        0 seconds where it had been built of these sources.
    """
    begin = deadline.clock()
    python = sys.version.split()[0]
    if (there := _is_built(deadline)) is not None:
        return {"built": True, "seconds": 0.0, "versions": there, "python": python}
    options = {"FASTCLIP_BUILD": "strict", "NVCC_APPEND_FLAGS": "--threads 2"}  # two architectures
    with Child(["setup.py", "build_ext", "--inplace"], options) as child:
        in_time = child.wait(deadline.left())
        end = child.death() if in_time else {}
        said = list(child.said)
    found = {"built": False, "seconds": deadline.clock() - begin, "said": said}
    if not in_time:
        return {**found, "why": f"setup.py build_ext did not end within {found['seconds']:.0f} s"}
    versions, why = _told(deadline)
    if versions is None:
        # without a compiler setup.py says so on standard error and ends well
        return {**found, "why": end["detail"] or why}
    return {"built": True, "seconds": found["seconds"], "versions": versions, "python": python}


def _told(deadline: Deadline) -> tuple[dict | None, str]:
    """What fastclip._C says it was built for, or None and why it says nothing."""
    with Child(["-c", TELL]) as child:
        try:
            facts = child.message(max(deadline.left(), 20.0))
        except TimeoutError as error:
            return None, f"it does not answer when it is imported: {error}"
        if facts is not None:
            return facts["versions"], ""
        death = child.death()
        return None, death["detail"] or death["error"]


def main() -> None:
    """What `facts` asks for on standard input."""
    device = job()["device"]
    found = problems(device)
    tell({"problems": found, **({} if found else environment(device))})


if __name__ == "__main__":
    main()
