"""LoRA on weights of 4 and 8 bits, against one row at a time through the same quantized weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import check_exact

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.extras


def quantized(bits: int, kind: str) -> nn.Module:
    """Two layers whose weights are quantized, with PEFT's own adapters of such layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4))
    for i in (0, 2):
        was = model[i]
        size = was.in_features, was.out_features
        if bits == 4:
            layer = bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type=kind)
        else:
            layer = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
        layer.load_state_dict({name: p.detach() for name, p in was.named_parameters()})
        model[i] = layer.to("cpu")
    setattr(model, f"is_loaded_in_{bits}bit", True)
    told = {"target_modules": ["0", "2"], "r": 4, "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=["4"], **told))
    assert "bnb" in type(adapted.base_model.model[0]).__module__
    assert adapted.base_model.model[0].weight.dtype == (torch.uint8 if bits == 4 else torch.int8)
    return adapted


@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind: str, shape: tuple[int, ...]) -> None:
    check_exact(quantized(4, kind), torch.randn(shape), dtype=torch.float32)


def test_eight_bits() -> None:
    check_exact(quantized(8, ""), torch.randn(5, 64), dtype=torch.float32)
