"""What one batch leaves on the modules: refused where the next one's outputs follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import FastclipError, UnsupportedLayerError
from tests.oracle import check_exact, make_private

B, T, D = 4, 3, 5


class Carries(nn.Module):
    """Adds what an earlier batch has left, and leaves something itself."""

    left: Tensor | None = None

    def __init__(self, leaves: Callable[[Tensor], Tensor], reads: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(D, generator=generator, dtype=torch.float64))
        self.leaves, self.reads = leaves, reads

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        if self.reads and self.left is not None:
            out = out + self.left
        self.left = self.leaves(out.detach())
        return out.tanh()


def batch() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


LEAVES = {
    "a statistic": lambda out: out.mean(),
    "a vector": lambda out: out.mean((0, 1)),
    "the first row": lambda out: out[0],
    "the rows": lambda out: out,
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_reaches_the_next_batch_is_refused(what: str) -> None:
    private = make_private(Carries(LEAVES[what]))[1]
    with pytest.raises(UnsupportedLayerError, match=r"\['left'\] keep values of one batch"):
        private(batch())


@pytest.mark.parametrize("what", LEAVES)
def test_what_is_only_left_is_exact(what: str) -> None:
    check_exact(Carries(LEAVES[what], reads=False), batch(), dtype=torch.float64)


class Held:
    """An object of somebody's own class, which the model holds."""

    def __init__(self, mean: Tensor | None = None) -> None:
        self.mean = mean


def moving(held: Held, x: Tensor) -> Tensor:
    before = held.mean
    assert before is not None
    held.mean = before + 1e-9 * x.mean((0, 1))
    return before


def first(held: Held, x: Tensor) -> Tensor:
    if held.mean is None:
        held.mean = x.mean((0, 1))
    return held.mean


def banked(bank: Any, x: Tensor) -> Tensor:
    before = torch.stack(list(bank)).mean(0) if bank else torch.zeros(D, dtype=x.dtype)
    bank.append(x.mean((0, 1)))
    return before


def nested(held: dict[str, dict[str, Tensor]], x: Tensor) -> Tensor:
    before = held["of"]["x"].clone()
    held["of"]["x"] += x.mean((0, 1))
    return before


ZERO = torch.zeros(D, dtype=torch.float64)
BANKS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a statistic that hardly moves": (lambda: Held(ZERO), moving),
    "the first batch's": (Held, first),
    "an object in a list": (lambda: [Held(ZERO)], lambda held, x: moving(held[0], x)),
    "a list": (list, banked),
    "a deque": (lambda: deque(maxlen=2), banked),
    "a dict in a dict": (lambda: {"of": {"x": ZERO.clone()}}, nested),
}


class Bank(nn.Module):
    """Subtracts what an object or a container holds of earlier batches."""

    def __init__(
        self, held: Any, take: Callable[[Any, Tensor], Tensor], reads: bool = True
    ) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(D, D).double(), held
        self.take, self.reads = take, reads

    def forward(self, x: Tensor) -> Tensor:
        before = self.take(self.held, x.detach())
        return self.layer(x - before if self.reads else x)


@pytest.mark.parametrize("case", BANKS)
def test_what_is_held_for_the_next_batch_is_refused(case: str) -> None:
    make, take = BANKS[case]
    private = make_private(Bank(make(), take))[1]
    with pytest.raises(FastclipError, match=r"'held.*keep values of one batch|another sample"):
        private(batch())


@pytest.mark.parametrize("case", BANKS)
def test_what_is_held_and_not_read_is_exact(case: str) -> None:
    make, take = BANKS[case]
    check_exact(Bank(make(), take, reads=False), batch(), dtype=torch.float64)


def test_a_look_leaves_nothing_in_objects() -> None:
    held = Held()
    model = Bank(held, first, reads=False)
    make_private(model)[1](batch())
    assert held.mean is not None
    assert torch.equal(held.mean, batch().mean((0, 1)))


class State:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def hidden(model: Any, h: Tensor) -> Tensor:
    if model.state is None or len(model.state) != len(h):
        model.state = torch.zeros(len(h), D).to(h)
    return model.state


def by_size(model: Any, h: Tensor) -> Tensor:
    model.state = {} if model.state is None else model.state
    return model.state.get(len(h), torch.zeros(len(h), D).to(h))


def in_object(model: Any, h: Tensor) -> Tensor:
    if model.state is None or len(model.state.value) != len(h):
        return torch.zeros(len(h), D).to(h)
    return model.state.value


