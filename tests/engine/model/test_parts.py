"""Parts of a model, and their methods, that a script calls by themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fastclip.errors import FastclipError
from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused

B, T, D = 5, 3, 4


class Block(nn.Module):
    """With a parameter of its own, that serves all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(1, D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)

    def centred(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


class CoupledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def centred(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) - self.first(x).mean(0))

    def folded(self, x: Tensor) -> Tensor:
        return self.head(self.first(x[:, None] * torch.ones(T, 1)).flatten(0, 1)).view(-1, T, D)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.block, self.bad = Net(), Block(), CoupledBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.block(self.net(x)))

    def encode(self, x: Tensor) -> Tensor:
        return self.block(x)

    def _centred(self, x: Tensor) -> Tensor:
        return self.block(x - x.mean(0))


Use = Callable[[Whole, Tensor], Tensor]

COUPLED: dict[str, Use] = {
    "method of a part": lambda m, x: m.net.centred(x),
    "method of its own": lambda m, x: m._centred(x),
    "method of a part with parameters": lambda m, x: m.block.centred(x),
    "part with parameters": lambda m, x: m.bad(x),
}
APART: dict[str, Use] = {
    "folds rows": lambda m, x: m.net.folded(x),
    "method of a part": lambda m, x: m.net.features(x),
    "method whose first part has parameters": lambda m, x: m.encode(x),
    "part with parameters": lambda m, x: m.block(x),
}


@pytest.mark.parametrize("case", COUPLED)
def test_coupled(case: str) -> None:
    model = make_private(Whole())[1]
    with refused("independently of the others"):
        COUPLED[case](model, torch.randn(B, D))


class Called(nn.Module):
    def __init__(self, model: Whole, use: Use) -> None:
        super().__init__()
        self.model, self.use = model, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.model, x)


@pytest.mark.parametrize("case", APART)
def test_apart_is_exact(case: str) -> None:
    model, x = Whole().double(), torch.randn(B, D).double()
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    grads = per_sample_gradients(Called(model, APART[case]), x, names=names)
    params = {f"model.{name}": p for name, p in model.named_parameters()}
    private = make_private(model, max_grad_norm=0.5)[1]
    sample_loss(APART[case](private, x)).mean().backward()
    assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-10)


def test_methods_look_as_they_did() -> None:
    """Transformers count the parameters of their own methods."""
    model = Whole()
    names = ["encode", "_centred"]
    before = [inspect.signature(getattr(model, name)) for name in names]
    private = make_private(model)[1]
    assert [inspect.signature(getattr(private, name)) for name in names] == before
    assert private.net.features.__name__ == "features"


def test_a_packed_part_by_itself() -> None:
    """A recurrent layer of Opacus' that is called outside its model is looked at, and runs."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = DPLSTM(D, D, batch_first=True), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0].mean(1))

    private = make_private(Reader())[1]
    lengths = torch.tensor([3, 1, 2, 3, 2])
    packed = pack_padded_sequence(
        torch.randn(B, T, D), lengths, batch_first=True, enforce_sorted=False
    )
    try:
        _, (state, _) = private.lstm(packed)
        private.head(state[0]).square().mean().backward()
    except FastclipError as error:
        pytest.fail(str(error))
