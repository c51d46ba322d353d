"""LoRA, biases alone, a head alone: norms and sums of one sample at a time in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fastclip.integrations import bias_only, head_only
from tests.integrations.adapters import batch, lora, peft
from tests.integrations.tiny import VOCABULARY, bert, gpt2
from tests.models.test_transformers import (
    classify,
    float64_throughout,  # noqa: F401 -- a fixture: transformers rounds to float32 in places
    predict_next,
)
from tests.oracle import DTYPES, Batch, backward, check_exact, make_private, relative_error


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"bias": "lora_only", "use_rslora": True}])
def test_lora_is_exact(options: dict, dtype: torch.dtype) -> None:
    check_exact(lora(**options), batch(), classify, dtype=dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"use_dora": True}, {"target_modules": ["word_embeddings"]}])
def test_matrices_outside_of_layers(options: dict, dtype: torch.dtype) -> None:
    """DoRA's magnitudes, and adapters of an embedding."""
    check_exact(lora(**options), batch(), classify, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ia3(dtype: torch.dtype) -> None:
    """A gain for every feature of a layer's output."""
    told = {"target_modules": ["query"], "feedforward_modules": [], "task_type": "SEQ_CLS"}
    model = peft.get_peft_model(bert(), peft.IA3Config(**told)).train()
    check_exact(model, batch(), classify, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_on_transposed_weights(dtype: torch.dtype) -> None:
    told = {
        "target_modules": ["c_attn", "c_proj"],
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": True,
    }
    tokens = torch.randint(3, VOCABULARY, (4, 6))
    example = Batch(kwargs={"input_ids": tokens}, target=tokens)
    check_exact(lora(gpt2(), **told), example, predict_next, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora_dropout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are those of the masks that were drawn: each row is replayed with its own."""
    masks: list[torch.Tensor] = []
    row: int | None = None
    turn = 0

    def dropout(x, p=0.5, training=True, inplace=False):
        nonlocal turn
        if not training or p == 0:
            return x
        if row is None:
            masks.append((torch.rand(x.shape) > p).double() / (1 - p))
            return x * masks[-1].to(x.dtype)
        turn += 1
        return x * masks[turn - 1][row : row + 1].to(x.dtype)

    model = lora(lora_dropout=0.5).to(dtype)
    example = batch().to(dtype)
    twin = lora(lora_dropout=0.5).double()
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    monkeypatch.setattr(F, "dropout", dropout)
    backward(private, example, classify)
    assert masks
    expected = []
    for row in range(4):
        turn = 0
        one = example.to(torch.float64).row(row)
        twin.zero_grad()
        classify(twin(*one.args, **one.kwargs), one.target).sum().backward()
        grads = [p.grad for p in twin.parameters() if p.grad is not None]
        expected.append(torch.stack([g.norm() for g in grads]).norm())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative_error(optimizer.per_sample_norms, torch.stack(expected)) < tolerance


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", [(), "classifier"])
def test_biases_alone_are_exact(head: str | tuple, dtype: torch.dtype) -> None:
    model = bias_only(bert(), head)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(name.endswith("bias") or name.startswith("classifier.") for name in names)
    assert ("classifier.weight" in names) == bool(head)
    check_exact(model, batch(), classify, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_alone_is_exact(dtype: torch.dtype) -> None:
    check_exact(head_only(bert(), ["bert.pooler", "classifier"]), batch(), classify, dtype=dtype)


FORMS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    },
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradient_checkpointing(form: str, adapted: bool) -> None:
    """As transformers switches it on, of the whole model and of adapters behind frozen embeddings."""
    model = gpt2().train()
    model.gradient_checkpointing_enable(FORMS[form])
    if adapted:
        model.enable_input_require_grads()
        told = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
        model = lora(model, task_type="CAUSAL_LM", **told)
    tokens = torch.randint(3, VOCABULARY, (4, 6))
    example = Batch(kwargs={"input_ids": tokens}, target=tokens)
    check_exact(model, example, predict_next, dtype=torch.float64)
