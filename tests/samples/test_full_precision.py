"""Looks run in full float32, whatever the user lets float32 products round to; steps as users say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastclip.core.numerics import gpu_products
from tests.oracle import make_private, sample_loss

FULL = {"ieee", "none", "highest", "False"}


class Notes(nn.Module):
    """To what float32 products may be rounded while it runs."""

    def __init__(self, seen: list[tuple[str, ...]]) -> None:
        super().__init__()
        self._note = seen.append

    def forward(self, x: Tensor) -> Tensor:
        self._note(gpu_products())
        return x * 1.0


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_look_is_in_full_float32(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.backends.cudnn.flags(
            allow_tf32=True
        ):  # its default, now of each operation's own
            users, seen = gpu_products(), []
            model = nn.Sequential(nn.Linear(6, 8), Notes(seen), nn.Tanh(), nn.Linear(8, 3))
            _, private, optimizer, _ = make_private(model, max_grad_norm=1.0)
            sample_loss(private(torch.randn(4, 6))).mean().backward()
            optimizer.step()
            assert gpu_products() == users
    finally:
        torch.set_float32_matmul_precision(before)
    assert precision == "highest" or not FULL.issuperset(users)
    *looks, step = seen
    assert step == users
    assert len(looks) == 3
    assert all(FULL.issuperset(look) for look in looks)
