"""Thresholds of counts that no step has paid for: a batch that is given up leaves nothing of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fastclip import clipping, ops
from fastclip.errors import ArgumentError
from fastclip.fairness import FairnessRecorder
from tests.fairness.by_hand import K
from tests.networks import mlp, rows
from tests.oracle import make_private, sample_loss

STRATEGIES = {"dpsgd_f": clipping.dpsgd_f, "naive": clipping.naive_reweighting}


class Stop(Exception):
    pass


def stop(*args: Any, **kwargs: Any) -> None:
    raise Stop


def run(strategy: str, released: int) -> tuple[Any, Any, Any]:
    """(engine, model, optimizer) after so many real steps."""
    torch.manual_seed(0)
    made = make_private(
        mlp(), clipping=STRATEGIES[strategy](K), noise_multiplier=1.0, max_grad_norm=0.5
    )[:3]
    for _ in range(released):
        backward(*made[:2])
        made[2].step()
        made[2].zero_grad()
    return made


def backward(engine: Any, private: Any) -> None:
    engine.set_groups(torch.arange(7) % K)
    sample_loss(private(rows(7))).mean().backward()


def shown(engine: Any, optimizer: Any) -> list[Any]:
    """All that says something of the last step's thresholds."""
    recorder = FairnessRecorder({"group": tuple("abc")}, ("no", "yes"), "group")
    recorder.thresholds(1, optimizer)
    assert recorder.frame()["private"].all()
    weights = optimizer.group_weights
    return [
        optimizer.threshold.tolist(), None if weights is None else weights.tolist(),
        float(optimizer.sensitivity), recorder.frame()["value"].tolist(),
        engine.mechanism().sensitivity,
    ]  # fmt: skip


def unrecorded(engine: Any, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as m:
        m.setattr(type(engine.accountant), "step", stop)
        with pytest.raises(Stop):
            optimizer.step()


def failed_hook(engine: Any, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    optimizer.attach_step_hook(stop)
    with pytest.raises(Stop):
        optimizer.step()
    optimizer.attach_step_hook(lambda optimizer: None)


GIVEN_UP = {
    "discarded": lambda engine, optimizer, patch: optimizer.discard_logical_batch(),
    "cleared": lambda engine, optimizer, patch: optimizer.zero_grad(),
    "not recorded": unrecorded,
    "a hook failed": failed_hook,
}


@pytest.mark.parametrize("released", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", GIVEN_UP)
def test_a_batch_that_is_given_up(
    how: str, strategy: str, released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, private, optimizer = run(strategy, released)
    before = shown(engine, optimizer)
    backward(engine, private)
    GIVEN_UP[how](engine, optimizer, monkeypatch)
    assert shown(engine, optimizer) == before
    if how in ("discarded", "cleared"):
        backward(engine, private)
        optimizer.step()
        assert shown(engine, optimizer) != before


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["clipping", "afterwards"])
def test_a_pass_that_stops(strategy: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the launch that clips at the new thresholds, or when the sums are being written."""
    engine, private, optimizer = run(strategy, 1)
    before, launches = shown(engine, optimizer), []

    def clip_scale(*args: Any) -> Any:
        launches.append(args)
        if len(launches) == 2:
            raise Stop
        return original(*args)

    original = ops.clip_scale
    with monkeypatch.context() as patch:
        if where == "clipping":
            patch.setattr(ops, "clip_scale", clip_scale)
        else:
            patch.setattr(type(private.grad_state.batch), "end_pass", stop)
        with pytest.raises(Stop):
            backward(engine, private)
    if where == "clipping":
        assert shown(engine, optimizer) == before
    else:
        with pytest.raises(ArgumentError, match=r"which optimizer.step\(\) pays for"):
            shown(engine, optimizer)
    optimizer.zero_grad()
    assert shown(engine, optimizer) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_while_a_batch_waits_for_its_step(strategy: str) -> None:
    """The statement of privacy and a copy have the thresholds of the last step."""
    engine, private, optimizer = run(strategy, 1)
    threshold, weights, *_ = shown(engine, optimizer)
    sensitivity = engine.mechanism().sensitivity
    backward(engine, private)
    assert engine.mechanism().sensitivity == sensitivity
    twin = copy.deepcopy(private).grad_state.clipping.current
    assert twin.threshold.tolist() == threshold
    assert weights is None or twin.weights.tolist() == weights
