"""The cases of bench/kernels/bench_*.py: found, ordered, and which of them a CPU runs quickly."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import torch

from bench.kernels.case import Case
from bench.kernels.shapes import GOALS
from bench.measure import first_line

SMALL = 16e6  # bytes, and 100 times as many operations: what a CPU does in a moment


def modules() -> list[str]:
    """The benchmark modules beside this one."""
    package = importlib.import_module("bench.kernels")
    found = pkgutil.iter_modules(package.__path__, "bench.kernels.")
    return sorted(m.name for m in found if m.name.rpartition(".")[2].startswith("bench_"))


def discover(names: Iterable[str] | None = None) -> tuple[list[tuple[str, Case]], list[dict]]:
    """(identifier, case) of every module, and a row with the error of each that fails."""
    cases, failures = [], []
    for name in modules() if names is None else names:
        short = name.rpartition(".")[2].removeprefix("bench_")
        try:
            found = importlib.import_module(name).cases()
        except Exception as error:
            failures.append({"id": short, "operation": short, "error": first_line(error)})
            continue
        cases += [(f"{short}.{i}", case) for i, case in enumerate(found)]
    return cases, failures


def by_importance(cases: Iterable[tuple[str, Case]]) -> list[tuple[str, Case]]:
    """One case of every operation and model, then a second of each, and so on.

    First models that have a goal, whatever the layout. Within an operation and model bfloat16 goes
    first, and large shapes before small ones.
    """
    queues: dict[tuple[str, str], list[tuple[str, Case]]] = {}
    for identifier, case in cases:
        queues.setdefault((case.operation, case.model), []).append((identifier, case))
    for queue in queues.values():
        queue.sort(key=lambda c: (c[1].dtype != torch.bfloat16, -c[1].flops, -c[1].nbytes))
    with_goal = {key: queue for key, queue in queues.items() if key[1].startswith(GOALS)}
    others = {key: queue for key, queue in queues.items() if key not in with_goal}
    return [*_in_turns(with_goal.values()), *_in_turns(others.values())]


def _in_turns(queues: Iterable[list[tuple[str, Case]]]) -> list[tuple[str, Case]]:
    kept = list(queues)
    longest = max(map(len, kept), default=0)
    return [queue[i] for i in range(longest) for queue in kept if i < len(queue)]


def is_small(case: Case) -> bool:
    """Whether a CPU runs the case in a moment."""
    return case.nbytes <= SMALL and case.flops <= 100 * SMALL
