"""Opacus' schedulers go on from a checkpoint where they were; a fork has a lock of its own."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

N, D = 32, 4


def run(seed: int = 0) -> tuple:
    torch.manual_seed(seed)
    model, engine = nn.Linear(D, 2), FastPrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(N, D)), batch_size=8),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    optimizer = made[1]
    schedules = {
        "noise_scheduler": ExponentialNoise(optimizer, gamma=0.5),
        "grad_clip_scheduler": ExponentialGradClip(optimizer, gamma=0.5),
    }
    return engine, *made, schedules


def step(private: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    for (x,) in loader:
        optimizer.zero_grad()
        private(x).square().sum(1).mean().backward()
        optimizer.step()
        return


def test_schedules_go_on(tmp_path: Path) -> None:
    engine, private, optimizer, loader, schedules = run()
    for _ in range(3):
        step(private, optimizer, loader)
        for schedule in schedules.values():
            schedule.step()
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.125, 0.125)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=private, optimizer=optimizer, **schedules)

    again, private, other, loader, schedules = run(1)
    rest = again.load_checkpoint(path=path, module=private, optimizer=other, **schedules)
    assert (other.noise_multiplier, other.max_grad_norm) == (0.125, 0.125)
    assert not any("schedule" in name for name in rest)
    for schedule in schedules.values():
        schedule.step()
    assert (other.noise_multiplier, other.max_grad_norm) == (0.0625, 0.0625)
    step(private, other, loader)
    assert [steps for *_, steps in again.accountant.history][-1] == 1
    assert again.accountant.history[-1][0] == 0.0625


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_fork_while_another_thread_records() -> None:
    """The thread that held the parent's lock is not in the child."""
    engine = run()[0]
    held, done = Event(), Event()

    def hold() -> None:
        with engine.accountant._lock.now():
            held.set()
            done.wait()

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(not engine.accountant._lock.now().acquire(timeout=5))
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
