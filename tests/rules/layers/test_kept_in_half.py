"""Gradients that a user's rule records in 16 bits: summed widely, at scales that are not rounded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.custom_layer import Scale
from fastclip import GradScaler, ops
from fastclip.rules.records import KeptRecord
from tests.oracle import make_private


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.3003, 1.0019, 3.1e-8])
def test_record(dtype: torch.dtype, scale: float) -> None:
    """300 equal samples: their sum has no place in 16 bits, and 3.1e-8 is twice as large in float16."""
    gradients = torch.ones(300, 3, 2, dtype=dtype)
    scales = torch.full((300,), scale)
    record = KeptRecord(gradients)
    expected = (scales.double()[:, None, None] * gradients.double()).sum(0)
    several = ops.kept_sums(gradients.view(1, 300, 6), scales)[0].view(3, 2)
    for found in (
        record.clipped_sum(scales),
        record.merge(KeptRecord(torch.zeros_like(gradients))).clipped_sum(scales),
        ops.kept_sum(gradients, scales),
        ops.parted_sum([gradients[:100], gradients[100:]], scales),
        several,
        ops.kept_sums(gradients.view(1, 300, 6), scales[None])[0].view(3, 2),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "threshold", "size"),
    [
        (torch.bfloat16, 1.0, 1.0, 1.0),
        (torch.float16, 4096.0, 1.0, 1.0),
        (torch.float16, 4096.0, 0.1, 2.5),
        (torch.float16, 65536.0, 0.1, 0.15),
    ],
)
def test_no_contribution_passes_the_threshold(
    dtype: torch.dtype, loss_scale: float, threshold: float, size: float
) -> None:
    """Of one row a batch, with the rule of docs/own_layer.md."""
    torch.manual_seed(0)
    model = nn.Sequential(Scale(512)).to(dtype)
    _, private, optimizer, _ = make_private(model, batch_size=1, max_grad_norm=threshold)
    scaler = GradScaler(init_scale=loss_scale)
    for step in range(40):
        optimizer.zero_grad()
        x = (torch.rand(1, 512) + 0.5).to(dtype)
        scaler.scale((private(x).float() * size * 1.02**step).sum()).backward()
        total = model[0].gamma.summed_grad
        assert total.dtype == torch.float32
        found = total.double().norm().item()
        assert found <= threshold
        assert found > 0.99 * threshold
        scaler.step(optimizer)
        scaler.update()
