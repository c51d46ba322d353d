"""The batches of a run, against the sampling that the ledger records of its steps.

The laws are those of the audit (fastclip/audit/laws.py), whose own tests say what they find.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine
from fastclip.audit.bounds import by_steps
from fastclip.audit.laws import p_values_of_draws, shared
from fastclip.audit.mechanism import in_turn
from fastclip.data.sampling import CyclicPoisson

ALPHA = 1e-6
N, Q, STEPS = 8000, 0.25, 8
ROWS = TensorDataset(torch.arange(N, dtype=torch.float32)[:, None])
WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 0.25], dtype=torch.float64).repeat(N // 4)
CASES = {
    "one rate": {},
    "several rates": {"sampler": WeightedRandomSampler(WEIGHTS.tolist(), N)},
    "cut": {"max_batch_size": 1600},
    "allocated": {"sampling": "allocation"},
    "in turn": {"sampling": CyclicPoisson(2)},
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("case", CASES)
def test_draws_are_those_that_are_recorded(case: str) -> None:
    options: dict[str, Any] = dict(CASES[case])
    loader = DataLoader(ROWS, batch_size=int(N * Q), sampler=options.pop("sampler", None))
    model = nn.Linear(1, 1)
    engine = FastPrivacyEngine(accountant="pld" if case == "cut" else "prv")
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=Q, expected_batch_size=N * Q, **options,
    )  # fmt: skip
    came = torch.zeros(STEPS, N, dtype=torch.float64)
    step = 0
    while step < STEPS:
        for (rows,) in loader:
            optimizer.zero_grad()
            private(rows).sum().backward()
            optimizer.step()
            came[step].index_add_(0, rows[:, 0].long(), torch.ones(len(rows), dtype=torch.float64))
            step += 1
    recorded = [rate for _, rate in by_steps(engine.accountant.history)]
    came = in_turn(came, turn := 2 if case == "in turn" else 1)
    assert len(recorded) == STEPS // turn
    found = p_values_of_draws(came, recorded, WEIGHTS if case == "several rates" else None)
    assert shared(found.values()) > ALPHA, found
