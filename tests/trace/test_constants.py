"""Constants alongside samples: one that differs from sample to sample makes a sample's number matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trace.standalone import traced

B, N = 4, 3


def rows() -> Tensor:
    return torch.randn(B, N)


def matrices() -> Tensor:
    return torch.randn(B, N, N) + 3 * torch.eye(N)


def triangles() -> Tensor:
    x = matrices()
    return torch.linalg.cholesky(x @ x.mT)


OPERATORS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "mul": (rows, lambda h, c: h * c),
    "polar": (rows, lambda h, c: torch.polar(h, c).real),
    "complex": (rows, lambda h, c: torch.complex(h, c).abs()),
    "cross": (rows, lambda h, c: torch.linalg.cross(h, c)),
    "searchsorted": (
        lambda: rows().sort(-1)[0],
        lambda h, c: h * torch.searchsorted(c, h.detach().contiguous()),
    ),
    "bmm": (matrices, lambda h, c: torch.bmm(c, h[..., None])),
    "solve": (matrices, lambda h, c: torch.linalg.solve(c, h[..., None])),
    "lu_solve": (
        matrices, lambda h, c: torch.linalg.lu_solve(*torch.linalg.lu_factor(c), h[..., None]),
    ),
    "solve_triangular": (
        triangles, lambda h, c: torch.linalg.solve_triangular(c, h[..., None], upper=False),
    ),
    "cholesky_solve": (triangles, lambda h, c: torch.cholesky_solve(h[..., None], c)),
}  # fmt: skip


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_constant_that_differs_by_sample(name: str, differs: bool) -> None:
    torch.manual_seed(0)
    made, operator = OPERATORS[name]
    constant, layer, x = made(), nn.Linear(N, N), rows()
    if not differs:
        constant = constant[:1].expand_as(constant).clone()

    def step() -> Any:
        return operator(layer(x), constant).square().sum()

    verdict = traced(layer, step, [], before=lambda tracer: tracer.seed(x, 0)).verdict
    assert (verdict == "coupled") == differs
