"""A call that goes another way than any before is noticed as it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import doctor
from fastclip.backward import traced_step
from fastclip.errors import BatchSizeError, FastclipError
from fastclip.samples import runs
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)

pytestmark = pytest.mark.skipif(not runs.FOLLOWS, reason="fastclip._path is not built")
_path = pytest.importorskip("fastclip._path")
B, T, D = 6, 5, 6
Does = Callable[[Tensor], Tensor]
SAME_OPERATORS: dict[str, tuple[Does, Does]] = {
    "mean": (lambda h: h - h.mean(1, keepdim=True), lambda h: h - h.mean(0, keepdim=True)),
    "flip": (lambda h: h + h.flip(1), lambda h: h + h.flip(0)),
    "softmax": (lambda h: h * h.softmax(1), lambda h: h * h.softmax(0)),
    "operands": (
        lambda h: [h * 2, h.roll(1, 0)][0] + h.sum(2, keepdim=True),
        lambda h: [h * 2, h.roll(1, 0)][1] + h.sum(2, keepdim=True),
    ),
    "sizes": (
        lambda h: h.reshape(len(h), T, D).cumsum(1),
        lambda h: h.reshape(1, len(h) * T, D).cumsum(1).view_as(h),
    ),
    "constants": (
        lambda h: h * torch.tensor([1.0] * len(h)).to(h)[:, None, None],
        lambda h: h * torch.tensor([1.0] * (len(h) - 1) + [2.0]).to(h)[:, None, None],
    ),
}
"""Of which the second is coupled, or follows from a sample's number."""


def path_of(does: Callable[..., Any], *given: Tensor) -> Any:
    following = runs.begin([*given])
    does(*given)
    return following.stop()


def agree(one: Any, other: Any, *shapes: tuple[int, ...]) -> bool:
    first, second = [list(shape) for shape in shapes] or ([], [])
    return one.follows(other, first, second)


@pytest.mark.parametrize("pair", SAME_OPERATORS.values(), ids=SAME_OPERATORS)
def test_equal_operators_are_no_equal_paths(pair: tuple[Does, Does]) -> None:
    h = torch.randn(B, T, D, requires_grad=True)
    first, again, second = (path_of(does, h) for does in (pair[0], pair[0], pair[1]))
    assert agree(first, again)
    assert not agree(first, second)
    assert not agree(first, second, (B, T, D), (B, T, D))


def test_sizes_follow_those_of_the_inputs() -> None:
    def does(h: Tensor) -> Tensor:
        folded = h.reshape(len(h) * h.shape[1], D)[: len(h) * h.shape[1] - 1]
        return folded.sum() + h[:, : h.shape[1] - 1].sum() + torch.arange(h.shape[1]).sum()

    one, other = (path_of(does, torch.randn(b, t, D)) for b, t in ((B, T), (4, 9)))
    assert not agree(one, other)
    assert agree(one, other, (B, T, D), (4, 9, D))
    cut = path_of(lambda h: does(h) + h[:4].sum(), torch.randn(B, T, D))
    again = path_of(lambda h: does(h) + h[:3].sum(), torch.randn(B, T, D))
    assert not agree(cut, again, (B, T, D), (B, T, D))


def test_what_changes_from_step_to_step_and_moves_nothing() -> None:
    """Weights, factors and draws."""
    weight = nn.Parameter(torch.randn(D, D))

    def does(h: Tensor, factor: float) -> Tensor:
        weight.data.add_(1)
        return torch.dropout(F.linear(h, weight), 0.5, True) * factor

    h = torch.randn(B, T, D)
    found = [path_of(lambda x, k=k: does(x, 1 + 1 / (1 + k)), h) for k in range(8)]
    assert all(agree(found[0], other) for other in found)
    other = nn.Parameter(torch.randn(D, D))
    one, two = (path_of(lambda x, w=w: F.linear(x, weight) @ w, h) for w in (weight, other))
    assert not agree(one, two)


