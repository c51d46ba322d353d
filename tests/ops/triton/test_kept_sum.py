"""Clipped sums of kept gradients against float64, with dead samples and any order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.ops.dispatch import use_backend
from fastclip.ops.triton.scaled_sum import BLOCK, kept_sum
from tests.ops.triton.oracle import normal
from tests.oracle import relative_error

SHAPES = [(1, 1), (1, 5), (3, 7, 5), (4, BLOCK), (5, BLOCK + 1), (9, 33, 40), (16, 3, 5, 7)]


def exact(gradients: Tensor, scale: Tensor) -> Tensor:
    alive = scale != 0
    return torch.einsum("b,b...->...", scale[alive].double(), gradients[alive].double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(shape: tuple[int, ...]) -> None:
    gradients, scale = (
        normal(*shape, dtype=torch.float32),
        normal(shape[0], dtype=torch.float32).abs(),
    )
    found = kept_sum(gradients, scale)
    assert found.dtype == torch.float32
    assert relative_error(found, exact(gradients, scale)) < 1e-6


@pytest.mark.parametrize(
    ("order", "taken"), [((0, 2, 1), True), ((2, 0, 1), False), ((1, 0, 2), False)], ids=str
)
def test_gradients_in_another_order(order: tuple[int, ...], taken: bool) -> None:
    """As a layer in channels-last leaves them; where one sample's do not lie together, PyTorch adds."""
    gradients = normal(5, 7, 6, dtype=torch.float32).permute(order)
    scale = normal(len(gradients), dtype=torch.float32)
    assert (kept_sum(gradients, scale) is not NotImplemented) == taken
    with use_backend("triton"):
        found = ops.kept_sum(gradients, scale)
    assert found.is_contiguous()
    assert relative_error(found, exact(gradients, scale)) < 1e-6


def test_rows_of_a_larger_tensor() -> None:
    whole, scales = normal(6, 4, 50, dtype=torch.float32), normal(12, dtype=torch.float32)
    gradients, scale = whole[:, 1], scales[::2]
    assert relative_error(kept_sum(gradients, scale), exact(gradients, scale)) < 1e-6


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_dead_samples(value: float) -> None:
    gradients, scale = normal(6, 40, dtype=torch.float32), normal(6, dtype=torch.float32)
    scale[[0, 3, 5]] = 0
    gradients[0], gradients[3, 7], gradients[5] = value, value, value
    assert relative_error(kept_sum(gradients, scale), exact(gradients, scale)) < 1e-6
    assert not kept_sum(gradients, torch.zeros_like(scale)).any()
    scale[3] = 1.0
    assert not kept_sum(gradients, scale)[7].isfinite()


def test_what_is_left_to_pytorch() -> None:
    scale = torch.ones(2)
    assert kept_sum(torch.ones(2, 3, dtype=torch.float64), scale) is NotImplemented
    assert kept_sum(torch.ones(2, 0), scale) is NotImplemented
    assert kept_sum(torch._neg_view(torch.ones(2, 3)), scale) is NotImplemented
    assert kept_sum(torch.ones(0, 2), torch.ones(0)) is NotImplemented
