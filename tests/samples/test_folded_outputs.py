"""Outputs in which positions are folded with the samples: logits [b * t, v], whichever comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apart import D, Hidden, T
from tests.oracle import make_private, relative_error
from tests.refusal import refused

Use = Callable[[Tensor], Tensor]


class Folded(Hidden):
    """Returns a number a class for every position, all in one axis."""

    def __init__(self, last: Use, *, time_first: bool) -> None:
        super().__init__(lambda m, h: h, "nothing")
        self.last, self.time_first = last, time_first

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.second(torch.tanh(self.first(x))))
        return (out.transpose(0, 1) if self.time_first else out).reshape(-1, D)

    def losses(self, out: Tensor) -> Tensor:
        """Of the rows, [b]."""
        out = out.view(T, -1, D).transpose(0, 1) if self.time_first else out.view(-1, T, D)
        return out.flatten(1).cos().sum(1)


COUPLED: dict[str, Use] = {
    "centred": lambda h: h - h.mean(0),
    "a little": lambda h: h - 1e-7 * h.mean(0),
    "detached": lambda h: h / h.detach().abs().max(),
    "other places": lambda h: h + h.roll(1, 0),
    "number of rows": lambda h: h / len(h),
    "by the number": lambda h: h * torch.arange(len(h))[:, None, None],
}


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("case", COUPLED)
def test_coupled_behind_the_last_layer(case: str, time_first: bool) -> None:
    private = make_private(Folded(COUPLED[case], time_first=time_first).double())[1]
    with refused("computed from itself alone|row of the batch alike"):
        private(torch.randn(8, T, D, dtype=torch.float64))


@pytest.mark.parametrize("b", [1, 2, 8])
@pytest.mark.parametrize("time_first", [False, True])
def test_apart_is_exact(time_first: bool, b: int) -> None:
    model: Any = Folded(lambda h: h * h.mean(1, keepdim=True), time_first=time_first).double()
    x = torch.randn(b, T, D, dtype=torch.float64)
    used = [*model.first.parameters(), *model.second.parameters()]
    expected = 0.0
    for row in x:
        grads = torch.autograd.grad(model.losses(model(row[None])).sum(), used)
        norm = nn.utils.get_total_norm(grads)
        expected = expected + torch.cat([g.flatten() for g in grads]) / max(1.0, float(norm))
    _, private, optimizer, _ = make_private(model, optimizer_params=used)
    model.losses(private(x)).mean().backward()
    found = torch.cat([p.summed_grad.flatten() for p in used])
    assert relative_error(found, expected) < 1e-10
    optimizer.step()


SELECTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mask": lambda h, x: h[x[..., 0] > 0],
    "end to end": lambda h, x: torch.cat(
        [row[: int(n)] for row, n in zip(h, (x[..., 0] > 0).sum(1), strict=True)]
    ),
}
"""Rows of which nobody says whose they are."""
BEHIND: dict[str, Use] = {
    "nothing": lambda z: z,
    "itself": lambda z: z / z.norm(dim=1, keepdim=True),
}
ACROSS: dict[str, Use] = {
    "centred": lambda z: z - z.mean(0),
    "scaled": lambda z: z / z.std(),
    "detached": lambda z: z / z.detach().abs().max(),
    "columns": lambda z: nn.functional.normalize(z, dim=0),
}


class Selected(Folded):
    """Returns rows that a mask selects."""

    def __init__(self, select: Callable[[Tensor, Tensor], Tensor], last: Use) -> None:
        super().__init__(last, time_first=False)
        self.select = select

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.select(self.second(torch.tanh(self.first(x))), x))


@pytest.mark.parametrize("select", SELECTED)
@pytest.mark.parametrize("case", ACROSS)
def test_selected_rows_that_are_coupled(case: str, select: str) -> None:
    model: Any = Selected(SELECTED[select], ACROSS[case]).double()
    used = [*model.first.parameters(), *model.second.parameters()]
    _, private, optimizer, _ = make_private(model, optimizer_params=used)
    with refused("depends on the other samples|from itself alone|mixes samples"):
        private(torch.randn(8, T, D, dtype=torch.float64)).cos().sum().div(8).backward()
    assert all(getattr(p, "summed_grad", None) is None for p in used)
    optimizer.zero_grad()


@pytest.mark.parametrize("b", [1, 2, 8])
@pytest.mark.parametrize("select", SELECTED)
@pytest.mark.parametrize("case", BEHIND)
def test_selected_rows_apart_are_exact(case: str, select: str, b: int) -> None:
    model: Any = Selected(SELECTED[select], BEHIND[case]).double()
    x = torch.randn(b, T, D, dtype=torch.float64)
    used = [*model.first.parameters(), *model.second.parameters()]
    expected = 0.0
    for row in x:
        grads = torch.autograd.grad(model(row[None]).cos().sum(), used)
        norm = nn.utils.get_total_norm(grads)
        expected = expected + torch.cat([g.flatten() for g in grads]) / max(1.0, float(norm))
    private = make_private(model, optimizer_params=used)[1]
    private(x).cos().sum().div(b).backward()
    found = torch.cat([p.summed_grad.flatten() for p in used])
    assert relative_error(found, expected) < 1e-10
