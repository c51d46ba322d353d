"""examples/resnet.py: physical batches, the budget, and a user's own folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from examples import resnet
from fastclip.engine.optimizer import FastDPOptimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 images of 3x8x8 whose class is their brightness."""
    labels = np.arange(60) % 3
    images = (
        np.random.default_rng(0).integers(0, 60, (60, 8, 8, 3)) + labels[:, None, None, None] * 90
    )
    np.save(tmp_path / "images.npy", images.astype(np.uint8))
    np.save(tmp_path / "labels.npy", labels)
    return tmp_path


def test_a_folder(folder: Path) -> None:
    train, test = resnet.load(folder)
    assert (len(train), len(test)) == (48, 12)
    x, y = train[0]
    assert (x.shape, x.dtype, int(y)) == ((3, 8, 8), torch.float32, 1)
    assert -1 <= float(train.tensors[0].min()) < float(train.tensors[0].max()) <= 1


def test_it_trains_within_the_budget(folder: Path, monkeypatch, capsys) -> None:
    """Every logical batch is one step, in physical batches of at most 5 images."""
    steps, largest = [], []
    real = FastDPOptimizer.step
    monkeypatch.setattr(FastDPOptimizer, "step", lambda self: steps.append(real(self)) or steps[-1])
    train, test = resnet.load(folder)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    net.register_forward_pre_hook(lambda module, args: largest.append(len(args[0])))
    model, engine = resnet.train(
        net, train, batch_size=12, physical=5, epochs=2, epsilon=3.0, secure=True
    )
    told = capsys.readouterr().out.split("traps (")[1]
    assert "follow from the number of samples" in told  # which is public here
    assert told.count("\n  - ") == 1
    assert sum(count for *_, count in engine.accountant.history) == 8
    assert len(steps) > 8
    assert max(largest) <= 5
    assert engine.get_epsilon(resnet.DELTA) <= 3.0
    accuracy = resnet.accuracy_by_class(model, test)
    assert len(accuracy) == 3
    assert all(0 <= share <= 1 for share in accuracy)
