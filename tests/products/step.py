"""One private step of a model of another library, beside one sample at a time by autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

Loss = Callable[..., Tensor]
"""(model, *columns of the batch) -> the loss of the batch, a mean over its samples."""


def check_step(
    model: nn.Module, columns: tuple[Tensor, ...], loss: Loss, *, steps: int = 3,
    criterion: Any = None, again: Callable[[int], None] | None = None, **options: Any,
) -> None:  # fmt: skip
    """The first steps, the traced ones and those after: the clipped sums, to 1e-8 of their norm.

    Args:
        columns: of the data set, [n, ...] each; every sample is drawn in every step.
        again: called with the number of the step before each loss is computed, so that what it draws is
            the same for the batch and for its samples.
    """
    model.double().train()
    n, plain = len(columns[0]), copy.deepcopy(model)
    numbers = torch.arange(n)
    options = {"max_grad_norm": 0.5, "noise_multiplier": 0.0} | options
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), criterion=criterion,
        data_loader=DataLoader(TensorDataset(numbers, *columns), batch_size=n), sample_rate=1.0,
        expected_batch_size=n, **options,
    )  # fmt: skip
    kept, done = [], 0
    while done < steps:
        for _, *batch in loader:
            plain.load_state_dict(model.state_dict())
            before = copy.deepcopy(plain)
            optimizer.zero_grad()
            if again is not None:
                again(done)
            loss(private, *batch).backward()
            sums = [p.summed_grad.clone() for p in model.parameters() if p.requires_grad]
            kept.append((before, batch, sums))
            optimizer.step()
            done += 1
    for number, (before, batch, sums) in enumerate(kept):
        for_all = None if again is None else (lambda number=number: again(number))
        compare(before, batch, loss, sums, options["max_grad_norm"], for_all)


def compare(
    model: nn.Module, batch: list[Tensor], loss: Loss, sums: list[Tensor], c: float,
    again: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Sums of a step, and one sample at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(batch[0])):
        if again is not None:
            again()
        own = loss(model, *(column[i : i + 1] for column in batch))
        grads = torch.autograd.grad(own, parameters, allow_unused=True)
        norm = torch.cat([g.flatten() for g in grads if g is not None]).norm()
        for held, g in zip(total, grads, strict=True):
            if g is not None:
                held += min(1.0, c / float(norm)) * g
    whole = torch.cat([t.flatten() for t in total]).norm()
    assert whole > 0
    for found, own in zip(sums, total, strict=True):
        assert float((found - own).norm()) <= 1e-8 * float(whole)