def others_bank(model: Any, h: Tensor) -> Tensor:
    """Neighbors among the last batch, if that was as large; the mean over them is small."""
    if model.state is None or model.state.shape != h.shape:
        return torch.zeros(len(h), D).to(h)
    return (h @ model.state.T).softmax(1) @ model.state


def of_other_rows(model: Any, h: Tensor) -> Tensor:
    """The same batch once more is none that comes next."""
    if model.state is None or model.state.shape != h.shape or torch.equal(model.state, h):
        return torch.zeros(len(h), D).to(h)
    return model.state


def keep(model: Any, h: Tensor) -> None:
    model.state = h


def keep_by_size(model: Any, h: Tensor) -> None:
    model.state[len(h)] = h


def keep_in_object(model: Any, h: Tensor) -> None:
    model.state = State(h)


def keep_mean(model: Any, h: Tensor) -> None:
    model.state = 0.9 * model.state + 0.1 * h.mean(0)


STATES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], None]]] = {
    "hidden": (hidden, keep),
    "a running mean": (hidden, keep_mean),
    "a memory bank": (others_bank, keep),
    "by size": (by_size, keep_by_size),
    "in an object": (in_object, keep_in_object),
    "of other rows": (of_other_rows, keep),
}


class Stateful(nn.Module):
    """Carries a state on while the batch is as large as the one before."""

    def __init__(self, case: str, carries: bool) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(D, D), nn.Linear(D, 2)
        (self.read, self.keep), self.carries = STATES[case], carries
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.read(self, x.detach())
        h = self.cell(x, before if self.carries else None)
        self.keep(self, h.detach())
        return self.out(h)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", STATES)
def test_a_state_that_its_size_guards_is_refused(case: str, seed: int) -> None:
    torch.manual_seed(seed)
    private = make_private(Stateful(case, carries=True))[1]
    with pytest.raises(UnsupportedLayerError, match=r"'state.*keep values of one batch"):
        private(torch.randn(3 + seed, D))


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_is_not_read_is_exact(case: str) -> None:
    torch.manual_seed(0)
    check_exact(Stateful(case, carries=False), torch.randn(B, D), dtype=torch.float64)


class Started(nn.Module):
    """Keeps what it starts from while batches are of one size."""

    def __init__(self, start: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cell, self.out, self.start = nn.RNNCell(D, D), nn.Linear(D, 2), start
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.shape != x.shape:
            self.kept = self.start(x)
        return self.out(self.cell(x, self.kept))


@pytest.mark.parametrize(
    "start",
    [
        torch.zeros_like,
        lambda x: x.new_ones(len(x), 1).expand(-1, D),
        lambda x: x.new_empty(x.shape).fill_(1),
    ],
    ids=["zeros", "a view of ones", "filled"],
)
def test_what_a_model_starts_from(start: Callable[[Tensor], Tensor]) -> None:
    """Zeros of as many rows say nothing of the batch that they were first made for."""
    torch.manual_seed(0)
    check_exact(Started(start), torch.randn(B, D), dtype=torch.float64)


def test_constants_that_are_left_are_exact() -> None:
    ones = torch.ones(D, dtype=torch.float64)
    model = Carries(lambda out: ones)
    model.left = ones
    check_exact(model, batch(), dtype=torch.float64)


class Heads(nn.Module):
    """Parts write into a list that they share with the whole, which reads it: deep supervision, as
    MONAI's DynUNet does it."""

    def __init__(self, writes: bool = True) -> None:
        super().__init__()
        self.heads = [torch.zeros(1)] * 2
        self.parts = nn.ModuleList(Head(self.heads, k) for k in range(2 if writes else 1))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return torch.stack([x, *(head.expand_as(x) for head in self.heads)], 1)


class Head(nn.Module):
    def __init__(self, heads: list[Tensor], k: int) -> None:
        super().__init__()
        self.layer, self.heads, self.k = nn.Linear(D, D), heads, k

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.heads[self.k] = out.tanh()
        return out


def test_a_list_that_modules_share_is_written_before_it_is_read() -> None:
    check_exact(Heads().double(), batch(), dtype=torch.float64)


def test_a_list_that_modules_share_is_read_before_it_is_written() -> None:
    model = Heads()
    model.parts = model.parts[::-1]
    model.forward = lambda x: model.heads[1].mean() + nn.Sequential(*model.parts)(x)
    private = make_private(model.double())[1]
    with pytest.raises(UnsupportedLayerError, match="keep values of one batch"):
        private(batch())
