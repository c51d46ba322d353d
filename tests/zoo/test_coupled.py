"""Models whose rows depend on one another, on their number or on their place are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fastclip.errors import FastclipError
from tests.oracle import make_private
from tests.zoo.coupled import COUPLED, Body
from tests.zoo.member import D, Member, mean_of_rows, sequence, words


def refused(
    build: Callable[[], nn.Module], inputs: Callable[[int], Any] = sequence, way_out: str = ""
) -> None:
    """The first steps raise an error of fastclip."""
    member = Member("coupled", "coupled", build, inputs)

    def train() -> None:
        _, private, optimizer, _ = make_private(member.model())
        for seed in range(2):
            optimizer.zero_grad()
            mean_of_rows(private, member.batch(4, seed)).backward()
            optimizer.step()

    with pytest.raises(FastclipError, match=way_out):
        train()


@pytest.mark.parametrize("name", COUPLED)
def test_coupled(name: str) -> None:
    refused(lambda: Body(COUPLED[name]))


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_buffers_that_learn(wrap: Callable[[nn.Module], nn.Module]) -> None:
    refused(lambda: nn.Sequential(wrap(nn.Linear(D, D))), way_out="Buffers")


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "max_norm", "sparse"])
def test_lookups_that_count(option: str) -> None:
    class Lookup(nn.Module):
        """F.embedding with the option."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(11, D)), nn.Linear(D, 3)

        def forward(self, ids: Tensor) -> Tensor:
            value = 0.5 if option == "max_norm" else True
            found = nn.functional.embedding(ids, self.table, **{option: value})  # type: ignore[arg-type]
            return self.head(found)

    def layer() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, D, **{option: 1.0}), nn.Linear(D, 3))  # type: ignore[arg-type]

    refused(Lookup, words, "F.embedding")
    refused(layer, words)


def test_batch_norm() -> None:
    refused(
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(5)), way_out="get_compatible_module"
    )


def test_attention_over_the_batch() -> None:
    class WrongWay(nn.Module):
        """[b, t, d] into an attention that takes [t, b, d]."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    refused(WrongWay)


def test_complex_parameters() -> None:
    """Their norms and noise are not those of real numbers."""

    class Filter(nn.Module):
        """A parameter that is complex itself."""

        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(D, dtype=torch.complex128))
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.filter).abs()

    refused(Filter, way_out="real")
