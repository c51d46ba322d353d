"""Whole training steps of the benchmark on the CPU, tiny: every mode runs, wrong ones are not timed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import pytest
import torch

from bench import gpu_steps
from bench.gpu_tasks import Trainer
from bench.kernels.check import WrongResult
from bench.workloads import MODES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and wait long for busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PAIRS = [
    (task, mode)
    for task in ("bert_t128", "resnet50", "gpt2", "vit_b")
    for mode in MODES
    if (task, mode) != ("gpt2", "opacus_ghost")  # Opacus refuses tied parameters there
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("task", "mode"), PAIRS)
@pytest.mark.filterwarnings("ignore")
def test_tiny_steps(task: str, mode: str) -> None:
    first, row = gpu_steps.measure(task, mode, CPU, steps=2, tiny=True, extras=False)
    assert first["first_step_s"] > 0
    assert bool(first["looks"]) == (mode == "fastclip")
    assert all(passes > 0 and seconds > 0 for passes, seconds in first["looks"])
    low, middle, high = row["step_s"]
    assert 0 < low <= middle <= high
    assert torch.tensor(row["loss"]).isfinite()
    assert set(row["host_parts_s"]) == {"forward", "backward", "optimizer"}
    assert min(row["host_parts_s"].values()) > 0
    if mode == "fastclip":  # on the CPU both are the reference, or loops that equal it
        assert row["gradient_error"] == pytest.approx(row["gradient_error_of_reference"], rel=1e-5)
        assert row["gradient_error"] < 0.5
        assert row["kernels"]["ghost_norm"].startswith("reference")
        assert any(layer["norm"] == "ghost" for layer in row["plan"])
        assert row["configurations"] == []  # nothing is searched on a CPU
    json.dumps(row)


@pytest.mark.filterwarnings("ignore")
def test_kernels_that_disagree_with_the_reference_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clipped = Trainer.clipped

    def off(self: Trainer, backend: str | None, autocast: bool = True) -> tuple[torch.Tensor, ...]:
        gradient, norms = clipped(self, backend, autocast)
        return (gradient * 1.1, norms) if backend is None else (gradient, norms)

    monkeypatch.setattr(Trainer, "clipped", off)
    parts = gpu_steps.measure("bert_t128", "fastclip", CPU, steps=1, tiny=True)
    assert "step_s" not in next(parts)
    with pytest.raises(WrongResult, match="kernels disagree"):
        next(parts)


@pytest.mark.filterwarnings("ignore")
def test_waits_for_the_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Waits:
        def step(self) -> None:
            warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)
            for _ in range(3):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert gpu_steps.host_syncs(Waits()) == 3  # type: ignore[arg-type]
    assert modes == ["warn", "default"]


def test_memory_above_the_built_model(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"memory_allocated": 100, "max_memory_allocated": 350}
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    peak = gpu_steps.CudaPeak(torch.device("cuda"))
    peak.restart()
    assert (peak.start, peak.above_start()) == (100, 250)
    assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
