"""Rows in lists, tuples and arrays beside a tensor: cut like it, whatever an entry holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.oracle import assert_sums, clipped_sum, make_private, sample_loss, summed
from tests.refusal import refused

B, T, D = 6, 5, 4
COUPLED = "depends on a"
Make = Callable[[list[int]], Any]

KINDS: dict[str, Make] = {"list": list, "tuple": tuple, "array": np.array, "tensor": torch.tensor}


def rows_of(model: nn.Module, batches: list[tuple[Any, ...]], one: Callable[..., Any]) -> list[Any]:
    """Gradients of every row run alone: by the name of a parameter, [b, *shape]."""
    params = dict(model.named_parameters())
    found = []
    for batch in batches:
        each = []
        for i in range(len(batch[0])):
            loss = one(model(*(one_row(x, i) for x in batch)))
            each.append(torch.autograd.grad(loss, list(params.values())))
        found.append(
            {n: torch.stack(g) for n, g in zip(params, zip(*each, strict=True), strict=True)}
        )
    return found


def one_row(x: Any, i: int) -> Any:
    return x[i : i + 1] if not isinstance(x, (list, tuple)) or len(x) > 2 else x


def check(model: nn.Module, batches: list[tuple[Any, ...]], loss: Callable[..., Any]) -> None:
    """Clipped sums are those of rows that are run alone."""
    model = model.double()
    params = dict(model.named_parameters())
    grads = rows_of(model, batches, loss)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for batch, own in zip(batches, grads, strict=True):
        optimizer.zero_grad()
        loss(private(*batch)).backward()
        assert_sums(summed(params), clipped_sum(own, 0.5), 1e-9)


def mean_loss(out: Tensor) -> Tensor:
    return out if not out.dim() else sample_loss(out).mean()


class Pooled(nn.Module):
    """Pools rows of these lengths: each by its own, or all as far as the longest."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(D, 3), own

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        h = torch.tanh(self.layer(x))
        if self.own:
            return torch.stack([row[: int(n)].mean(0) for row, n in zip(h, lengths, strict=True)])
        return h[:, : int(max(lengths))].mean(1)


@pytest.mark.parametrize("lengths", [[5, 2, 2, 3, 2, 1], [4] * B])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind: str, lengths: list[int]) -> None:
    """As far as the longest, where all are of one length, too."""
    x = torch.randn(B, T, D, dtype=torch.float64)
    batches = [(x[:n], KINDS[kind](lengths[:n])) for n in (B, 4, 3, B)]
    check(Pooled(own=True), batches, mean_loss)
    private = make_private(Pooled(own=False).double())[1]
    with refused(COUPLED):
        private(*batches[0])


