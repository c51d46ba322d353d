"""A delta of at least 1 / N lets a run publish one whole sample, which is said once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

N = 40
BUDGET = {"target_epsilon": 5.0, "epochs": 1}


def made(budget: dict[str, Any] | None = None, **options: Any) -> FastPrivacyEngine:
    engine, model = FastPrivacyEngine(), nn.Linear(3, 2)
    make = engine.make_private if budget is None else engine.make_private_with_epsilon
    make(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.zeros(N, 3)), batch_size=8),
        **(budget or {"noise_multiplier": 1.0}), **options,
    )  # fmt: skip
    return engine


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if "1/N" in str(each.message)]


@pytest.mark.parametrize("delta", [1 / N, 0.5])
def test_it_is_said_once_an_engine(delta: float) -> None:
    engine = made()
    (message,) = said(lambda: engine.get_epsilon(delta))
    assert f"delta={delta:g} in get_epsilon" in message
    assert f"N = {N} samples" in message
    assert "whole sample" in message
    assert len(message.split()) <= 40
    assert not said(lambda: engine.get_epsilon(delta))
    assert not said(lambda: made().get_epsilon(0.99 / N))


def test_a_budget_says_it_before_it_searches() -> None:
    found: list[FastPrivacyEngine] = []
    (message,) = said(lambda: found.append(made({**BUDGET, "target_delta": 1 / N})))
    assert "in make_private_with_epsilon" in message
    assert not said(lambda: found[0].get_epsilon(1 / N))
    assert not said(lambda: made({**BUDGET, "target_delta": 0.9 / N}))


def test_of_units_and_of_public_numbers() -> None:
    """N is that of the units; where q and B are public, B / q, which is no secret."""
    ids = torch.arange(N) // 4
    (message,) = said(lambda: made(unit_ids=ids).get_epsilon(1 / 10))
    assert "N = 10 units" in message
    assert "whole unit" in message
    assert not said(lambda: made(unit_ids=ids).get_epsilon(0.99 / 10))
    public = {"sample_rate": 0.1, "expected_batch_size": 5.0}
    (message,) = said(lambda: made(**public).get_epsilon(1 / 40))
    assert "N = 50 samples" in message
    assert not said(lambda: made(**public).get_epsilon(1 / 51))


def test_the_message_says_how_to_silence_it() -> None:
    engine = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "delta=")
        engine.get_epsilon(0.5)
