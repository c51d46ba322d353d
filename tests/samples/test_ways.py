"""Calls of one model in several ways: rows in another order, arguments in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import (
    Batch,
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused

B, T, D = 6, 4, 5
ORDERS = "Use one order"


class Ordered(nn.Module):
    """Flattens its rows sample by sample, or time by time; `bare`: before a use, not a layer."""

    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.bare = nn.Linear(D, 4), nn.Linear(4, 3), bare
        self.time_major: Any = False

    def forward(self, x: Tensor, time_major: Any = None) -> Tensor:
        turned = self.time_major if time_major is None else time_major
        x = x.transpose(0, 1) if turned else x
        flat = x.reshape(-1, D)
        h = F.linear(flat, self.layer.weight) if self.bare else self.layer(flat)
        h = h.unflatten(0, x.shape[:2])
        return self.head((h.transpose(0, 1) if turned else h).tanh().mean(1))


def by_keyword(model: nn.Module, x: Tensor, turned: Any) -> Tensor:
    return model(x, time_major=True) if turned else model(x)


def by_argument(model: nn.Module, x: Tensor, turned: Any) -> Tensor:
    return model(x, turned)


def by_attribute(model: nn.Module, x: Tensor, turned: Any) -> Tensor:
    next(m for m in model.modules() if isinstance(m, Ordered)).time_major = turned
    return model(x)


CALLS = [by_keyword, by_argument, by_attribute]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [bool, int])
@pytest.mark.parametrize("other", [T, T - 1])
def test_rows_in_another_order(
    call: Callable[..., Tensor], kind: Callable[..., Any], other: int, bare: bool
) -> None:
    """Refused, whatever the length at which it comes, and again."""
    private = make_private(Ordered(bare))[1]
    sample_loss(call(private, torch.randn(B, T, D), kind(False))).mean().backward()
    with refused(ORDERS):
        call(private, torch.randn(B, other, D), kind(True))


@pytest.mark.parametrize("call", CALLS)
def test_after_a_refusal_nothing_is_taken_for_known(call: Callable[..., Tensor]) -> None:
    private, x = make_private(Ordered())[1], torch.randn(B, T, D)
    call(private, x, False)
    for turned in (True, False):
        with refused(ORDERS):
            call(private, x, turned)
        call(private, x, turned)


@pytest.mark.parametrize("turned", [False, True])
def test_other_lengths_of_one_order_are_exact(turned: bool) -> None:
    model = Ordered().double()
    model.time_major = turned
    params = dict(model.named_parameters())
    batches = [torch.randn(rows, n, D).double() for rows, n in ((B, T), (4, 1), (5, 7), (B, T))]
    grads = [per_sample_gradients(model, x) for x in batches]
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for x, own in zip(batches, grads, strict=True):
        optimizer.zero_grad()
        sample_loss(private(x)).mean().backward()
        assert_sums(summed(params), clipped_sum(own, 0.5), 1e-10)


class Sorted(nn.Module):
    """Moves its rows, and returns them in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y = self.layer(x[order])
        return torch.zeros_like(y).index_copy(0, order, y)


def test_moved_rows_that_come_back_in_another_order() -> None:
    """No module is trusted with them that has returned them in two orders; one around it is."""
    model = Ordered()
    model.layer = Sorted()  # type: ignore[assignment]
    model = model.double()
    params = dict(model.named_parameters())
    ways: list[dict[str, Any]] = [{}, {"time_major": True}] * 3
    calls = [Batch((torch.randn(B, T, D),), way).to(torch.float64) for way in ways]
    grads = [per_sample_gradients(model, call) for call in calls]
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for call, own in zip(calls, grads, strict=True):
        optimizer.zero_grad()
        sample_loss(private(*call.args, **call.kwargs)).mean().backward()
        assert_sums(summed(params), clipped_sum(own, 0.5), 1e-10)


class Either(nn.Module):
    """Takes ids or embeddings, and None in the place of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, D).requires_grad_(False), nn.Linear(D, 3)

    def forward(self, ids: Tensor | None, values: Tensor | None) -> Tensor:
        h = self.table(ids) if values is None else values
        return self.layer(h.flatten(0, 1)).unflatten(0, h.shape[:2]).tanh().mean(1)


def test_none_and_a_tensor_in_turn() -> None:
    model = Either().double()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    batches = []
    for step in range(24):
        rows = (B, 4, 9, 5)[step // 2 % 4]
        ids, values = torch.randint(0, 9, (rows, T)), torch.randn(rows, T, D).double()
        batches.append(Batch((ids, None) if step % 2 else (None, values)))
    grads = [per_sample_gradients(model, batch) for batch in batches]
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for batch, own in zip(batches, grads, strict=True):
        optimizer.zero_grad()
        sample_loss(private(*batch.args)).mean().backward()
        assert len(optimizer.per_sample_norms) == len(next(iter(own.values())))
        assert_sums(summed(params), clipped_sum(own, 0.5), 1e-10)


def test_a_layer_by_itself_that_sees_several_rows_a_sample() -> None:
    """Nothing says how many of them are one sample's there."""
    private, x = make_private(Ordered())[1], torch.randn(B, T, D)
    sample_loss(private(x)).mean().backward()
    layer = next(m for m in private.modules() if isinstance(m, Ordered)).layer
    with refused("several entries per sample"):
        layer(x.flatten(0, 1)).square().mean().backward()
