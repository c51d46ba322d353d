"""LoRA on weights of 4 and 8 bits, against one row at a time through the same quantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.oracle import (
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    relative_error,
    sample_loss,
    summed,
)
from tests.page_blocks import blocks

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.extras


def quantized(bits: int, kind: str) -> nn.Module:
    """Two layers whose weights are quantized, with PEFT's own adapters of such layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4)
    )
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
@pytest.mark.parametrize("weights", [(4, "nf4"), (4, "fp4"), (8, "")])
def test_quantized_weights(weights: tuple[int, str], shape: tuple[int, ...]) -> None:
    """In float32, of the very same model: a copy in float64 would have other weights of 8 bits."""
    model, x = quantized(*weights), torch.randn(shape)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads: dict[str, list[torch.Tensor]] = {name: [] for name in trained}
    for i in range(len(x)):
        model.zero_grad()
        sample_loss(model(x[i : i + 1])).sum().backward()
        for name, p in trained.items():
            grads[name].append(p.grad)
            p.grad = None
    stacked = {name: torch.stack(own).double() for name, own in grads.items()}
    found = norms(stacked)
    threshold = found.median().item()
    _, private, optimizer, _ = make_private(model, max_grad_norm=threshold)
    sample_loss(private(x)).mean().backward()
    assert relative_error(optimizer.per_sample_norms, found) < 1e-5
    assert_sums(summed(trained), clipped_sum(stacked, threshold), 1e-5)


def test_the_page(tmp_path: Path) -> None:
    """A model that is loaded in 4 bits, as docs/llm.md shows; only its adapters change."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    code = next(code for code in blocks("docs/llm.md") if "BitsAndBytesConfig" in code)
    known = {"torch": torch, "folder": str(tmp_path)}
    exec(compile(code, "docs/llm.md", "exec"), known)
    model = known["model"].train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(3, 50, (4, 6))
    _, private, optimizer, _ = make_private(model, model_loss="per_sample", max_grad_norm=1e-3)
    private(input_ids=ids, labels=ids).loss.backward()
    assert bool((optimizer.per_sample_norms > 0).all())
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_B" in name}  # which are 0 at first
