"""A small private run, and queries of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.counts import CountQuery, PrivateData, accuracy_query

APART = PrivateData("validation", overlap=())
SAME = PrivateData("validation", overlap="training")
DELTA = 1e-4


def trained(engine: FastPrivacyEngine, steps: int = 3, **options: Any) -> tuple:
    """(model, optimizer) after so many steps of q = 1/8 and sigma = 1."""
    model = nn.Linear(4, 2)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=8
        ),
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def accuracy(data: Any, sigma: float = 5.0, unit: str = "row", **options: Any) -> CountQuery:
    return accuracy_query(data, ("f", "m"), sigma, unit, **options)


def predictions(rows: int = 40) -> dict[str, Any]:
    """What `count` takes besides the query."""
    groups = torch.arange(rows) % 2
    return {"groups": groups, "measures": {"correct": torch.arange(rows) % 5 > 0}}
