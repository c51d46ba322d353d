"""A captured step, on a GPU that is made up: new batches reach it, and the trainer stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_steps
from bench.gpu_graph import CapturedStep, NotCaptured
from bench.kernels.clock import CpuClock
from bench.measure import PeakMemory


class Stream:
    def wait_stream(self, other: Any) -> None: ...


class Graph:
    """Replays what was recorded."""

    recorded: Any = None

    def replay(self) -> None:
        assert Graph.recorded is not None
        Graph.recorded()


class Trainer:
    """Sums its batch into `loss`; knows whether it is being captured."""

    device = torch.device("cuda")

    def __init__(self, refuses: bool = False) -> None:
        self.batches = [(torch.full((2,), float(i)), torch.tensor(i)) for i in (1, 2)]
        self.optimizer = SimpleNamespace(zero_grad=lambda: None)
        self.loss = torch.zeros(())
        self.steps, self.refuses = 0, refuses

    def step(self) -> torch.Tensor:
        x, _ = self.batches[self.steps % 2]
        self.steps += 1
        if self.refuses and self.steps > 3:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        Graph.recorded = lambda: self.loss.copy_(x.sum())
        Graph.recorded()
        return self.loss


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def block(*_: Any) -> Iterator[None]:
        yield

    made_up = {"Stream": Stream, "CUDAGraph": Graph, "current_stream": Stream, "stream": block,
               "graph": block, "synchronize": lambda *_: None}  # fmt: skip
    for name, value in made_up.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_replays_see_every_batch() -> None:
    trainer = Trainer()
    batches = trainer.batches
    captured = CapturedStep(trainer)  # type: ignore[arg-type]
    assert [captured.step().item() for _ in range(4)] == [2.0, 4.0, 2.0, 4.0]
    assert trainer.steps == 4  # three to warm up, one captured
    assert trainer.batches is batches
    assert [x.tolist() for x, _ in batches] == [[1.0, 1.0], [2.0, 2.0]]


def test_why_a_step_was_not_captured() -> None:
    trainer = Trainer(refuses=True)
    batches = trainer.batches
    with pytest.raises(NotCaptured, match=r"^RuntimeError: operation not permitted when stream is"):
        CapturedStep(trainer)  # type: ignore[arg-type]
    assert trainer.batches is batches
    row = gpu_steps.as_graph(Trainer(refuses=True), PeakMemory(), CpuClock(), 2)  # type: ignore[arg-type]
    told = "not captured: RuntimeError: operation not permitted when stream is capturing"
    assert row["error"] == told
    assert "gpu_graph.py" in row["detail"]


def test_a_captured_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "profiled", lambda step, device: {"busy_s": 0.0, "kernels": []})
    row = gpu_steps.as_graph(Trainer(), PeakMemory(), CpuClock(), 2)  # type: ignore[arg-type]
    assert row["steps"] == 2
    assert row["step_s"][1] > 0
    assert row["profile"]["busy_share"] == 0.0
