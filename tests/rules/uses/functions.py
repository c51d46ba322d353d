"""A model made of a function of parameters and a batch, held against one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from fastclip.rules.recompute import RecomputeUse
from tests.oracle import backward, check_exact, make_private

B, T, D = 4, 5, 6

Function = Callable[[Sequence[Tensor], Tensor], Tensor]


class Model(nn.Module):
    """function(parameters, x) between two linear layers.

    Args:
        shapes: of the parameters. features: of x, and of what the function returns.
    """

    def __init__(self, function: Function, *shapes: tuple[int, ...], features: int = D) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes
        )
        self.function = function
        self.before = nn.Linear(features, features, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(list(self.weights), self.before(x)).tanh()


def batch(*shape: int) -> Tensor:
    """Numbers of this shape, B rows of [T, D] if none is given."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape or (B, T, D), generator=generator, dtype=torch.float64)


@contextmanager
def no_replay() -> Iterator[None]:
    """The functions inside have rules of their own: nothing is called again for every sample."""

    def refused(self: RecomputeUse, use: object) -> None:
        raise AssertionError("the generic rule was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecomputeUse, "records", refused)
        yield


def check_rule(
    function: Function, *shapes: tuple[int, ...], x: Tensor | None = None, empty: bool = True
) -> None:
    """Exact in float64 and float32, for one row and for none, without the generic rule."""
    x = batch() if x is None else x
    model = Model(function, *shapes, features=x.shape[-1])
    with no_replay():
        check_exact(model, x, dtype=torch.float64)
        check_exact(model, x, dtype=torch.float32)
        check_exact(model, x[:1], dtype=torch.float64, C=0.1)
        if not empty:
            return
        _, private, optimizer, _ = make_private(model)
        backward(private, x)
        optimizer.step()
        optimizer.zero_grad()
        backward(private, x[:0], loss_reduction="sum")
        for weight in model.weights:
            assert weight.summed_grad is None or not weight.summed_grad.any()


def check_autocast(function: Function, *shapes: tuple[int, ...], x: Tensor | None = None) -> None:
    """Under bfloat16 autocast as near to float64 as its rounding."""
    x = batch() if x is None else x

    class Cast(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
                return super().forward(x).to(x.dtype)

    model = Cast(function, *shapes, features=x.shape[-1])
    with no_replay():
        check_exact(model, x, dtype=torch.float32, tol=0.05, norm_tol=0.05)
