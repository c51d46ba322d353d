"""A release is recorded before there is anything of it: where that fails nothing is to be taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastclip.clipping import Clipping, Quantile
from tests.engine.optimizer.test_step_hooks import start
from tests.interrupts import at_every_line
from tests.oracle import sample_loss

MODES = ["fast", "hooks", "functorch"]


def backward(private: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    sample_loss(private(torch.randn(6, 6))).mean().backward()


def held(optimizer: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in optimizer.params]


@pytest.mark.parametrize("mode", MODES)
def test_no_noise_is_drawn_before(mode: str) -> None:
    _, private, optimizer = start(mode)
    backward(private, optimizer)
    before, state = held(optimizer), torch.get_rng_state()
    account, seen = optimizer.batch.account, []

    def looking(given: Any) -> None:
        assert torch.equal(torch.get_rng_state(), state)
        for old, p in zip(before, optimizer.params, strict=True):
            assert (old is None and p.grad is None) or torch.equal(old, p.grad)
        seen.append(given)
        account(given)

    optimizer.batch.account = looking
    optimizer.step()
    assert seen == [optimizer]


def test_a_ledger_that_fails_and_ctrl_c_together() -> None:
    """Nothing noisy is left behind, and no threshold has moved, wherever the interruption falls."""
    interrupted = 0
    for ctrl_c in at_every_line("engine/optimizer.py", "engine/release.py"):
        engine, private, optimizer = start("fast", clipping=Clipping(threshold=Quantile()))
        backward(private, optimizer)
        threshold = optimizer.max_grad_norm

        def full(_: Any) -> None:
            raise OSError("no space left on device")

        optimizer.batch.account = full
        try:
            with ctrl_c:
                optimizer.step()
        except OSError:
            pass
        except KeyboardInterrupt:
            interrupted += 1
        assert optimizer.max_grad_norm == threshold
        assert all(p.grad is None for p in optimizer.params)
        assert not engine.accountant.history
    assert interrupted > 20


@pytest.mark.parametrize("mode", MODES)
def test_noise_that_is_added_by_hand_is_recorded(mode: str) -> None:
    """Its gradients may be stepped on by anything."""
    engine, private, optimizer = start(mode)
    for taken in (1, 2):
        backward(private, optimizer)
        optimizer.clip_and_accumulate()
        optimizer.add_noise()
        assert engine.accountant.history == [(1.0, 1.0, taken)]


@pytest.mark.parametrize("mode", MODES)
def test_sums_are_released_once_by_hand_too(mode: str) -> None:
    """Ten of one draw at sigma are one at sigma / sqrt(10), which no ledger of ten draws states."""
    engine, private, optimizer = start(mode)
    backward(private, optimizer)
    optimizer.clip_and_accumulate()
    optimizer.add_noise()
    first = held(optimizer)
    for again in (optimizer.add_noise, optimizer.step):
        with pytest.raises(ValueError, match="haven't been cleared"):
            again()
    assert engine.accountant.history == [(1.0, 1.0, 1)]
    assert all(torch.equal(old, p.grad) for old, p in zip(first, optimizer.params, strict=True))
