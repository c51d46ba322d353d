"""An engine keeps no rows: not in the log, not in a copy; any data set may follow any other."""

from __future__ import annotations

import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine

ROWS, D = 12, 6
MODES = ("fast", "hooks")
MARK = 1234.5

KINDS = {
    "tensors": lambda n: TensorDataset(torch.full((n, D), MARK)),
    "a tensor": lambda n: torch.full((n, D), MARK),
    "an array": lambda n: np.full((n, D), MARK, dtype=np.float32),
    "a list of tensors": lambda n: [torch.full((D,), MARK) for _ in range(n)],
    "a list of pairs": lambda n: [(torch.full((D,), MARK), torch.tensor(1)) for _ in range(n)],
    "a list of lists": lambda n: [[MARK] * D for _ in range(n)],
    "a stack": lambda n: StackDataset(torch.full((n, D), MARK)),
}


def prepare(engine: FastPrivacyEngine, data, mode: str, **how) -> None:
    net = nn.Linear(D, 2)
    engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(data, batch_size=4, **how), max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_runs_on_two_data_sets(kind: str, mode: str, rows: int) -> None:
    """Nothing compares their rows, or prints them."""
    engine = FastPrivacyEngine(accountant="rdp")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (ROWS, rows):
            prepare(engine, KINDS[kind](size), mode)
    assert not any(str(MARK) in str(each.message) for each in told)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copied", ["pickle", "torch.save"])
def test_a_copied_engine_holds_no_rows(mode: str, copied: str) -> None:
    """Neither their values, nor how often each of them is drawn."""
    engine, file = FastPrivacyEngine(accountant="rdp"), io.BytesIO()
    weights = torch.linspace(0.5, 1.5, 4001, dtype=torch.float64)
    data = TensorDataset(torch.full((len(weights), D), MARK))
    prepare(engine, data, mode, sampler=WeightedRandomSampler(weights, 100))
    (pickle.dump if copied == "pickle" else torch.save)(engine, file)
    assert len(file.getvalue()) < 16_000
    file.seek(0)
    twin = pickle.load(file) if copied == "pickle" else torch.load(file, weights_only=False)
    assert twin.dataset is engine.dataset is None
    prepare(twin, data, mode)
