"""Whole training steps of the benchmark on the CPU, tiny: every mode runs, wrong ones are not timed."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import gpu_steps
from bench.gpu_runs import OPACUS, OTHERS
from bench.gpu_tasks import Trainer
from bench.gpu_ways import NotThisWay, Turn, step_of
from bench.kernels import tuning
from bench.processes import MARK
from bench.workloads import MODES
from fastclip.engine import step as step_module

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and wait long for busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(task: str, mode: str, *ways: str) -> dict[str, dict]:
    """What a process tells of each way, tiny, on the CPU."""
    order = {"task": task, "mode": mode, "ways": ways, "device": "cpu", "tiny": True, "steps": 2,
             "inductor": False}  # fmt: skip
    found: dict[str, dict] = {}
    for part in gpu_steps.measure_ways(order):
        if "begin" in part:
            row = found[part["begin"]] = {}
        elif "end" not in part:
            row.update(part)
    json.dumps(found)
    return found


PAIRS = [
    (task, mode)
    for task in ("bert_t128", "resnet50", "gpt2", "vit_b", "lora")
    for mode in MODES
    if task in OPACUS or mode not in OTHERS
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("task", "mode"), PAIRS)
@pytest.mark.filterwarnings("ignore")
def test_tiny_steps(task: str, mode: str) -> None:
    ways = ("eager",) if mode in OTHERS else ("eager", "graph", "compiled")
    found = told(task, mode, *ways)
    row = found["eager"]
    assert row["first_step_s"] > 0
    assert bool(row["looks"]) == (mode == "fastclip")
    assert all(passes > 0 and seconds > 0 for passes, seconds in row["looks"])
    low, middle, high = row["step_s"]
    assert 0 < low <= middle <= high
    assert torch.tensor(row["loss"]).isfinite()
    assert row["profile"]["kernels"][0]["seconds"] > 0
    if mode == "fastclip":  # on the CPU both are the reference, or loops that equal it
        assert row["gradient_error"] == pytest.approx(row["gradient_error_of_reference"], rel=1e-5)
        assert row["gradient_error"] < 0.5
        assert row["kernels"]["ghost_norm"].startswith("reference")
        assert row["plan"]
        assert row["configurations"] == []  # nothing is searched on a CPU
    if mode not in OTHERS:
        assert found["graph"]["error"] == "NotThisWay: CUDA graphs need an NVIDIA GPU"
        assert found["compiled"]["step_s"][1] > 0


@pytest.mark.filterwarnings("ignore")
def test_an_ordinary_step_that_is_recorded_trains_as_it_is() -> None:
    eager, recorded = (Trainer("gpt2", "non_private", CPU, tiny=True) for _ in range(2))
    recorded.model.load_state_dict(eager.model.state_dict())
    recorded.batches = eager.batches
    with eager.without_dropout(), recorded.without_dropout():
        step = step_of(recorded, "non_private", "recorded", Turn(None), inductor=False)
        losses = [float(eager.step()) for _ in range(4)][1:]
        found = [float(step()) for _ in range(3)]
    assert found == pytest.approx(losses, rel=1e-2)
    for one, other in zip(eager.model.parameters(), recorded.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


def test_why_a_step_cannot_be_recorded() -> None:
    trainer = Trainer("bert_t128", "non_private", CPU, tiny=True)
    trainer.loss_of = lambda x, y: trainer.model(x).sum() * float(x.sum())  # type: ignore[method-assign]
    with pytest.raises(NotThisWay, match="it cannot be compiled whole: aten::_local_scalar_dense"):
        step_of(trainer, "non_private", "recorded", Turn(None), inductor=False)


@pytest.mark.filterwarnings("ignore")
def test_why_a_private_step_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer("vit_b", "fastclip", CPU, tiny=True)
    losses = trainer.losses_of

    def reads(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        float(x.sum())  # which has no effect
        return losses(model, x, y)

    trainer.losses_of = reads  # type: ignore[method-assign]
    given = step_module.TracedRecorder
    with pytest.raises(NotThisWay, match=r"The step runs without being compiled\. The pass"):
        step_of(trainer, "fastclip", "compiled", Turn(None), inductor=False)
    assert step_module.TracedRecorder is given


def test_one_process_has_the_device_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = (Turn(str(tmp_path / "turn")) for _ in range(2))
    first.take()
    order: list[str] = []

    def other() -> None:
        second.take()
        order.append("second")
        second.release()

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.1)
    assert not order
    with first.lent():
        thread.join(10)
        order.append("lent")
    assert order == ["second", "lent"]
    assert second.waited > 0.05
    told = [line for line in capsys.readouterr().out.splitlines() if "waits" in line]
    assert len(told) == 6


@pytest.mark.filterwarnings("ignore")
def test_kernels_that_disagree_with_the_reference_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clipped = Trainer.clipped

    def off(self: Trainer, backend: str | None, autocast: bool = True) -> tuple[torch.Tensor, ...]:
        gradient, norms = clipped(self, backend, autocast)
        return (gradient * 1.1, norms) if backend is None else (gradient, norms)

    monkeypatch.setattr(Trainer, "clipped", off)
    row = told("bert_t128", "fastclip", "eager")["eager"]
    assert row["error"].startswith("WrongResult: kernels disagree")
    assert row["first_step_s"] > 0
    assert "step_s" not in row


def test_the_child(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name in ("anew", "compile_only"):
        monkeypatch.setattr(tuning, name, lambda *_: None)

    def answers(**order: object) -> list[dict]:
        text = json.dumps({"device": "cpu", "tiny": True, "steps": 1, "inductor": False, **order})
        monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
        gpu_steps.main()
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]

    pair = {"task": "gpt2", "mode": "non_private"}
    found = answers(**pair, ways=["eager"])
    assert (found[0], found[-2:]) == ({"begin": "eager"}, [{"end": "eager"}, {"finished": True}])
    found = answers(task="gpt2", mode="nothing", ways=["eager"])
    assert {"error": "KeyError: 'nothing'"}.items() <= found[1].items()
    found = answers(**pair, share=[0, 2])  # compiled ahead
    assert found[0]["seconds"] > 0


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
