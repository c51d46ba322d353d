"""Ctrl-C at every line where sums change hands: a row is released once, and every release counted."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from fastclip.errors import FastclipError
from tests.data.test_draws import Run, start
from tests.interrupts import CtrlC

FILES = ("logical_batch.py", "engine/release.py", "opacus_modes/step.py")
CALLS = ("_close", "zero_grad", "discard", "pre_step", "clip_and_accumulate")


def one_cycle(run: Run, x: Tensor) -> None:
    run.model(x).mean().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def check_interrupted(n: int, mode: str, step_again: bool) -> bool:
    """Whether a line was left to interrupt; the loop goes on as if nothing had been."""
    run = start(6, mode=mode, seed=2)
    released: list[Tensor] = []
    run.optimizer.original_optimizer.register_step_pre_hook(
        lambda *_: released.append(run.released())
    )
    interrupt = CtrlC(n, *FILES, calls=CALLS)
    for i in range(3):
        (x, *_) = list(run.loader) if not i else [next(iter(run.loader))]
        before = len(released)
        try:
            if i:
                one_cycle(run, x)
                continue
            with interrupt:
                one_cycle(run, x)
        except KeyboardInterrupt:
            if step_again:
                ignoring(run.optimizer.step)
        except (FastclipError, ValueError):  # refused, by Opacus too
            pass
        finally:
            for sums in released[before:]:
                assert ((sums == 0) | (x.sum(0) > 0)).all(), "rows of another batch"
                assert sums.max() <= 1
            assert run.steps >= len(released)
    return interrupt.raised


def ignoring(call: Any) -> None:
    with contextlib.suppress(FastclipError, ValueError):
        call()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("step_again", [False, True])
@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_everywhere(mode: str, step_again: bool) -> None:
    enabled = torch.is_grad_enabled()
    lines = 0
    while check_interrupted(lines + 1, mode, step_again):
        torch.set_grad_enabled(enabled)
        lines += 1
    assert lines > 50


def test_hooks_that_were_interrupted_leave_no_step_unrecorded() -> None:
    run = start(6, seed=2)
    run.optimizer.hooks._running = True  # as a Ctrl-C between two of its lines leaves it
    one_cycle(run, next(iter(run.loader)))
    assert run.steps == 1


def ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("give_up", ["zero_grad", "discard_logical_batch"])
def test_a_forward_pass_that_nobody_ends(give_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right behind its begin, before what would end it: the next one is a new one."""
    run = start(6, seed=2)
    grad_state, x = run.optimizer.grad_state, next(iter(run.loader))
    monkeypatch.setattr(grad_state.calls, "begin", ctrl_c)
    with pytest.raises(KeyboardInterrupt) as kept:  # a notebook keeps what was running, too
        run.model(x)
    monkeypatch.undo()
    getattr(run.optimizer, give_up)()
    one_cycle(run, next(iter(run.loader)))
    del kept  # and lets go of it at any time
    gc.collect()
    assert not grad_state.depth
    one_cycle(run, next(iter(run.loader)))
    assert run.steps == 2
