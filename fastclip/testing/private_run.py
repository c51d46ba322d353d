"""One private backward pass over a batch, as a training loop would make it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip.engine import FastPrivacyEngine
from fastclip.errors import FastclipError
from fastclip.planner import Planner
from fastclip.planner.report import Plan
from fastclip.testing.randomness import own_randomness


@contextmanager
def quietly() -> Iterator[None]:
    """Without Opacus' word on random numbers: nothing that a check computes is released."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        yield


@dataclass(frozen=True)
class PrivateRun:
    """What one private backward pass has left."""

    loss: float
    norms: Tensor | None
    """Of the samples' gradients, [b]; None where no sample has contributed."""
    sums: dict[str, Tensor | None]
    """Clipped sums by parameter; None for one that got none."""
    leaked: tuple[str, ...]
    """Parameters that got an ordinary gradient, which nobody has clipped."""
    plan: Plan


def private_run(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], samples: int, *, max_grad_norm: float,
    batch_first: bool = True, loss_reduction: str = "mean", planner: Planner | None = None,
) -> PrivateRun:  # fmt: skip
    """Make the model private without noise, and differentiate one loss.

    Args:
        model: a copy to be used up.
        loss: model -> the loss of the batch.
        samples: of the batch. The rest: as for make_private.

    Raises:
        fastclip.errors.*: what the engine refuses.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = torch.zeros(max(samples, 1), 1, dtype=torch.float32, device="cpu")
    with own_randomness(0), quietly():
        engine = FastPrivacyEngine(planner=planner)
        private, optimizer, _ = engine.make_private(
            module=model, optimizer=torch.optim.SGD(named.values(), lr=0.1),
            data_loader=DataLoader(TensorDataset(rows), batch_size=len(rows)), noise_multiplier=0.0,
            max_grad_norm=max_grad_norm, poisson_sampling=False, batch_first=batch_first,
            loss_reduction=loss_reduction,
        )  # fmt: skip
        value = loss(private)
        value.backward()
    return PrivateRun(
        float(value.detach()),
        optimizer.per_sample_norms,
        {name: getattr(p, "summed_grad", None) for name, p in named.items()},
        tuple(name for name, p in named.items() if p.grad is not None),
        engine.plan(),
    )


def refusal_of(run: Callable[[], Any]) -> str | None:
    """The sentence with which the engine refuses, or how it fails; None where it does neither."""
    try:
        run()
    except (FastclipError, UnsupportedModuleError) as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return None
