"""Samples that are folded with dimensions whose lengths change from step to step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fastclip.samples.batch_axis import BatchAxis
from fastclip.samples.layout import Folds
from tests.oracle import (
    TOLERANCE,
    Batch,
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    summed,
)
from tests.refusal import refused

B, D, C = 4, 5, 0.5


class Notes(nn.Module):
    """[b, notes, tokens] -> [b * notes, tokens], and [b * notes * tokens, d] of these."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        b, notes, tokens = ids.shape
        h = self.table(ids.flatten(0, 1)).view(-1, D) * self.scale
        h = self.inner(h.tanh()).view(b * notes, tokens, D).mean(1)
        return self.head(h.tanh()).view(b, notes, 2).mean(1)


class Slices(nn.Module):
    """A convolution of every slice of a volume, and a recurrent layer over them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.over = nn.Conv2d(1, D, 2), nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, slices, tokens = x.shape
        rows = (x.to(self.head.weight.dtype) / 9).view(b * slices, 1, 1, tokens)
        h = self.conv(torch.cat([rows, rows.cos()], 2)).tanh().mean((2, 3))
        return self.head(self.over(h.view(b, slices, D))[0][:, -1])


class TimeFirst(nn.Module):
    """[t, b, tokens] -> [t * b, tokens]: the samples innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, ids: Tensor) -> Tensor:
        t, b, _ = ids.shape
        h = self.inner(self.table(ids.flatten(0, 1)).mean(1)).tanh()
        return self.head(h).view(t, b, 2).mean(0)


