"""A GroupNorm ResNet-18 of full width, exact sample by sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from examples.models import resnet18
from tests.oracle import Batch, check_exact


def classify(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each row's own cross entropy, [b]."""
    return F.cross_entropy(output, labels, reduction="none")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float64), (32, torch.float32)])
def test_resnet18(size: int, dtype: torch.dtype) -> None:
    batch = Batch((torch.randn(3, 3, size, size),), target=torch.tensor([1, 5, 9]))
    # what rounding can hide of norms made of the Grams of wide convolutions: 1.5e-5 measured
    tol = 2.5e-5 if dtype == torch.float32 else None
    check_exact(resnet18(num_classes=10), batch, classify, dtype=dtype, tol=tol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_narrow_and_channels_last(dtype: torch.dtype) -> None:
    model = resnet18(num_classes=10, width=8, norm_groups=4).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    batch = Batch((x,), target=torch.tensor([1, 5, 9, 0]))
    check_exact(model, batch, classify, dtype=dtype)
