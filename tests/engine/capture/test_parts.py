"""A batch that a step runs in parts: it contributes whole or not at all, and shows all its rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import BatchSizeError, GraphError, StepError
from fastclip.fairness import FairnessRecorder
from tests.engine.capture.test_step import losses
from tests.oracle import clipped_sum, norms, relative_error, summed

C = 0.05


class Fails:
    """`losses`, but for the calls that are to fail."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.at = 0, calls

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.at:
            raise MemoryError("no memory is left")
        return losses(model, x, y)


def start(function: Any, data: Any = None, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if data is None:
        data = TensorDataset(torch.randn(64, 6).double(), torch.arange(64) % 3)
    engine, original = FastPrivacyEngine(), copy.deepcopy(model)
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=C,
        data_loader=DataLoader(data, 24), noise_multiplier=0.0, **options,
    )  # fmt: skip
    step = engine.make_step(private, function, physical_batch=8)
    return original, private, optimizer, loader, step


def drawn(loader: Any) -> tuple[Tensor, Tensor]:
    x, y = next(iter(loader))
    assert len(x) > 17
    return x[:16], y[:16]  # fewer rows than were drawn are fine


def test_no_row_counts_twice_where_a_later_part_fails() -> None:
    """A second try is refused until the first one's rows are cleared; then it is the whole batch."""
    original, private, optimizer, loader, step = start(Fails(2))
    x, y = drawn(loader)
    with pytest.raises(MemoryError):
        step(x, y)
    with pytest.raises(StepError, match="failed or was interrupted"):
        step(x, y)
    with pytest.raises(StepError, match="failed or was interrupted"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(p.summed_grad is None for p in private.parameters())
    step(x, y)
    expected = clipped_sum(gradients(original, x, y), C)
    assert relative_error(summed(dict(private._module.named_parameters())), expected) <= 1e-10


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of every sample, one at a time."""
    rows = []
    for i in range(len(x)):
        loss = losses(model, x[i : i + 1], y[i : i + 1]).sum()
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    names = [name for name, _ in model.named_parameters()]
    return {
        name: torch.stack(own) for name, own in zip(names, zip(*rows, strict=True), strict=True)
    }


def test_where_the_first_part_fails_there_is_nothing_to_clear() -> None:
    _, private, optimizer, loader, step = start(Fails(1))
    x, y = drawn(loader)
    with pytest.raises(MemoryError):
        step(x, y)
    step(x, y)
    optimizer.step()
    assert all(p.grad is not None for p in private.parameters())


def test_norms_of_all_parts() -> None:
    original, _, optimizer, loader, step = start(losses)
    x, y = next(iter(loader))
    step(x, y)
    expected = norms(gradients(original, x, y))
    assert torch.allclose(optimizer.per_sample_norms, expected, rtol=1e-10)
    recorder = FairnessRecorder({"sex": ("female", "male")}, ("no", "yes"))
    recorder.observe(optimizer, {"sex": torch.arange(len(x)) % 2})
    recorder.close_period(1)
    frame = recorder.frame()
    assert frame[frame["measure"] == "rows"]["value"].sum() == len(x)


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from ((torch.randn(6).double(), i % 3) for i in range(64))


def test_a_streams_batch_is_not_run_in_parts() -> None:
    """It is said before any of it has contributed."""
    *_, optimizer, loader, step = start(losses, Stream(), poisson_sampling=False)
    x, y = next(iter(loader))
    with pytest.raises(BatchSizeError, match="holds 24 samples with physical_batch=8"):
        step(x, y)
    assert optimizer.grad_state.batch.fresh


@pytest.mark.parametrize("kind", ["detached", "integers"])
def test_losses_without_a_gradient(kind: str) -> None:
    def without(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = losses(model, x, y).detach()
        return found if kind == "detached" else found.long()

    *_, loader, step = start(without)
    with pytest.raises(GraphError, match="losses without a gradient"):
        step(*drawn(loader))
