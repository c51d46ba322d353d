"""Convolutions whose kernel is used by itself, against one sample at a time."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.rules.uses.functions import B, batch, check_autocast, check_rule


def image(x: Tensor) -> Tensor:
    """[b, t, d] of t = 6, d = 6 as [b, 4, 3, 3]."""
    return x.reshape(-1, 4, 3, 3)


CASES = {
    "conv1d": (lambda p, x: F.conv1d(x, p[0], p[1]), (4, 6, 3), (4,)),
    "conv1d, depthwise": (
        lambda p, x: F.conv1d(x, p[0], p[1], padding=2, groups=6)[..., :6], (6, 1, 3), (6,)
    ),
    "conv1d, twice depthwise": (lambda p, x: F.conv1d(x, p[0], stride=2, groups=6), (12, 1, 3)),
    "conv2d": (
        lambda p, x: F.conv2d(image(x), p[0], p[1], stride=2, padding=(1, 2)), (3, 4, 2, 3), (3,)
    ),
    "conv2d, pointwise": (lambda p, x: F.conv2d(image(x), p[0], stride=2), (3, 4, 1, 1)),
    "conv2d, groups": (
        lambda p, x: F.conv2d(image(x), p[0], padding=1, groups=2, dilation=2), (6, 2, 2, 2)
    ),
    "conv2d, same": (lambda p, x: F.conv2d(image(x), p[0], padding="same"), (2, 4, 3, 2)),
    "conv2d, valid": (lambda p, x: F.conv2d(image(x), p[0], padding="valid"), (2, 4, 2, 2)),
    "conv3d": (lambda p, x: F.conv3d(image(x)[:, None], p[0], p[1]), (2, 1, 2, 2, 2), (2,)),
    "standardized": (
        lambda p, x: F.conv2d(image(x), p[0] - p[0].mean((1, 2, 3), True)), (3, 4, 2, 2)
    ),
    "part of a kernel": (lambda p, x: F.conv2d(image(x), p[0][:, :, :2, :2]), (3, 4, 3, 3)),
    "folded": (lambda p, x: F.conv1d(x.reshape(-1, 1, 6), p[0], p[1]).view(-1, 6, 8), (2, 1, 3), (2,)),
    "conv_transpose1d": (lambda p, x: F.conv_transpose1d(x, *p), (6, 2, 3), (2,)),
    "conv_transpose2d": (
        lambda p, x: F.conv_transpose2d(image(x), *p, stride=2, padding=1, output_padding=1, groups=2),
        (4, 3, 3, 2), (6,),
    ),
    "conv_transpose3d": (
        lambda p, x: F.conv_transpose3d(image(x)[:, None], p[0], dilation=2), (1, 2, 2, 1, 2)
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_exact(case: str) -> None:
    function, *shapes = CASES[case]
    check_rule(function, *shapes, x=batch(B, 6, 6))


@pytest.mark.parametrize("case", ["conv1d", "conv2d, groups", "conv_transpose2d"])
def test_autocast(case: str) -> None:
    function, *shapes = CASES[case]
    check_autocast(function, *shapes, x=batch(B, 6, 6))
