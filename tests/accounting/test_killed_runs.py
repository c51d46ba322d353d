"""Runs that are killed in the middle of whatever they do: the file has all that was released."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.accounting.files import logged

TRAINING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from fastclip import FastPrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

folder, workers, physical = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(4, 2)
engine = FastPrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, num_workers=workers),
    noise_multiplier=1.0, max_grad_norm=1.0,
)
engine.write_ahead(folder / "ledger")
released = open(folder / "released", "a")
def note(*_):  # what an attacker has seen of it
    released.write("x"); released.flush()
optimizer.original_optimizer.register_step_post_hook(note)
print("ready", flush=True)
while True:
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
    ) as batches:
        for (x,) in batches:
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
    engine.save_checkpoint(path=folder / "run.pt", module=model, optimizer=optimizer)
"""


def killed(folder: Path, workers: int, physical: int, steps: int, seconds: float) -> None:
    """Start the training, and kill it so many seconds after it has released so many steps more."""
    released = folder / "released"
    wanted = steps + (released.stat().st_size if released.exists() else 0)
    command = [sys.executable, "-c", TRAINING, str(folder), str(workers), str(physical)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while released.stat().st_size < wanted:  # however slow this machine is
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


Kill = tuple[int, int, int, float]
"""(workers, physical batch, steps before it, seconds after them)."""


def check_killed(tmp_path: Path, kills: Iterable[Kill]) -> None:
    """The file never holds fewer steps than were released, and at most one more for each kill."""
    for kill, how in enumerate(kills, 1):
        killed(tmp_path, *how)
        released, counted = len((tmp_path / "released").read_bytes()), logged(tmp_path / "ledger")
        assert released <= counted <= released + kill
        if (tmp_path / "run.pt").exists():  # an old one or a new one, never half of one
            torch.load(tmp_path / "run.pt", weights_only=True)
    assert released > 0


def test_a_killed_run_has_counted_all_that_it_released(tmp_path: Path) -> None:
    """One that reads the batches itself, in pieces; then one that resumes with workers, whole."""
    check_killed(tmp_path, [(0, 3, 9, 0.05), (2, 64, 1, 0.0)])


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    draw = random.Random(1)
    check_killed(
        tmp_path,
        (
            (
                draw.choice([0, 0, 2]),
                draw.choice([3, 64]),
                draw.choice([0, 1, 2, 9, 30]),
                draw.uniform(0.0, 0.2),
            )
            for _ in range(100)
        ),
    )
