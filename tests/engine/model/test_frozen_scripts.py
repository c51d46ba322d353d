"""Frozen parts in TorchScript, and tensors of other layouts on their way into a layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.apart import check_exact_as_it_is, step
from tests.oracle import make_private
from tests.refusal import refused

D = 4


class Taught(nn.Module):
    """A layer beside a frozen part, or a use of its weight."""

    def __init__(self, use: Callable[[Taught, Tensor], Tensor], part: nn.Module | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.part, self.use = nn.Linear(D, D), part, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Normalized(nn.Module):
    """Of whose BatchNorm the mode decides what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def batch() -> Tensor:
    return torch.randn(5, D, generator=torch.Generator().manual_seed(1))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh()).requires_grad_(False).eval()


def taught(m: Taught, x: Tensor) -> Tensor:
    h = m.lin(x)
    return h + m.part(h)


SCRIPTS: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: torch.jit.script(frozen()),
    "trace": lambda: torch.jit.trace(frozen(), batch()),
    "frozen script": lambda: torch.jit.freeze(torch.jit.script(frozen())),
}


@pytest.mark.parametrize("name", ["script", "trace"])
def test_a_frozen_script(name: str) -> None:
    check_exact_as_it_is(Taught(taught, SCRIPTS[name]()), batch())


def test_a_script_without_parameters_left() -> None:
    """Which cannot be copied."""
    _, private, optimizer, _ = make_private(Taught(taught, SCRIPTS["frozen script"]()))
    for _ in range(2):
        step(private, optimizer, batch())


def test_a_frozen_script_that_begins_to_look_at_the_batch() -> None:
    script = torch.jit.script(Normalized().requires_grad_(False).eval())
    _, private, optimizer, _ = make_private(Taught(taught, script))
    script.eval()
    step(private, optimizer, batch())
    script.train()
    with refused("change in the forward pass"):
        step(private, optimizer, batch())


@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_rows(sparse: Callable[[Tensor], Tensor]) -> None:
    check_exact_as_it_is(Taught(lambda m, x: sparse(x) @ m.lin.weight.T, None), batch())


def test_nested_rows() -> None:
    def nested(m: Taught, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([row.view(1, D) for row in x])
        return torch.nested.to_padded_tensor(m.lin(rows), 0.0)

    _, private, optimizer, _ = make_private(Taught(nested, None))
    with refused("nested tensor.*to_padded_tensor"):
        step(private, optimizer, batch())
