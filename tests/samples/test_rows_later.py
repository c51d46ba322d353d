"""Rows that are not apart are found whenever they come: another batch, mode, flag or branch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.apart import B, D, Hidden, LatePositions, T, step
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused


class Branching(nn.Module):
    """Couples rows where its flag is up, in training mode alone, or from some call on."""

    def __init__(self, when: Callable[[Branching], bool]) -> None:
        super().__init__()
        self.first, self.head, self.when = nn.Linear(D, D), nn.Linear(D, 2), when
        self.warm, self.calls, self.stage = False, 0, "begin"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x))
        return self.head(h - 0.5 * h.mean(0) if self.when(self) else h)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (lambda: torch.randn(1, D), "one row"),
        (lambda: torch.randn(1, D).expand(5, D), "equal rows"),
        (lambda: torch.zeros(0, D), "no row"),
        (lambda: torch.zeros(2, D), "zeros"),
    ],
)
def test_a_first_batch_that_says_nothing(first: Callable[[], Tensor], why: str) -> None:
    """The rows are held against each other at once, or when there are some; in any case."""
    private, optimizer = make_private(Branching(lambda m: True))[1:3]
    with refused("independently of the others"):
        step(private, optimizer, first())
        step(private, optimizer, torch.randn(3, D))


def test_a_first_call_in_eval_mode() -> None:
    private, optimizer = make_private(Branching(lambda m: m.training))[1:3]
    private.eval()
    private(torch.randn(B, D))
    private.train()
    with refused("independently of the others"):
        step(private, optimizer, torch.randn(B, D))


@pytest.mark.parametrize("state", ["warm", "stage", "calls"])
def test_a_branch_that_comes_later(state: str) -> None:
    when = {
        "warm": lambda m: m.warm, "stage": lambda m: m.stage == "end", "calls": lambda m: m.calls > 3,
    }  # fmt: skip
    model = Branching(when[state])
    private, optimizer = make_private(model)[1:3]
    for _ in range(3):
        step(private, optimizer, torch.randn(B, D))
    assert model.calls == 3  # looks leave no trace
    model.warm, model.stage = True, "end"
    with refused("independently of the others"):
        step(private, optimizer, torch.randn(B, D))


def test_more_rows_than_before() -> None:
    """The first two of at least five rows are mixed: two rows alone are not."""

    def use(m: nn.Module, h: Tensor) -> Tensor:
        two = h[:2].mean(0, True).expand(2, -1, -1)
        return torch.cat([two, h[2:]]) if len(h) > 4 else h

    private, optimizer = make_private(Hidden(use, "nothing"))[1:3]
    with refused("independently of the others"):
        for b in (2, 3, 8):
            step(private, optimizer, torch.randn(b, T, D))


@pytest.mark.parametrize("t", [4, 5])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("seen", [True, False])
def test_a_position_table_reached_late(rank: int, t: int, seen: bool) -> None:
    """Exact, also where t equals b and the flag is one that nobody watches."""
    model = LatePositions(rank).double()
    x = torch.randn(4, t, D).double()
    params = dict(model.named_parameters())
    private, optimizer = make_private(model, lr=0.0)[1:3]
    step(private, optimizer, x)
    if seen:
        model.on = True
    else:
        model.__class__ = type("Other", (LatePositions,), {"on": True})
        del model.on
    expected = clipped_sum(per_sample_gradients(_plain(model), x), 1.0)
    optimizer.zero_grad()
    backward(private, x)
    assert_sums(summed(params), expected, 1e-10)


class LateParameter(nn.Module):
    """A raw parameter in a branch that nothing announces."""

    switched: list[int] = []

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.branch, self.head = Bias(use), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.branch(x) if self.switched else x).mean(1)


class Bias(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.raw, self.use = nn.Parameter(torch.randn(1, T, D)), use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.use(self.raw))


LATE: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda p: p,
    "first row": lambda p: p[0],
    "normalized": lambda p: p / p.norm(),
}


@pytest.mark.parametrize("use", LATE)
def test_a_parameter_reached_late(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer has a rule for it, and no probe has met it."""
    monkeypatch.setattr(LateParameter, "switched", [1])
    model = LateParameter(LATE[use]).double()
    x = torch.randn(B, T, D).double()
    expected = clipped_sum(per_sample_gradients(model, x), 1.0)
    LateParameter.switched.clear()
    params = dict(model.named_parameters())
    private, optimizer = make_private(model, lr=0.0)[1:3]
    step(private, optimizer, x)
    LateParameter.switched.append(1)
    optimizer.zero_grad()
    backward(private, x)
    assert_sums(summed(params), expected, 1e-10)


def test_rows_that_a_late_parameter_couples(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coupling(Bias):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + self.raw * x.mean(0))

    monkeypatch.setattr(LateParameter, "switched", [])
    model = LateParameter(LATE["whole"])
    model.branch = Coupling(LATE["whole"])
    private, optimizer = make_private(model)[1:3]
    x = torch.randn(B, T, D)
    step(private, optimizer, x)
    LateParameter.switched.append(1)
    with refused("independently of the others"):
        private(x)


def _plain(model: LatePositions) -> LatePositions:
    twin = LatePositions(model.rank).double()
    twin.load_state_dict(model.state_dict())
    twin.on = True
    return twin
