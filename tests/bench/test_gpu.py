"""The benchmark's harness on the CPU: what is wrong is told and not timed, one failure stops nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import clock as clocks
from bench.kernels import harness
from bench.kernels.case import Case, normal
from bench.kernels.catalog import by_importance, discover
from bench.kernels.check import served_by
from bench.kernels.harness import measure
from fastclip import ops
from fastclip.ops import dispatch

CPU = torch.device("cpu")
CEILING = {"matmul_tflops": {"float32": 1.0}, "copy_gbps": 10.0}


def case(run: Callable[..., Any], others: dict | None = None, **changes: Any) -> Case:
    """A small case over a [3, 5, 4] and g [3, 5, 6]."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shapes = {"a": (3, 5, 4), "g": (3, 5, 6)}
        return {n: normal(s, torch.float32, device, generator) for n, s in shapes.items()}

    settings: dict = {
        "operation": "ghost_norm", "model": "toy", "shape": {"b": 3, "t": 5}, "make": make,
        "dtype": torch.float32, "run": run, "others": others or {}, "flops": 1e6, "nbytes": 1e3,
        "tolerance": 1e-4,
    }  # fmt: skip
    return Case(**{**settings, **changes})


def einsum_norm(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btd,btp->bpd", a, g).square().sum((1, 2))


def test_a_right_case_is_checked_timed_and_compared() -> None:
    def fails(a: torch.Tensor, g: torch.Tensor) -> None:
        raise RuntimeError("out of reach\nand more")

    row = measure(case(ops.ghost_norm, {"einsum": einsum_norm, "gone": fails}), CPU, CEILING, 0.01)
    assert "error" not in row
    assert row["relative_error"] < 1e-5
    assert (row["backend"], row["reference"], row["repeatable"]) == ("reference", "float64", True)
    low, middle, high = row["seconds"]
    assert 0 < low <= middle <= high
    assert row["others"]["einsum"]["relative_error"] < 1e-4
    assert row["others"]["einsum"]["ratio"] > 0
    assert row["others"]["gone"] == {"error": "RuntimeError: out of reach"}
    assert row["tflops"] == pytest.approx(1e6 / middle / 1e12)
    assert row["bound"] == "arithmetic"  # 1 us at 1 TFLOP/s, 0.1 us at 10 GB/s
    assert row["fraction"] == pytest.approx(1e-6 / middle)


def test_on_a_gpu_the_reference_is_timed_beside_the_kernel() -> None:
    class Gpu(clocks.CpuClock):
        device = torch.device("cuda")

    row = measure(case(ops.ghost_norm), CPU, CEILING, 0.01, Gpu())
    assert row["others"][harness.REFERENCE]["ratio"] > 0


def test_arguments_are_drawn_on_the_cpu_where_they_cannot_be_elsewhere() -> None:
    """The device "meta" has no generator, as a maker may refuse a GPU's."""
    found = harness.made(case(ops.ghost_norm), torch.device("meta"))
    assert found["a"].device.type == "meta"
    assert found["a"].shape == (3, 5, 4)


def test_a_wrong_result_is_told_and_not_timed() -> None:
    calls = []

    def wrong(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        calls.append(a.dtype)
        return einsum_norm(a, g) * (1.0 if a.dtype == torch.float64 else 1.01)

    row = measure(case(wrong), CPU)
    assert row["error"].startswith("WrongResult: relative error 0.01 above 0.0001")
    assert "seconds" not in row
    assert calls == [torch.float64, torch.float32, torch.float32]


def test_what_a_kernel_leaves_unwritten_is_found() -> None:
    """The second call finds the first one's result full of NaN, and writes half of it."""
    memory = torch.empty(3)

    def half(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        found = einsum_norm(a, g)
        if a.dtype == torch.float64:
            return found
        rows = slice(0, 2) if memory.isnan().any() else slice(0, 3)
        memory[rows] = found[rows]
        return memory

    assert measure(case(half), CPU)["error"].startswith("WrongResult: relative error nan")


def test_operations_may_write_to_their_arguments() -> None:
    def counts(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return a.mul_(2)

    row = measure(case(counts), CPU, budget=0.0)
    assert row["relative_error"] == 0


@pytest.mark.parametrize("shape", [(3, 1), ()])
def test_results_of_another_shape_are_wrong(shape: tuple[int, ...]) -> None:
    def run(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3) if a.dtype == torch.float64 else torch.zeros(shape)

    assert "expected the shape [3]" in measure(case(run), CPU)["error"]


def test_a_case_that_fails_is_a_row() -> None:
    def fails(a: torch.Tensor, g: torch.Tensor) -> None:
        if a.dtype == torch.float32:
            raise torch.OutOfMemoryError("no room\nfor it")
        return None

    assert measure(case(fails), CPU)["error"] == "OutOfMemoryError: no room"


@pytest.mark.parametrize(
    ("kernel", "backend", "why"),
    [
        (lambda a, g: einsum_norm(a, g), "triton", "launched"),
        (lambda a, g: NotImplemented, "reference", "the triton kernel did not take these"),
        (lambda a, g: 1 / 0, "reference", "its first launch failed: ZeroDivisionError"),
    ],
)
@pytest.mark.filterwarnings("ignore:the triton kernel of ghost_norm")
def test_a_figure_bears_the_name_of_what_ran(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable, backend: str, why: str
) -> None:
    state = dispatch._State("triton", kernels={"triton": {"ghost_norm": kernel}})
    monkeypatch.setattr(dispatch, "_STATE", state)
    a, g = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    found, by, reason = served_by("ghost_norm", CPU, lambda: ops.ghost_norm(a, g))
    torch.testing.assert_close(found, einsum_norm(a, g), rtol=1e-4, atol=1e-5)
    assert by == backend
    assert why in reason
    assert state.kernels["triton"]["ghost_norm"] is kernel


def test_modules_that_cannot_be_imported_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench_broken.py").write_text("raise ValueError('no such operation')\n")
    (tmp_path / "bench_empty.py").write_text("def cases():\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found, failures = discover(["bench_broken", "bench_empty"])
    assert not found
    assert failures == [
        {"id": "broken", "operation": "broken", "error": "ValueError: no such operation"}
    ]


def test_every_operation_and_model_comes_before_any_comes_twice() -> None:
    def of(operation: str, model: str, flops: float, dtype: torch.dtype) -> Case:
        return case(ops.ghost_norm, operation=operation, model=model, flops=flops, dtype=dtype)

    bf16, f32 = torch.bfloat16, torch.float32
    plan = [
        ("0", of("x", "bert", 1.0, bf16)), ("1", of("x", "bert", 9.0, f32)),
        ("2", of("x", "bert", 5.0, bf16)), ("3", of("x", "gpt2", 1.0, f32)),
        ("4", of("y", "bert", 1.0, f32)),
    ]  # fmt: skip
    assert [name for name, _ in by_importance(plan)] == ["2", "3", "4", "0", "1"]


def test_the_smoke_set_is_the_smallest_of_each_operation() -> None:
    pytest.importorskip("pytest_benchmark")
    from bench.kernels.test_bench import smoke

    found = smoke([
        ("0", case(ops.ghost_norm, nbytes=9.0)), ("1", case(ops.ghost_norm, nbytes=5.0)),
        ("2", case(ops.ghost_norm, operation="large", nbytes=1e12)),
    ])  # fmt: skip
    assert found == {"1"}
