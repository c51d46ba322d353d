"""Inputs without rows stay what they were, or may hold numbers of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import make_private, sample_loss
from tests.refusal import refused

B, T, D = 6, 5, 4
CHANGED = "has no row per sample"


class Boxes(nn.Module):
    """Images, and the boxes of all, [n, 5]: the number of the image, and its box."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 8 * 4)

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        own = [boxes[boxes[:, 0] == i, 1:] for i in range(len(x))]
        each = zip(self.layer(x).view(len(x), 8, 4), own, strict=True)
        return sum((p[: len(b)] - b).abs().sum() for p, b in each) / len(boxes)


def boxes(numbers: list[int]) -> Tensor:
    each = [
        torch.cat([torch.full((n, 1), float(i)), torch.rand(n, 4)], 1)
        for i, n in enumerate(numbers)
    ]
    return torch.cat(each)


@pytest.mark.parametrize("numbers", [[2, 1, 3, 1, 1, 1], [8, 1, 1, 1, 1, 1]])
def test_boxes_of_all_images(numbers: list[int]) -> None:
    """As many as before, or fewer: of each position another number of them."""
    private = make_private(Boxes())[1]
    with refused(CHANGED + "|is part of the loss"):
        for each in ([1, 2, 1, 3, 1, 1], numbers):
            private(torch.randn(B, D), boxes(each)).backward()


class Mixed(nn.Module):
    """Positions of every row, mixed by a matrix that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x: Tensor, by: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return (by.to(x.dtype) @ torch.tanh(self.layer(x))).mean(1) * scale


def anew(n: int) -> Tensor:
    """A mask that is made for every batch."""
    return torch.ones(n, n).tril()


@pytest.mark.parametrize("lengths", [[T, T, T, T], [T, 3, T, 7, 3, T]])
def test_masks_of_the_length_of_rows(lengths: list[int]) -> None:
    _, private, optimizer, _ = make_private(Mixed())
    for step, n in enumerate(lengths):
        optimizer.zero_grad()
        sample_loss(private(torch.randn(B + 2 - step % 3, n, D), anew(n))).mean().backward()


@pytest.mark.parametrize("scale", [lambda n: torch.tensor(1.0 + n), lambda n: 1.0 + n])
def test_a_scale_on_a_schedule(scale: Callable[[int], Tensor | float]) -> None:
    _, private, optimizer, _ = make_private(Mixed())
    for step in range(4):
        optimizer.zero_grad()
        sample_loss(private(torch.randn(B, T, D), anew(T), scale(step))).mean().backward()


def test_a_buffer_that_is_written_anew() -> None:
    """Its memory is the same, and so is what it holds; or not."""
    private, mask = make_private(Mixed())[1], anew(T)
    for _ in range(3):
        mask.copy_(anew(T))
        sample_loss(private(torch.randn(B, T, D), mask)).mean().backward()
        private.zero_grad()
    mask.mul_(2)
    with refused(CHANGED):
        private(torch.randn(B, T, D), mask)
    with torch.no_grad():
        private(torch.randn(B, T, D), mask)


class Listed(nn.Module):
    """Numbers in a list beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x: Tensor, numbers: list[int]) -> Tensor:
        return self.layer(x).tanh() / max(numbers)


@pytest.mark.parametrize("other", [list(range(2, 12)), list(range(11))])
def test_lists_of_another_length(other: list[int]) -> None:
    private = make_private(Listed())[1]
    for _ in range(2):
        sample_loss(private(torch.randn(B, D), list(range(1, 11)))).mean().backward()
        private.zero_grad()
    with refused(CHANGED):
        private(torch.randn(B, D), other)


def test_few_numbers_are_settings() -> None:
    """A height and a width."""
    _, private, optimizer, _ = make_private(Listed())
    for size in ([224, 224], [192, 256], [224, 224]):
        optimizer.zero_grad()
        sample_loss(private(torch.randn(B, D), size)).mean().backward()
