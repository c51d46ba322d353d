"""Opacus' multi-head attention, with the extra rows that it can append to keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPMultiheadAttention
from torch import nn

from tests.oracle import DTYPES, Batch, check_exact, sample_loss

EXTRAS = {
    "plain": {},
    "no-bias": {"bias": False},
    "bias-kv": {"add_bias_kv": True},
    "zero-attention": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}


def columns(batch: Batch, i: int) -> Batch:
    """Sample i where the batch is dimension 1."""
    return Batch(tuple(x[:, i : i + 1] for x in batch.args))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("extras", EXTRAS)
def test_as_the_root(extras: str, batch_first: bool, dtype: torch.dtype) -> None:
    """Queries, keys and values of their own lengths and widths."""
    model = DPMultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=batch_first, **EXTRAS[extras])
    inputs = (torch.randn(3, 4, 8), torch.randn(3, 7, 5), torch.randn(3, 7, 6))
    batch = Batch(inputs)
    if not batch_first:
        batch = Batch(tuple(x.transpose(0, 1) for x in inputs), take=columns)

    def loss_fn(output: tuple, _: Any) -> torch.Tensor:
        return sample_loss(output[0] if batch_first else output[0].transpose(0, 1))

    check_exact(model, batch, loss_fn, dtype=dtype, batch_first=batch_first)


class Encoder(nn.Module):
    """One post-norm block of self-attention over embedded tokens."""

    def __init__(self, batch_first: bool, **extras: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.attention = DPMultiheadAttention(8, 2, batch_first=batch_first, **extras)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        y = x if self.attention.batch_first else x.transpose(0, 1)
        y, _ = self.attention(y, y, y, key_padding_mask=padding, need_weights=False)
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return self.head(self.norm(x + y))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [3, 5])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("extras", EXTRAS)
def test_in_a_block(extras: str, batch_first: bool, positions: int, dtype: torch.dtype) -> None:
    """With three positions there are as many as samples."""
    model = Encoder(batch_first, **EXTRAS[extras])
    check_exact(model, torch.randint(9, (3, positions)), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_padding_mask(loss_reduction: str, dtype: torch.dtype) -> None:
    padding = torch.arange(5) >= torch.tensor([[5], [2], [4]])
    batch = (torch.randint(9, (3, 5)), padding)
    check_exact(Encoder(True), batch, dtype=dtype, loss_reduction=loss_reduction)
