"""Rows in objects of a script's own are opened, and cut like those in dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import assert_sums, clipped_sum, make_private, sample_loss, summed
from tests.refusal import refused

B, T, D = 6, 5, 4


@dataclass(slots=True)
class Slotted:
    lengths: Any


@dataclass(frozen=True)
class Frozen:
    lengths: Any


class Plain:
    def __init__(self, lengths: Any) -> None:
        self.lengths, self.name, self._again = lengths, "lengths", self


class Bare:
    __slots__ = ("__held", "unset")

    def __init__(self, lengths: Any) -> None:
        self.__held = lengths

    @property
    def lengths(self) -> Any:
        return self.__held


class Outer:
    def __init__(self, lengths: Any) -> None:
        self.inner = {"it": Plain(lengths)}

    @property
    def lengths(self) -> Any:
        return self.inner["it"].lengths


KINDS: list[Callable[..., Any]] = [Slotted, Frozen, Plain, Bare, Outer, SimpleNamespace]


class Pooled(nn.Module):
    """Pools rows by their own lengths, or as far as the longest."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(D, 3), own

    def forward(self, x: Tensor, about: Any) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.own:
            each = zip(h, about.lengths, strict=True)
            return torch.stack([row[: int(n)].mean(0) for row, n in each])
        return h[:, : int(max(about.lengths))].mean(1)


@pytest.mark.parametrize("of", [torch.tensor, list])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_in_an_object(kind: Callable[..., Any], of: Callable[..., Any]) -> None:
    x, lengths = torch.randn(B, T, D, dtype=torch.float64), [5, 2, 2, 3, 2, 1]
    model = Pooled(own=True).double()
    params = dict(model.named_parameters())
    sizes, own = (B, 4, B), []
    for n in sizes:
        each = []
        for i in range(n):
            loss = sample_loss(model(x[i : i + 1], kind(lengths=of(lengths[i : i + 1])))).sum()
            each.append(torch.autograd.grad(loss, list(params.values())))
        own.append(
            {p: torch.stack(g) for p, g in zip(params, zip(*each, strict=True), strict=True)}
        )
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for n, grads in zip(sizes, own, strict=True):
        optimizer.zero_grad()
        about = kind(lengths=of(lengths[:n]))
        held = about.lengths
        sample_loss(private(x[:n], about)).mean().backward()
        assert about.lengths is held
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-10)
    private = make_private(Pooled(own=False).double())[1]
    with refused("independently of the others"):
        private(x, kind(lengths=of(lengths)))


class Settings:
    """Holds no rows, and is passed as it is."""

    def __init__(self) -> None:
        self.scale, self.names, self.part = 2.0, {"a": 1}, nn.Linear(1, 1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)
        self.met: set[int] = set()

    def forward(self, x: Tensor, settings: Settings) -> Tensor:
        self.met.add(id(settings))
        return self.layer(x) * settings.scale


def test_settings_are_not_taken_apart() -> None:
    model, settings = Scaled(), Settings()
    private = make_private(model)[1]
    sample_loss(private(torch.randn(B, D), settings)).mean().backward()
    assert model.met == {id(settings)}


class Images:
    """The only input."""

    def __init__(self, tensors: Tensor) -> None:
        self.tensors = tensors


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, images: Images) -> Tensor:
        return self.layer(images.tensors)


def test_an_object_alone() -> None:
    _, private, optimizer, _ = make_private(Network())
    sample_loss(private(Images(torch.randn(B, D)))).mean().backward()
    assert len(optimizer.per_sample_norms) == B