def test_what_the_engine_does_beside_is_no_part() -> None:
    from fastclip.trace.tracer import all_aside

    def beside(h: Tensor) -> None:
        h.sum(1)
        with all_aside():
            h.sum(0)
        h.sum(2)

    h = torch.randn(B, T, D)
    assert agree(path_of(beside, h), path_of(lambda h: (h.sum(1), h.sum(2)), h))


def test_an_error_ends_it() -> None:
    following = runs.begin([])
    with pytest.raises(RuntimeError):
        torch.ones(2) + torch.ones(3)
    assert following.stop().operators == 3
    assert torch.ones(2).sum() == 2
    assert following.stop().operators == 0


@pytest.mark.parametrize("where", ["in a profiler", "in a transform", "in a backward pass"])
def test_where_operators_cannot_be_followed(where: str) -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    if where == "in a profiler":
        with torch.profiler.profile():
            found.append(runs.begin([]))
    elif where == "in a transform":
        torch.func.vmap(lambda x: (found.append(runs.begin([])), x)[1])(torch.ones(2))
    else:
        x.register_hook(lambda g: found.append(runs.begin([])))
        (2 * x).sum().backward()
    assert found == [None]


NOW: list[Does] = []
"""What models do at the moment: nothing of theirs says so."""


class Model(nn.Module):
    """A layer, what it does now, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(NOW[0](torch.tanh(self.first(x))))).mean(1)


def looks(private: nn.Module) -> int:
    return len(private.grad_state.calls.looks)


def check_step(private: nn.Module, model: Model, x: Tensor, optimizer: Any) -> None:
    """Its sums are those of one sample at a time."""
    optimizer.zero_grad()
    backward(private, x)
    plain = Model().double()
    plain.load_state_dict(model.state_dict())
    params = dict(model.named_parameters())
    assert_sums(summed(params), clipped_sum(per_sample_gradients(plain, x), 1.0), 1e-9)
    optimizer.step()


@pytest.mark.parametrize("pair", SAME_OPERATORS.values(), ids=SAME_OPERATORS)
def test_a_way_that_was_never_looked_at(pair: tuple[Does, Does]) -> None:
    """Nothing says so but what the call computes."""
    model, NOW[:] = Model().double(), [pair[0]]
    private, optimizer = make_private(model)[1:3]
    for _ in range(3):
        optimizer.zero_grad()
        backward(private, torch.randn(B, T, D).double())
        optimizer.step()
    assert looks(private) == 1
    NOW[0], before = pair[1], [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    with pytest.raises(BatchSizeError, match=r"depends on|position in the batch"):
        backward(private, torch.randn(B, T, D).double())
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    NOW[0] = pair[0]
    check_step(private, model, torch.randn(B, T, D).double(), optimizer)


def test_ways_that_are_independent() -> None:
    """Each is looked at once, whatever sizes come."""
    ways: list[Does] = [lambda h: h * 2, lambda h: h.cumsum(1), lambda h: h.roll(1, 1)]
    model, NOW[:] = Model().double(), [ways[0]]
    private, optimizer = make_private(model)[1:3]
    for step in range(12):
        NOW[0] = ways[step % 3]
        x = torch.randn(B - step % 2, T + step // 6, D).double()
        check_step(private, model, x, optimizer)
    assert looks(private) <= 3


def test_batches_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven for any number of samples is not learnt again: the step is traced."""
    traced: list[Any] = []
    monkeypatch.setattr(traced_step, "JUDGED", [traced.append])
    model, NOW[:] = Model().double(), [lambda h: h * 2]
    private, optimizer = make_private(model)[1:3]
    for size, steps in ((3, 1), (4, 2), (5, 2), (8, 3), (8, 3), (20, 4), (41, 5), (3, 5)):
        check_step(private, model, torch.randn(size, T, D).double(), optimizer)
        assert len(traced) == steps
    assert looks(private) == 1


ONLY_IN_LARGE: dict[str, Does] = {
    "indices": lambda h: h[torch.arange(len(h)).clamp(max=15)],
    "a slice": lambda h: torch.cat([h[:16], h[16:] - h[16:].mean(0)]),
    "another operator": lambda h: h.flip(0) if len(h) > 16 else h,
}