class Turned(TimeFirst):
    """The same, of inputs whose samples come first."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.transpose(0, 1))


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "outermost": (Notes, 0),
    "slices": (Slices, 0),
    "innermost": (TimeFirst, 1),
    "turned": (Turned, 0),
}


def batch_of(axis: int, b: int, notes: int, tokens: int) -> Batch:
    ids = torch.randint(9, (b, notes, tokens))
    if not axis:
        return Batch((ids,))
    return Batch((ids.transpose(0, 1).contiguous(),), take=_column)


def _column(batch: Batch, i: int) -> Batch:
    return replace(batch, args=(batch.args[0][:, i : i + 1].contiguous(),))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", MODELS)
def test_lengths_that_change_in_every_step(case: str) -> None:
    """Sums are exact at all of them, also where there are as many samples as anything else; and looks
    grow rare."""
    build, axis = MODELS[case]
    twin, calls, looked = build().double(), [], []
    model = copy.deepcopy(twin)
    model.head.register_forward_pre_hook(lambda module, args: calls.append(1))
    private, optimizer = make_private(model, max_grad_norm=C, batch_first=not axis, lr=0.0)[1:3]
    own = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(3)
    square = {31: (4, 4, 4), 32: (4, 4, 7), 33: (3, 3, 8), 34: (7, 4, 7)}
    for number in range(40):
        drawn = torch.randint(2, 9, (3,), generator=generator).tolist()
        batch = batch_of(axis, *square.get(number, drawn))
        optimizer.zero_grad()
        calls.clear()
        backward(private, batch)
        looked.append(len(calls) > 1)
        if number not in square and (looked[-1] or number % 5):
            continue
        grads = per_sample_gradients(twin, batch)
        assert relative_error(optimizer.per_sample_norms, norms(grads)) <= TOLERANCE[torch.float64]
        assert_sums(summed(own), clipped_sum(grads, C), TOLERANCE[torch.float64])
    assert sum(looked) <= 16
    assert sum(looked[20:]) <= 2


class Grown(nn.Module):
    """[pieces, b, heads] in one row: nothing stands before the samples while there is one piece."""

    def __init__(self, pieces: Callable[[int], int]) -> None:
        super().__init__()
        self.inner, self.head, self.pieces = nn.Linear(D, D), nn.Linear(D, 2), pieces

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        pieces = self.pieces(t)
        h = torch.stack([x.mean(1) + n for n in range(pieces)])  # [pieces, b, d]
        h = h[:, :, None] + torch.linspace(0, 1, 3, dtype=x.dtype)[:, None]
        h = self.inner(h.reshape(-1, D)).tanh()
        return self.head(h.view(pieces, b, 3, D).mean((0, 2)))


def test_another_dimension_that_grows_in_rows_hardly_longer() -> None:
    """No number of entries that twice as many may explain is taken for more of the same."""
    twin = Grown(lambda t: 1 + t // 8).double()
    model = copy.deepcopy(twin)
    private, optimizer = make_private(model, max_grad_norm=C, lr=0.0)[1:3]
    own = dict(model.named_parameters())
    for t in (5, 6, 7, 8, 12, 15, 16, 8, 7, 14):
        batch = Batch((torch.randn(B, t, D, dtype=torch.float64),))
        optimizer.zero_grad()
        backward(private, batch)
        grads = per_sample_gradients(twin, batch)
        assert_sums(summed(own), clipped_sum(grads, C), TOLERANCE[torch.float64])


def test_an_order_that_turns_is_refused() -> None:
    class Turning(Notes):
        def forward(self, ids: Tensor) -> Tensor:
            if ids.shape[1] <= 4:
                return super().forward(ids)
            ids = ids.transpose(0, 1)
            notes, b, tokens = ids.shape
            h = self.inner((self.table(ids.flatten(0, 1)).view(-1, D) * self.scale).tanh())
            h = h.view(notes * b, tokens, D).mean(1).tanh()
            return self.head(h).view(notes, b, 2).mean(0)

    private = make_private(Turning())[1]
    for notes in (2, 3, 4):
        private(torch.randint(9, (B, notes, 6)))
    with refused("another order"):
        private(torch.randint(9, (B, 5, 6)))


def at(*sizes: int) -> tuple[tuple[int, ...], ...]:
    return (sizes,)


OUTER, INNER = BatchAxis(0, 1, 6), BatchAxis(0, 6, 1)


@pytest.mark.parametrize("place", [OUTER, INNER])
@pytest.mark.parametrize(
    ("each", "lengths", "known"),
    [
        (6, at(6, 6), True),
        (11, at(7, 6), True),  # less than twice as many in longer rows
        (12, at(7, 6), False),
        (12, at(12, 6), False),
        (4, at(4, 6), True),  # fewer in shorter ones
        (5, at(4, 6), True),
        (7, at(4, 6), False),
        (6, at(5, 7), False),  # neither shorter nor longer
        (7, at(7, 5), False),
        (6, at(6, 6, 1), False),
        (6, (*at(6, 6), (6,)), False),
    ],
)
def test_what_other_lengths_tell(
    place: BatchAxis, each: int, lengths: tuple[tuple[int, ...], ...], known: bool
) -> None:
    folds = Folds()
    folds.note("layer", place, [6], at(6, 6))
    one = (1, each) if place is OUTER else (each, 1)
    assert folds.find("layer", each, lengths) == (BatchAxis(0, *one) if known else None)
    assert folds.find("another", each, lengths) is None


def test_calls_of_one_layer_that_fold_differently() -> None:
    """Which of them has grown is not known: only of shorter rows both tell."""
    folds = Folds()
    folds.note("layer", OUTER, [4, 6], at(6, 6))
    assert folds.find("layer", 7, at(7, 6)) == BatchAxis(0, 1, 7)
    assert folds.find("layer", 8, at(7, 6)) is None
    assert folds.find("layer", 5, at(5, 6)) == BatchAxis(0, 1, 5)
    folds.note("layer", BatchAxis(0, 2, 4), [8], at(8, 6))  # between others: nothing tells of more
    assert folds.find("layer", 5, at(5, 6)) is None
    assert folds.find("layer", 8, at(8, 6)) == BatchAxis(0, 2, 4)


def test_what_calls_were_told_must_be_so() -> None:
    folds = Folds()
    folds.note("layer", OUTER, [6], at(6, 6))
    assert folds.find("layer", 4, at(4, 6)) == BatchAxis(0, 1, 4)
    with refused("another order"):
        folds.note("layer", BatchAxis(0, 2, 2), [4], at(4, 6))


def test_what_was_known_is_put_back() -> None:
    folds, other = Folds(), Folds()
    assert not folds
    folds.note("layer", OUTER, [6], at(6, 6))
    earlier = folds.copy()
    folds.note("layer", OUTER, [8], at(8, 6))
    assert folds.facts() > earlier.facts()
    assert len(earlier.facts()) == 1
    other.put_back(folds)
    assert other.facts() == folds.facts()
