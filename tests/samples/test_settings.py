"""Rows that are coupled by a setting that changes later, or by an argument, wherever it stands."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.oracle import Batch, backward, check_exact, make_private
from tests.refusal import refused

B, D = 6, 4
COUPLED = "independently of the others"


class Stage(enum.Enum):
    WARM, FULL = 1, 2


def coupled(h: Tensor) -> Tensor:
    return h - h.mean(0)


class Settings:
    on = False


class Slots:
    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


class Called(Settings):
    def __call__(self) -> bool:
        return self.on


class Switched(nn.Module):
    """Couples rows where `when` says so."""

    shared = False

    def __init__(self, when: Callable[..., Any] = lambda m: False) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(D, D), nn.Identity(), nn.Linear(D, 2)
        self.when, self.stage, self.use = when, Stage.WARM, abs
        self.table: Any = {"warm": {"on": False}}
        self.items = [0, [False]]
        self.config = SimpleNamespace(part=SimpleNamespace(on=False))
        self._private = {"on": False}
        self._object, self.called, self.slots = Settings(), Called(), Slots()
        self.names: set[str] = set()
        self.number, self.flag = numpy.bool_(False), torch.tensor(False)
        self.array = numpy.array(False)
        self.softmax = nn.Softmax(dim=-1)
        self.register_buffer("gate", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h = self.middle(torch.tanh(self.first(x)))
        return self.head(self.softmax(coupled(h) if self.when(self, *args, **kwargs) else h))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return coupled(x)


def identity(h: Tensor) -> Tensor:
    return h


LATER: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "a new attribute": (lambda m: getattr(m, "new", False), lambda m: setattr(m, "new", True)),
    "over its class": (lambda m: m.shared, lambda m: setattr(m, "shared", True)),
    "an item": (lambda m: m.table["warm"]["on"], lambda m: m.table["warm"].update(on=True)),
    "a new item": (lambda m: "on" in m.table, lambda m: m.table.update(on=1)),
    "another table": (lambda m: "on" in m.table, lambda m: setattr(m, "table", {"on": 1})),
    "a list": (lambda m: m.items[1][0], lambda m: m.items.__setitem__(1, [True])),
    "a shorter list": (lambda m: not m.items[1], lambda m: m.items[1].pop()),
    "an array of one number": (lambda m: m.array.item(), lambda m: m.array.fill(True)),
    "an object": (lambda m: m.config.part.on, lambda m: setattr(m.config.part, "on", True)),
    "an enum": (lambda m: m.stage is Stage.FULL, lambda m: setattr(m, "stage", Stage.FULL)),
    "a function": (lambda m: m.use is identity, lambda m: setattr(m, "use", identity)),
    "a buffer": (lambda m: m.gate > 0, lambda m: m.gate.fill_(1.0)),
    "another buffer": (lambda m: m.gate > 0, lambda m: setattr(m, "gate", torch.ones(()))),
    "frozen": (
        lambda m: m.frozen > 0,
        lambda m: m.load_state_dict({**m.state_dict(), "frozen": torch.ones(())}),
    ),
    "a private item": (lambda m: m._private["on"], lambda m: m._private.update(on=True)),
    "a private object": (lambda m: m._object.on, lambda m: setattr(m._object, "on", True)),
    "an object that is called": (lambda m: m.called(), lambda m: setattr(m.called, "on", True)),
    "a slot": (lambda m: m.slots.on, lambda m: setattr(m.slots, "on", True)),
    "a set": (lambda m: "on" in m.names, lambda m: m.names.add("on")),
    "NumPy's": (lambda m: m.number, lambda m: setattr(m, "number", numpy.bool_(True))),
    "a tensor": (lambda m: m.flag, lambda m: m.flag.fill_(True)),
    "another tensor": (lambda m: m.flag, lambda m: setattr(m, "flag", torch.tensor(True))),
    "a dimension": (lambda m: False, lambda m: setattr(m.softmax, "dim", 0)),
    "a forward": (
        lambda m: False, lambda m: setattr(m.softmax, "forward", coupled),
    ),
    "a part": (lambda m: False, lambda m: setattr(m, "middle", Centred())),
    "a hook": (
        lambda m: False, lambda m: m.first.register_forward_hook(lambda m, x, out: coupled(out)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("late", [1, 40])
@pytest.mark.parametrize("case", LATER)
@pytest.mark.one_in(6)
def test_a_setting_that_changes(case: str, late: int) -> None:
    """At once, also where a counter has moved all the time."""
    when, change = LATER[case]
    model = Switched(when)
    private, optimizer = make_private(model)[1:3]
    for count in range(late):
        optimizer.zero_grad()
        backward(private, torch.randn(B, D))
        model.steps = count
    change(model)
    with refused(COUPLED):
        private(torch.randn(B, D))


def test_an_attribute_of_the_class() -> None:
    class Own(Switched):
        pass

    private = make_private(Own(lambda m: getattr(m, "late", False)))[1]
    private(torch.randn(B, D))
    Own.late = True  # type: ignore[attr-defined]
    with refused(COUPLED):
        private(torch.randn(B, D))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Batch(), Batch(kwargs={"on": True})),
        (Batch((False,)), Batch((True,))),
        (Batch(kwargs={"on": 0.0}), Batch(kwargs={"on": 0.5})),
        (Batch(kwargs={"on": ""}), Batch(kwargs={"on": "coupled"})),
        (Batch((None,)), Batch((torch.ones(()),))),
        (Batch((torch.tensor(False),)), Batch((torch.tensor(True),))),
        (Batch((torch.tensor(0),)), Batch((torch.tensor(7),))),
        (Batch(), Batch(({"on": 1},))),
    ],
)
def test_an_argument(first: Batch, second: Batch) -> None:
    model = Switched(lambda m, on=False: isinstance(on, dict) or (on is not None and bool(on)))
    private = make_private(model)[1]
    for _ in range(20):
        private(torch.randn(B, D), *first.args, **first.kwargs)
    with refused(COUPLED):
        private(torch.randn(B, D), *second.args, **second.kwargs)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("first", [3, 20])
def test_longer_rows(first: int, axis: int) -> None:
    """A model may take another way for long rows, as attention in pieces does."""

    class OfTime(Switched):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x.transpose(0, axis), x.shape[1 - axis]).transpose(0, axis)

    private = make_private(OfTime(lambda m, t: (t > 8) != (first > 8)), batch_first=not axis)[1]
    private(torch.randn(B, first, D).transpose(0, axis))
    with refused(COUPLED):
        private(torch.randn(B, 23 - first, D).transpose(0, axis))


def test_ways_to_call_that_take_turns() -> None:
    """Each is looked at once, and the samples of each are found."""
    looks: list[int] = []
    model = Switched(lambda m, positions=None, on=None: False)
    model.middle.register_forward_pre_hook(lambda module, args: looks.append(len(args[0])))
    private, optimizer = make_private(model)[1:3]
    for count in range(60):
        optimizer.zero_grad()
        given: dict[str, Any] = [{}, {"on": torch.zeros(3)}, {"positions": torch.ones(1, D)}][
            count % 3
        ]
        backward(private, Batch((torch.randn(9, D),), given))
    assert len(looks) <= 60 + 3 * 13
    check_exact(Switched(), Batch((torch.randn(B, D),)), dtype=torch.float64)


@pytest.mark.parametrize("kind", [bool, int])
def test_a_setting_that_changed_in_a_call_of_another_way(kind: type) -> None:
    """It is a state that this way of calling was not looked at in."""
    model = Switched(lambda m, other=None: other is None and m.items[0])
    model.items[0] = kind(False)
    private, x = make_private(model)[1], torch.randn(B, D)
    private(x)
    model.items[0] = kind(True)
    private(x, other=x)
    with refused(COUPLED):
        private(x)


def taking_turns(m: Any, step: int) -> None:
    m.first.requires_grad_(step % 2 == 0)
    m.head.requires_grad_(step % 2 == 1)


MOVES: dict[str, Callable[[Any, int], Any]] = {
    "an average of weights": lambda m, step: m.frozen.lerp_(m.first.bias.detach().mean(), 0.1),
    "a buffer": lambda m, step: m.gate.add_(1),
    "another buffer": lambda m, step: setattr(m, "gate", torch.rand(())),
    "turns of training": taking_turns,
    "a list that grows": lambda m, step: m.items[1].append(step),
    "a table that grows": lambda m, step: m.table.update({str(step): 0.5 * step}),
    "another list": lambda m, step: setattr(m, "items", [0, [False, *range(step)]]),
    "another object": lambda m, step: setattr(m, "config", SimpleNamespace(last=step, on=True)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", MOVES)
def test_what_moves_in_every_step(case: str) -> None:
    """Sixteen times it is looked at, then at doublings; what has not moved, at once."""
    calls: list[int] = []
    model = Switched(lambda m: "coupled" in m.items or m.stage is Stage.FULL)
    model.middle.register_forward_pre_hook(lambda module, args: calls.append(1))
    private, optimizer = make_private(model)[1:3]
    looked = []
    for number in range(40):
        optimizer.zero_grad()
        calls.clear()
        backward(private, torch.randn(B, D))
        looked += [number] * (len(calls) > 1)
        optimizer.step()
        MOVES[case](model, number)
    assert looked[:17] == [*range(17)]
    assert set(looked[17:]) <= {17, 32}
    model.items = [*model.items, "coupled"]
    with refused(COUPLED):
        private(torch.randn(B, D))


def test_parts_that_are_frozen_together_after_they_have_taken_turns() -> None:
    model = Switched(lambda m: not m.first.weight.requires_grad and not m.head.weight.requires_grad)
    private, optimizer = make_private(model)[1:3]
    for number in range(40):
        optimizer.zero_grad()
        backward(private, torch.randn(B, D))
        taking_turns(model, number)
    model.first.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    with refused(COUPLED):
        private(torch.randn(B, D))


def test_a_copy_looks_for_itself() -> None:
    private = make_private(Switched())[1]
    private(torch.randn(B, D))
    twin = copy.deepcopy(private)
    twin(torch.randn(B, D))
    twin._module.middle = Centred()
    with refused(COUPLED):
        twin(torch.randn(B, D))
    private(torch.randn(B, D))


def test_what_cells_of_opacus_note_of_a_batch_is_no_setting() -> None:
    """How many samples its longest step has."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = DPLSTM(D, D, batch_first=True), nn.Linear(D, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(
                pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0].sum(1)
            )

    private = make_private(Packed())[1]
    for size in (B, B - 1, B - 2, B - 1, B - 2, B):
        backward(private, (torch.randn(size, 5, D), torch.full((size,), 5)))
    assert len(private.grad_state.calls.looks) <= 2  # at first, and at one of a loop over samples
