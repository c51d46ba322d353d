"""Opacus' modes: one C and one draw a logical batch, whatever is set or left in its middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor

from fastclip.errors import StepError
from tests.opacus_runs import MODES, C, Recorder, backward, gradients, rows, start
from tests.oracle import clipped_sum, relative_error
from tests.refusal import refused


def set_list_in_place(optimizer: Any, factor: float) -> None:
    for i in range(len(optimizer.max_grad_norms)):
        optimizer.max_grad_norms[i] *= factor


def set_number(optimizer: Any, factor: float) -> None:
    optimizer.max_grad_norm = optimizer.max_grad_norm * factor


def schedule(optimizer: Any, factor: float) -> None:
    ExponentialGradClip(optimizer, gamma=factor).step()


LATER: list[tuple[str, Callable]] = [
    ("flat", set_number), ("flat", schedule), ("per_layer", set_list_in_place),
]  # fmt: skip


@pytest.mark.parametrize("factor", [0.01, 10.0])
@pytest.mark.parametrize(("clip", "change"), LATER)
@pytest.mark.parametrize("mode", MODES)
def test_a_threshold_set_between_physical_batches(
    mode: str, clip: str, change: Callable, factor: float
) -> None:
    """Both halves are clipped at the old C, the noise is scaled for it; the next batch has the new."""
    threshold: Any = C if clip == "flat" else [C] * 4
    net, model, optimizer, _ = start(
        mode, noise_multiplier=1.0, max_grad_norm=threshold, clipping=clip
    )
    source = optimizer.noise_source = Recorder()
    sensitivity = C if clip == "flat" else 2 * C
    reference = {seed: gradients(net, rows(seed)) for seed in (1, 2, 3)}

    def clipped(seed: int, bound: float) -> Tensor:
        grads = reference[seed]
        if clip == "flat":
            sums = clipped_sum(grads, bound)
        else:
            sums = {n: clipped_sum({n: g}, bound)[n] for n, g in grads.items()}
        return torch.cat([s.flatten() for s in sums.values()])

    def summed() -> Tensor:
        return torch.cat([p.summed_grad.flatten().double() for p in net.parameters()])

    optimizer.signal_skip_step(True)
    backward(model, rows(1))
    optimizer.step()
    change(optimizer, factor)
    optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    backward(model, rows(2))
    optimizer.pre_step()
    assert relative_error(summed(), clipped(1, C) + clipped(2, C)) < 1e-4
    assert source.stds == pytest.approx([sensitivity] * 4)
    source.stds.clear()
    optimizer.zero_grad()
    backward(model, rows(3))
    optimizer.pre_step()
    assert relative_error(summed(), clipped(3, C * factor)) < 1e-4
    assert source.stds == pytest.approx([sensitivity * factor] * 4)


def test_noise_multiplier_may_change_at_any_time() -> None:
    """It is no threshold: the step that is recorded has it."""
    _, model, optimizer, _ = start(noise_multiplier=1.0)
    source = optimizer.noise_source = Recorder()
    optimizer.signal_skip_step(True)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.noise_multiplier = 3.0
    backward(model)
    optimizer.step()
    assert source.stds == pytest.approx([3 * C] * 4)


@pytest.mark.parametrize("mode", MODES)
def test_poisson_batches_are_not_joined(mode: str) -> None:
    """A sample may be in both: 2 C for noise of C."""
    _, model, optimizer, loader = start(mode, poisson_sampling=True)
    with refused("discard_logical_batch", StepError):
        for (x,) in loader:
            optimizer.signal_skip_step(True)
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
    optimizer.discard_logical_batch()
    optimizer.zero_grad()
    for (x,) in loader:
        optimizer.zero_grad()
        backward(model, x)
        optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_that_is_left_in_the_middle(mode: str) -> None:
    """Of a logical batch: the next epoch is not added to it, nor are its flags misread."""
    net, model, optimizer, loader = start(mode, poisson_sampling=True)

    def epoch(last: int | None) -> None:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=1, optimizer=optimizer
        ) as batches:
            for i, (x,) in enumerate(batches):
                optimizer.zero_grad()
                backward(model, x)
                optimizer.step()
                if i == last:
                    return

    epoch(0)
    with refused("discard_logical_batch", StepError):
        epoch(None)
    optimizer.discard_logical_batch()
    assert all(p.summed_grad is None for p in net.parameters())
    epoch(None)
