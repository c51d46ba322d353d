"""What is set on the private model is set where its forward reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import backward, make_private, relative_error, sample_loss
from tests.refusal import refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(3))
        self.beta, self._shift, self.batch_first, self.limit_ = 0.0, 0.0, None, 9.0

    @property
    def limit(self) -> float:
        return self.limit_

    @limit.setter
    def limit(self, value: float) -> None:
        self.limit_ = value

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.body(x) * (1 + self.beta) + self._shift) * self.scale
        return h.clamp(max=self.limit) + (0.0 if self.batch_first is None else 1.0)


def as_it_was(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("copied", [as_it_was, copy.deepcopy], ids=["model", "copy"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("beta", 5.0), ("_shift", 2.0), ("scale", torch.full((3,), 0.5)), ("limit", 0.1)],
)
def test_an_attribute_of_the_model(name: str, value: Any, copied: Callable) -> None:
    torch.manual_seed(0)
    bare, x = Net(), torch.randn(4, 6)
    private = copied(make_private(copy.deepcopy(bare))[1])
    before = private(x)
    setattr(private, name, value)
    setattr(bare, name, value)
    assert torch.equal(private(x), bare(x))
    assert not torch.equal(private(x), before)
    assert name not in vars(private)
    backward(private, x)


def test_what_is_set_trains_exactly() -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(4, 6, dtype=torch.float64)
    other = copy.deepcopy(model)
    other.beta = 5.0
    bare, found = copy.deepcopy(other), []
    for one in (model, other):
        _, private, optimizer, _ = make_private(one)
        backward(private, x)
        optimizer.zero_grad()
        private.beta = 5.0
        backward(private, x)
        found.append(optimizer.per_sample_norms)
    assert relative_error(*found) <= 1e-12
    rows = [
        torch.autograd.grad(sample_loss(bare(row[None])).sum(), [*bare.parameters()]) for row in x
    ]
    truth = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
    assert relative_error(found[0], truth) <= 1e-10


@pytest.mark.parametrize("trained", [False, True])
def test_another_head(trained: bool) -> None:
    _, private, optimizer, _ = make_private(Net())
    x = torch.randn(4, 6)
    if trained:
        backward(private, x)
        optimizer.step()
        optimizer.zero_grad()
    private.head, private.scale = nn.Linear(5, 7), torch.ones(7)
    assert private.head is private._module.head
    with refused(r"\['head.weight', 'head.bias'\] were added to the model"):
        backward(private, x)


def test_a_part_that_is_no_private_layer() -> None:
    bare = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    private, x = make_private(copy.deepcopy(bare))[1], torch.randn(4, 6)
    setattr(private, "1", nn.Tanh())
    bare[1] = nn.Tanh()
    assert torch.equal(private(x), bare(x))


def test_what_the_wrapper_has_stays_its_own() -> None:
    model = Net()
    assert model.batch_first is None
    _, private, _, _ = make_private(model)
    assert model.batch_first is None  # of the model; the wrapper has its own
    assert private.batch_first is True
    private.batch_first = False
    private.grad_accumulation_hook = None
    private.eval()
    assert model.batch_first is None
    assert not model.training
    private.forward = private.forward
    assert "forward" not in vars(model) or vars(model)["forward"] is not vars(private)["forward"]
    private.note = 1  # which neither has
    assert not hasattr(model, "note")


class Attached(Net):
    """A property that cannot be read before it is set, as Lightning's `trainer`."""

    _owner: str | None = None

    @property
    def owner(self) -> str:
        if self._owner is None:
            raise RuntimeError("not attached")
        return self._owner

    @owner.setter
    def owner(self, value: str) -> None:
        self._owner = value


def test_a_property_that_cannot_be_read_yet() -> None:
    model = Attached()
    _, private, _, _ = make_private(model)
    private.owner = "somebody"
    assert model.owner == private.owner == "somebody"