class Boxes(nn.Module):
    """A loss over the boxes of every image, divided by their number or by that of the images."""

    def __init__(self, by_boxes: bool) -> None:
        super().__init__()
        self.layer, self.by_boxes = nn.Linear(D, 8 * 4), by_boxes

    def forward(self, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        own = zip(self.layer(x).view(len(x), 8, 4), targets, strict=True)
        loss = sum((p[: len(t["boxes"])] - t["boxes"]).abs().sum() for p, t in own)
        return loss / (sum(len(t["boxes"]) for t in targets) if self.by_boxes else len(x))


@pytest.mark.parametrize("numbers", [(1, 2, 8, 1, 3, 1), (B,) * B, (3,) * B, (B, 1, B, 1, 2, B)])
def test_boxes_of_images(numbers: tuple[int, ...]) -> None:
    """Their number may be that of the images by accident, or the same for all."""
    x = torch.randn(B, D, dtype=torch.float64)
    targets = [{"boxes": 3 * torch.rand(n, 4, dtype=torch.float64)} for n in numbers]
    check(Boxes(by_boxes=False), [(x[:n], targets[:n]) for n in (B, 4, B)], mean_loss)
    private = make_private(Boxes(by_boxes=True).double())[1]
    with refused("one loss per sample"):
        private(x, targets).backward()


class Weighted(nn.Module):
    """Rows have weights, which are divided by their sum or not."""

    def __init__(self, by_sum: bool) -> None:
        super().__init__()
        self.layer, self.by_sum = nn.Linear(D, 3), by_sum

    def forward(self, x: Tensor, weights: list[float]) -> Tensor:
        w = x.new_tensor(weights)
        losses = sample_loss(self.layer(x)) * w
        return losses.sum() / (w.sum() if self.by_sum else len(x))


@pytest.mark.parametrize("weights", [[200.0, 1.0, 1.0, 1.0, 1.0, 2.0], [1.0] * B])
def test_weights_of_rows(weights: list[float]) -> None:
    x = torch.randn(B, D, dtype=torch.float64)
    check(Weighted(by_sum=False), [(x, weights), (x[:5], weights[:5])], mean_loss)
    private = make_private(Weighted(by_sum=True).double())[1]
    with refused("one loss per sample"):
        private(x, weights).backward()


class Letters(nn.Module):
    """Texts beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(128, D), nn.Linear(2 * D, 3)

    def forward(self, x: Tensor, texts: list[str]) -> Tensor:
        longest = max(map(len, texts))
        ids = torch.tensor([[ord(c) for c in t.ljust(longest, "\0")] for t in texts])
        held = (ids > 0).double()[..., None]
        h = (self.table(ids) * held).sum(1) / held.sum(1)
        return self.layer(torch.cat([x, h], 1))


def test_texts() -> None:
    x = torch.randn(B, D, dtype=torch.float64)
    texts = ["abc", "de", "fghijkl", "m", "nop", "qrstuv"]
    check(Letters(), [(x[:n], texts[:n]) for n in (B, 3, 5)], mean_loss)


class Resized(nn.Module):
    """Takes a height and a width, two states or three levels beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x: Tensor, side: Any) -> Tensor:
        if isinstance(side[0], Tensor):
            return self.layer(x + sum(s for s in side)).tanh()
        height, width = side
        return self.layer(x).tanh() * height / width


@pytest.mark.parametrize("sizes", [(2, 6, 2, 3), (6, 2, 4, 1)])
@pytest.mark.parametrize("side", [(224, 224), (200, 300), [3, 4]])
def test_height_and_width_are_no_rows(sizes: tuple[int, ...], side: Any) -> None:
    """Where there are two rows by accident."""
    x = torch.randn(B, D, dtype=torch.float64)
    check(Resized(), [(x[:n], side) for n in sizes], mean_loss)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("kind", [list, tuple])
def test_as_many_tensors_as_rows(number: int, kind: type) -> None:
    """Each of which has all the rows."""
    model = Resized().double()
    batches = []
    for n in (number, 5, number):
        x = torch.randn(n, D, dtype=torch.float64)
        batches.append((x, kind(torch.randn(n, D, dtype=torch.float64) for _ in range(number))))
    params = dict(model.named_parameters())
    own = []
    for x, side in batches:
        each = [
            torch.autograd.grad(
                sample_loss(model(x[i : i + 1], kind(s[i : i + 1] for s in side))).mean(),
                list(params.values()),
            )
            for i in range(len(x))
        ]  # fmt: skip
        own.append(
            {n: torch.stack(g) for n, g in zip(params, zip(*each, strict=True), strict=True)}
        )
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for batch, grads in zip(batches, own, strict=True):
        optimizer.zero_grad()
        sample_loss(private(*batch)).mean().backward()
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-9)


class Graph(nn.Module):
    """Nodes of each row, and one graph for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return (graph @ torch.tanh(self.layer(x))).mean(1)


def test_a_graph_of_as_many_nodes_as_rows() -> None:
    """Batches of other sizes have shown that it has no rows."""
    graph = torch.randn(T, T, dtype=torch.float64)
    model = Graph().double()
    params = dict(model.named_parameters())
    batches = [torch.randn(n, T, D, dtype=torch.float64) for n in (4, T, 6, T)]
    own = []
    for x in batches:
        each = [
            torch.autograd.grad(sample_loss(model(r[None], graph)).mean(), list(params.values()))
            for r in x
        ]
        own.append(
            {n: torch.stack(g) for n, g in zip(params, zip(*each, strict=True), strict=True)}
        )
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    for x, grads in zip(batches, own, strict=True):
        optimizer.zero_grad()
        sample_loss(private(x, graph)).mean().backward()
        assert_sums(summed(params), clipped_sum(grads, 0.5), 1e-9)
