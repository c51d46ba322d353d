"""Physical batches of the benchmark make the same step as one batch; rounds end in time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import workloads
from bench.deadline import Deadline
from bench.train import NO_HOLES, add_tight, parse, run_rounds, run_tight
from bench.training import FEWEST, Training, measure
from bench.workloads import CLASSES, CPU_MODES, Workload


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Workload(
        "small",
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double(),
        lambda n: torch.randn(n, 5, dtype=torch.float64),
        batch_size=12,
    )
    monkeypatch.setitem(workloads.WORKLOADS, "small", task)


def gradients(mode: str, physical: int | None) -> list[torch.Tensor]:
    """After the second step: of the batch, without noise."""
    training = Training("small", mode, physical=physical)
    assert training.parts == (1 if physical is None else 12 // physical)
    if mode != "non_private":
        training.optimizer.noise_multiplier = 0.0
    for _ in range(2):
        training.step()
    return [p.grad for p in training.model.parameters()]


@pytest.mark.parametrize("mode", CPU_MODES)
@pytest.mark.filterwarnings("ignore")
def test_physical_batches_make_the_same_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.training.BATCHES", 1)  # the whole batch meets the same rows
    whole, split = gradients(mode, None), gradients(mode, 4)
    for own, expected in zip(split, whole, strict=True):
        torch.testing.assert_close(own, expected)


def test_physical_batches_must_fit() -> None:
    with pytest.raises(ValueError, match="physical batches of 5 rows do not make a batch of 12"):
        Training("small", "fastclip", physical=5)


def test_a_process_ends_in_time() -> None:
    found = measure("small", "non_private", steps=50, seconds=0.0)
    assert found["steps"] == FEWEST
    assert measure("small", "non_private", steps=1)["steps"] == 1


def test_failures_are_not_run_again_and_later_rounds_end_in_time() -> None:
    now = [0.0]

    def run(module: str, arguments: list[str]) -> dict:
        _, _, mode, *rest = arguments
        assert rest == ["--steps", "10", "--seconds", "3.0"]
        return {"error": "E: no"} if mode == "opacus_ghost" else {"step_s": [1, 1, 1]}

    options = parse(["--workloads", "bert", "--rounds", "3"])
    runs = run_rounds(options, Deadline(60.0, lambda: now[0]), run)
    assert [r["mode"] for r in runs if "error" in r] == ["opacus_ghost"]
    assert len(runs) == 3 * (len(CPU_MODES) - 1) + 1
    late = Deadline(-1.0, lambda: now[0])
    assert [r["round"] for r in run_rounds(options, late, run)] == [0] * len(CPU_MODES)


def test_memory_without_holes_is_told_beside_what_a_process_takes() -> None:
    options = parse(["--workloads", "bert", "--modes", "non_private", "fastclip", "opacus_hooks"])
    asked = []

    def run(module: str, arguments: list[str], variables: dict[str, str]) -> dict:
        asked.append((arguments[2], variables))
        return {"peak_mib": {"non_private": 100.0, "fastclip": 107.0}[arguments[2]]}

    tight = run_tight(options, run)
    assert asked == [("non_private", NO_HOLES), ("fastclip", NO_HOLES)]
    rows = [{"workload": "bert", "mode": mode} for mode in options.modes]
    add_tight(rows, tight)
    assert [row.get("tight_ratio") for row in rows] == [1.0, 1.07, None]
    add_tight(rows[:1], [{"workload": "bert", "mode": "fastclip", "error": "died"}])
