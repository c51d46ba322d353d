"""What bench.gpu does before it times anything: fastclip._C for this Python, and kernels compiled.

Both keep the processors busy and no figure is taken meanwhile. What fails is told and stops nothing:
without fastclip._C Triton and PyTorch serve, and what was not compiled ahead is compiled by the
process that needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from bench.children import Child
from bench.deadline import Deadline

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

    Args:
        order: "device" and "tiny", for the children. shares: processes a task.
        result: gets "build" and "ahead", saved as they come.
    """
    compiling = deadline.within(COMPILE_SECONDS)
    with ExitStack() as stack:
        children = []
        for task, share in split(shares, order):
            child = stack.enter_context(Child(["-m", module, "--child"]))
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
    """(task, [k, n]): the processes, as many as there are cores; where there is no GPU, one each."""
    if order["device"] != "cuda":
        return [(task, [0, 1]) for task in shares][: max((os.cpu_count() or 1) - 1, 1)]
    wanted = [(task, [k, n]) for task, n in shares.items() for k in range(n)]
    room = max((os.cpu_count() or 1) - 2, 1)  # the compiler of fastclip._C needs some
    if len(wanted) > room:  # fewer and longer
        wanted = [(task, [0, 1]) for task in shares][:room]
    return wanted


def build(deadline: Deadline) -> dict:
    """fastclip._C in place, by setup.py and this Python, and what it was built for.

    Returns:
        "built", "seconds"; "versions", or "why" it is not there and what the build "said" last.
        0 seconds where it had been built of these sources.
    """
    from fastclip.sources import is_current

    begin = deadline.clock()
    python = sys.version.split()[0]
    there, _ = _told(deadline)
    if there is not None and is_current("cuda", there.get("sources", "")):
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
            told = child.message(max(deadline.left(), 20.0))
        except TimeoutError as error:
            return None, f"it does not answer when it is imported: {error}"
        if told is not None:
            return told["versions"], ""
        death = child.death()
        return None, death["detail"] or death["error"]
