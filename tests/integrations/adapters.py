"""A BERT with LoRA adapters, and a batch for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.integrations.tiny import VOCABULARY, bert
from tests.oracle import Batch

peft = pytest.importorskip("peft", reason="peft is not installed")


def lora(model: nn.Module | None = None, **options) -> nn.Module:
    """Adapters of rank 2 on the queries and values, all of whose matrices have a gradient."""
    told = {"r": 2, "lora_alpha": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
    adapted = peft.get_peft_model(
        bert() if model is None else model, peft.LoraConfig(**told | options)
    )
    torch.manual_seed(1)
    for name, p in adapted.named_parameters():
        if "lora" in name:
            p.data += 0.2 * torch.randn_like(p)
    return adapted.train()


def batch() -> Batch:
    ids = torch.randint(3, VOCABULARY, (4, 6))
    lengths = torch.tensor([[6], [2], [5], [4]])
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(6) < lengths).long()}
    return Batch(kwargs=inputs, target=torch.tensor([0, 1, 2, 1]))
