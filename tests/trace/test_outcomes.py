"""Questions that Python asks of the batch, and whether the answer changes what is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trace.standalone import traced


def warned(x: Tensor) -> Tensor:
    if (x == 0).any():
        warnings.warn("padding", stacklevel=1)
    return x


def twice(x: Tensor) -> Tensor:
    return warned(x) if (x > 9).any().item() else warned(x + 0)


def both(x: Tensor) -> Tensor:
    """Only two answers together have an effect."""
    one, other = bool((x > 9).any()), bool((x < -9).any())
    return x * 2 if one and other else x


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "warning": (warned, "proven"),
    "branch": (lambda x: x * 2 if (x > 9).any() else x, "path"),
    "another constant": (lambda x: x * (2.0 if (x > 9).any() else 1.0), "path"),
    "one more copy": (twice, "path"),
    "together": (both, "path"),
    "assertion": (lambda x: x if not x.isnan().any() else 1 / 0, "path"),
    "number": (lambda x: x * (1.0 + (x.mean().item() > 9)), "path"),
}


@pytest.mark.parametrize("name", CASES)
def test_outcomes(name: str) -> None:
    f, verdict = CASES[name]
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = traced(net, lambda: F.cross_entropy(net(f(x)), y), [x, y], explores=True)
    assert found.verdict == verdict, found.report
