"""A parameter seen in several shapes: views of it may have nothing in common but its entries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.ops.dispatch import use_backend
from tests.oracle import check_exact

SHAPES = [((4, 6), (6, 4)), ((4, 6), (4, 6)), ((24, 1), (1, 24)), ((2, 12), (4, 6))]


class TwoLayers(nn.Module):
    """Two linear maps whose weights are views of one parameter."""

    def __init__(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        super().__init__()
        self.weight, self.shapes = nn.Parameter(torch.randn(24)), (first, second)
        self.middle = nn.Linear(first[0], second[1])

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.weight.view(shape) for shape in self.shapes)
        return F.linear(self.middle(F.linear(x, first).tanh()), second)


class TwoProducts(nn.Module):
    """Two einsums with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("btd,hkd->bthk", x, self.weight).tanh().sum(3)
        return torch.einsum("bth,hkd->btkd", heads, self.weight)


class TableAndHead(nn.Module):
    """Rows of a table, whose numbers are those of a head of another shape."""

    def __init__(self, table: tuple[int, ...], head: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48))
        self.table, self.head = table, head
        self.middle = nn.Linear(torch.Size(table[1:]).numel(), head[1])

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.view(self.table)[ids].flatten(2)
        return F.linear(self.middle(rows), self.weight.view(self.head))


class TwoTables(nn.Module):
    """Two tables of other widths, of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24))

    def forward(self, ids: Tensor) -> Tensor:
        wide, narrow = (F.embedding(ids, self.weight.view(6, n)) for n in (4, 4))
        return torch.cat([wide, narrow, F.embedding(ids, self.weight.view(12, 2))], -1)


class PointwiseAndLinear(nn.Module):
    """A convolution, and a linear map with its weights in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv(x).flatten(2).mT  # [b, t, 6]
        return F.linear(rows.tanh(), self.conv.weight.view(4, 6))


MODELS = {
    **{f"layers {a} {b}": (lambda a=a, b=b: TwoLayers(a, b), (5, 3, a[1])) for a, b in SHAPES},
    "products": (TwoProducts, (5, 3, 4)),
    "pointwise": (PointwiseAndLinear, (5, 4, 3, 2)),
}
TABLES = {
    "rows of matrices": lambda: TableAndHead((6, 2, 4), (12, 4)),
    "another width": lambda: TableAndHead((12, 4), (24, 2)),
    "the same": lambda: TableAndHead((12, 4), (12, 4)),
    "two tables": TwoTables,
}


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("name", MODELS)
def test_linear_maps(name: str, backend: str) -> None:
    build, shape = MODELS[name]
    with use_backend(backend):
        check_exact(build(), torch.randn(shape), dtype=torch.float64)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, backend: str) -> None:
    with use_backend(backend):
        check_exact(TABLES[name](), torch.randint(6, (5, 3)), dtype=torch.float64)