@pytest.mark.parametrize("does", ONLY_IN_LARGE.values(), ids=ONLY_IN_LARGE)
def test_what_only_larger_batches_show(does: Does) -> None:
    """By operators of the same names and sizes, too."""
    model, NOW[:] = Model().double(), [does]
    private, optimizer = make_private(model)[1:3]
    for _ in range(3):
        check_step(private, model, torch.randn(B, T, D).double(), optimizer)
    with pytest.raises(FastclipError):
        backward(private, torch.randn(40, T, D).double())


def test_of_a_program_that_never_rests_some_are_looked_at() -> None:
    """Fewer where its sizes may be why: a loop over samples runs more operators for more of them."""
    found, given = runs.Paths(), torch.zeros(B, D)
    found.note(path_of(torch.sum, given), [B, D], known=False)
    due = [k for k in range(1, 70) if found.next_due([B, D], turns=False)]
    assert due == [*range(1, 9), 16, 32, 64]
    sized = [k for k in range(1, 70) if found.next_due([B + k, D], turns=False)]
    assert sized == [1, 2, 4, 8, 16, 32, 64]
    assert not found.next_due([1, D], turns=True)
    other = path_of(torch.sum, torch.zeros(B + 70, D))
    assert found.knows(other, [B + 70, D])
    assert not any(found.next_due([B + k, D], turns=True) for k in (80, 81, 82))


def test_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds its sizes, and a long training may go a new one in every step."""
    monkeypatch.setattr(runs, "_KEPT", 3)
    found, given = runs.Paths(), torch.zeros(B, D)
    ways = [path_of(lambda h, k=k: h * torch.tensor([k] * D), given) for k in range(5)]
    for way in ways:
        found.note(way, [B, D], known=found.knows(way, [B, D]))
    assert [found.knows(way, [B, D]) for way in ways] == [True] * 3 + [False] * 2


class Turned(Model):
    """A layer sees the samples along another axis, which is as long as theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.second(h.transpose(0, 1)).transpose(0, 1) if NOW[0](h) is h else self.second(h)
        return self.head(torch.tanh(h)).mean(1)


def test_a_known_way_that_comes_back_where_samples_lie_elsewhere() -> None:
    """What is known of ways holds with what was known of layers: exact, or an error, in every step."""
    model = Turned().double()
    private, optimizer = make_private(model)[1:3]
    x, exact = torch.randn(T, T, D).double(), []
    for turned in (0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1):
        NOW[:] = [(lambda h: h) if turned else torch.clone]
        optimizer.zero_grad()
        try:
            backward(private, x)
        except FastclipError:
            exact.append(False)
            continue
        plain = Turned().double()
        plain.load_state_dict(model.state_dict())
        params = dict(model.named_parameters())
        wanted = clipped_sum(per_sample_gradients(plain, x), 1.0)
        assert_sums(summed(params), wanted, 1e-9)
        exact.append(True)
    assert exact[:4] == [True] * 4
    assert exact[-1]


def test_a_loop_over_samples() -> None:
    model, NOW[:] = Model().double(), [lambda h: torch.stack([2 * row.cumsum(0) for row in h])]
    private, optimizer = make_private(model)[1:3]
    for size in (B, B, B - 1, B - 2, B + 1, B - 1, B + 2, B):
        check_step(private, model, torch.randn(size, T, D).double(), optimizer)
    assert looks(private) <= 4


def test_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ": detected in every step (" in doctor.report(doctor.examine())
    monkeypatch.setattr(runs, "FOLLOWS", False)
    monkeypatch.setattr(runs, "WHY_NOT", "no compiler")
    assert "not detected in every step: no compiler" in doctor.report(doctor.examine())


def test_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FOLLOWS", False)
    model, NOW[:] = Model().double(), [SAME_OPERATORS["mean"][0]]
    private, optimizer = make_private(model)[1:3]
    for _ in range(3):
        optimizer.zero_grad()
        backward(private, torch.randn(B, T, D).double())
        optimizer.step()
    assert looks(private) == 1
