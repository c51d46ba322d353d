"""What a refusal says of set-ups that are refused for something simple."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import make_private
from tests.refusal import refused

B, D = 6, 4


class Held:
    """Of an object that can be called nobody knows what it is made of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self) -> Tensor:
        return self.x


class Reads(nn.Module):
    def __init__(self, read: Callable[[object], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(D, 2), read

    def forward(self, given: object) -> Tensor:
        return self.layer(self.read(given))


@pytest.mark.parametrize(
    ("given", "read", "told"),
    [
        (Held(torch.randn(B, D)), lambda given: given.x, "object of class Held"),
        (torch.eye(B, D).to_sparse(), lambda given: given.to_dense(), "layout torch.sparse_coo"),
    ],
    ids=["an object", "sparse"],
)
def test_inputs_without_rows(given: object, read: Callable[[object], Tensor], told: str) -> None:
    with refused(told):
        make_private(Reads(read))[1](given)


class Uncertain(nn.Module):
    """Weighs its loss by a parameter, before or after the mean."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.layer, self.s, self.after = nn.Linear(D, 3), nn.Parameter(torch.tensor(0.3)), after

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(self.layer(x), labels, reduction="none")
        if self.after:
            return torch.exp(-self.s) * losses.mean() + self.s
        return (torch.exp(-self.s) * losses + self.s).mean()


def test_a_parameter_after_the_mean() -> None:
    x, labels = torch.randn(B, D), torch.arange(B) % 3
    make_private(Uncertain(False))[1](x, labels).backward()
    with refused("before the mean"):
        make_private(Uncertain(True))[1](x, labels).backward()


class Unique(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, D), nn.Linear(D, 2)

    def forward(self, ids: Tensor) -> Tensor:
        own, inverse = ids.unique(return_inverse=True)
        return self.head(self.table(own)[inverse].mean(1).tanh())


def test_ids_made_unique() -> None:
    with refused("look the ids up directly"):
        make_private(Unique())[1](torch.randint(0, 9, (B, 5)))


class TimeFirst(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0] if hasattr(self.layer, "num_heads") else self.layer(x)[0]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.MultiheadAttention])
def test_samples_along_axis_1(layer: type[nn.Module]) -> None:
    with refused(r"pass batch_first=False to make_private"):
        make_private(TimeFirst(layer(D, 2)))[1](torch.randn(5, B, D))
    make_private(TimeFirst(layer(D, 2)), batch_first=False)[1](torch.randn(5, B, D))
