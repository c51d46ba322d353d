"""pytest-benchmark over every case of bench/kernels/bench_*.py: checked, then timed.

    pytest bench/kernels --benchmark-only

On a GPU all cases run; elsewhere the smallest of each operation, which shows that they run and not
how fast kernels are. pytest-benchmark times whole calls with a wall clock; the time on the device,
rates and ratios are in `extra_info`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.kernels.case import Case
from bench.kernels.catalog import discover, is_small
from bench.kernels.clock import ceilings, clock_for
from bench.kernels.harness import made, measure

pytest.importorskip("pytest_benchmark")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES, FAILURES = discover()


def smoke(cases: list[tuple[str, Case]]) -> set[str]:
    """Identifiers of the smallest case of each operation, of those a CPU runs in a moment."""
    smallest: dict[str, tuple[str, Case]] = {}
    for identifier, case in cases:
        best = smallest.get(case.operation)
        if is_small(case) and (best is None or case.nbytes < best[1].nbytes):
            smallest[case.operation] = (identifier, case)
    return {identifier for identifier, _ in smallest.values()}


SMOKE = smoke(CASES)


@pytest.fixture(scope="session")
def ceiling() -> dict[str, Any] | None:
    """What the device reaches now."""
    return ceilings(clock_for(DEVICE)) if DEVICE.type == "cuda" else None


@pytest.mark.parametrize("failure", FAILURES, ids=[row["id"] for row in FAILURES])
def test_module(failure: dict) -> None:
    """A benchmark module that cannot be imported is a failure, not an absence."""
    pytest.fail(failure["error"])


@pytest.mark.parametrize(("identifier", "case"), CASES, ids=[case.name for _, case in CASES])
def test_case(identifier: str, case: Case, benchmark: Any, ceiling: dict | None) -> None:
    if DEVICE.type == "cpu" and identifier not in SMOKE:
        pytest.skip("no GPU: only the smallest case of each operation runs, as a smoke test")
    clock = clock_for(DEVICE)
    row = measure(case, DEVICE, ceiling, budget=0.5 if DEVICE.type == "cuda" else 0.0)
    assert "error" not in row, row["error"]
    benchmark.extra_info.update(row)
    arguments = made(case, DEVICE)

    def call() -> None:
        case.run(**arguments)
        clock.synchronize()

    benchmark.pedantic(call, rounds=10 if DEVICE.type == "cuda" else 2, warmup_rounds=1)
