"""What a look costs and leaves, and models that must not be refused for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.apart import B, D, Hidden, LatePositions, T, Use, step
from tests.oracle import (
    Batch,
    check_exact,
    make_private,
)
from tests.refusal import refused


class Dropping(nn.Module):
    """Functional dropout, stochastic depth of rows, and a layer that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.3, self.training)
        keep = torch.rand(len(h), 1, 1, dtype=h.dtype) > 0.3
        h = h + keep * torch.tanh(h)
        if torch.rand(()) > 0.5:
            h = self.extra(h)
        return self.head(h).mean(1)


def test_random_parts_are_no_coupling() -> None:
    private, optimizer = make_private(Dropping())[1:3]
    for _ in range(8):  # the layer that is left out is met at some time
        step(private, optimizer, torch.randn(B, T, D))


def test_a_layer_for_large_batches_alone() -> None:
    """What a row becomes depends on how many there are."""

    def use(m: nn.Module, h: Tensor) -> Tensor:
        return m.second(h) if len(h) > 8 else h

    private = make_private(Hidden(use, "nothing"))[1]
    with refused("independently of the others"):
        private(torch.randn(9, T, D))


@pytest.mark.parametrize("b", [1, 2, 3, 4, 6, 8])
def test_rows_that_are_coupled_in_batches_of_this_size(b: int) -> None:
    private = make_private(Hidden(lambda m, h: h - 0.1 * h.mean() * (len(h) == b), "nothing"))[1]
    with refused("independently of the others"):
        private(torch.randn(b, T, D))


def test_looks_are_few() -> None:
    """Two traced forward passes of few rows and one of the batch's size."""
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2))
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    inner = LatePositions(2)
    inner.on, inner.first = True, model
    inner.head = nn.Linear(2, 2)
    inner.table = nn.Embedding(9, 2)
    private, optimizer = make_private(inner)[1:3]
    step(private, optimizer, torch.randn(16, T, D))
    assert seen[-1] == 16
    assert len(seen) <= 4
    assert [b for b in seen if b > 8] == [16, 16]
    seen.clear()
    for b in (16, 32, 5, 1):
        step(private, optimizer, torch.randn(b, T, D))
    assert seen == [16, 32, 5, 1]


class Part(nn.Sequential):
    """A class of one's own: it may be called by itself, so it is told whose part it is."""


def test_what_fastclip_keeps_on_a_model_is_no_setting() -> None:
    part, seen = Part(nn.Linear(D, D), nn.ReLU()), []
    part.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    private, optimizer = make_private(nn.Sequential(part, nn.Linear(D, 2)))[1:3]
    step(private, optimizer, torch.randn(B, D))
    seen.clear()
    private(torch.randn(B, D))  # a pass that comes to nothing
    for b in (B, 2, B - 1):
        step(private, optimizer, torch.randn(b, D))
    assert seen == [B, B, 2, B - 1]


def test_nothing_of_a_look_is_held() -> None:
    """Softmax saves its own output: a graph that holds it with its graph is never freed."""
    seen: list[weakref.ref] = []

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).softmax(-1)
            seen.append(weakref.ref(h))
            return self.second(h)

    private, optimizer = make_private(Saves())[1:3]
    step(private, optimizer, torch.randn(B, D))
    gc.collect()
    assert len(seen) >= 3
    assert [ref for ref in seen if ref() is not None] == []


def test_what_a_forward_pass_leaves_on_modules_is_put_back() -> None:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.count = getattr(self, "count", 0) + 1
            self.total += len(x)
            self.seen.append(len(x))
            self.last = x
            return self.layer(self.last)

    model, x = Stash(), torch.randn(B, D)
    model.total, model.seen = torch.zeros(()), []
    with torch.inference_mode():
        model.earlier = torch.zeros(3)
    make_private(model)[1](x)
    assert model.count == 1
    assert model.last is x
    assert (model.total, model.seen) == (B, [B])


def test_shared_ids_and_a_late_branch_with_packed_rows() -> None:
    """A batch whose inputs hold ids for all rows at once, of the batch's size by accident."""
    model = LatePositions(1).double()
    model.on = True
    check_exact(model, Batch((torch.randn(5, 5, D),)), dtype=torch.float64, C=0.05)


class WantsPlainInputs(nn.Module):
    """Does to its input what cannot be done to one whose gradient is asked for."""

    def __init__(self, how: str, use: Use) -> None:
        super().__init__()
        self.how, self.inner = how, Hidden(use, "nothing")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "numpy":
            assert x.numpy().ndim == 3
        if self.how == "requires_grad":  # as transformers' Wav2Vec2 does
            x.requires_grad = True
        return self.inner(x)


@pytest.mark.parametrize("how", ["numpy", "requires_grad"])
def test_models_that_want_plain_inputs(how: str) -> None:
    """They train; what is coupled behind their first layer is still refused."""
    private, optimizer = make_private(WantsPlainInputs(how, lambda m, h: m.second(h)))[1:3]
    for _ in range(2):
        step(private, optimizer, torch.randn(B, T, D))
    coupled = make_private(WantsPlainInputs(how, lambda m, h: h - 3e-5 * h.mean(0)))[1]
    with refused("independently"):
        coupled(torch.randn(B, T, D))
