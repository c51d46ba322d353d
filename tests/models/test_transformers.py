"""Tiny, randomly initialized networks of transformers, exact sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from tests.oracle import DTYPES, Batch, check_exact

ROWS, VOCABULARY = 3, 97
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 20,
    "num_labels": 5,
}


@pytest.fixture(autouse=True)
def float64_throughout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds norms and softmax to float32; in float64 cases these casts do nothing.

    Rounding makes a sample's gradient depend on how it was batched, to 1e-7: more than what is
    tested here.
    """
    if request.node.callspec.params.get("dtype") != torch.float32:
        keep_float64(monkeypatch)


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts of float64 to float32 do nothing, whoever asks for them."""
    to, to_float, softmax = torch.Tensor.to, torch.Tensor.float, F.softmax

    def keeps(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        narrows = torch.float32 in (*args[:1], kwargs.get("dtype"))
        return x if narrows and x.dtype == torch.float64 else to(x, *args, **kwargs)

    def wide_softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            kwargs.pop("dtype", None)
        return softmax(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", keeps)
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)
    )
    monkeypatch.setattr(F, "softmax", wide_softmax)


def bert() -> nn.Module:
    """Absolute positions [1, t], token types, pooler."""
    return hf.BertForSequenceClassification(hf.BertConfig(**BERT))


def roberta() -> nn.Module:
    """Positions counted from the padding id, which has no gradient."""
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**BERT))


def distilbert() -> nn.Module:
    """No token types."""
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, dropout=0.0,
            attention_dropout=0.0, seq_classif_dropout=0.0, max_position_embeddings=20,
            num_labels=5,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """transformers' Conv1D; the head is the embedding's matrix."""
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=20,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """One matrix for both embeddings and the head; relative biases without a batch dimension."""
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=True,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    """Raw class token and position embedding in front of convolved patches."""
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            **SIZES, intermediate_size=48, image_size=16, patch_size=8, num_labels=5,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    """Its own RMSNorm, gated MLP, grouped queries, no tied weights."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **SIZES, vocab_size=VOCABULARY, intermediate_size=48, num_key_value_heads=2,
            max_position_embeddings=20,
        )
    )  # fmt: skip


def ids(length: int) -> torch.Tensor:
    """Tokens that are never special ones."""
    return torch.randint(3, VOCABULARY, (ROWS, length))


def classify(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Each row's own cross entropy, [b]."""
    return F.cross_entropy(output.logits, labels, reduction="none")


def predict(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Each row's own mean over its positions, [b]."""
    return F.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none").mean(1)


def predict_next(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The same, one position ahead."""
    logits = output.logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


def randomized(model: nn.Module, attention: str = "eager") -> nn.Module:
    """As in training: no zero biases and no unit gains; no key-value cache."""
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.set_attn_implementation(attention)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.train()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [ROWS, 7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [bert, roberta, distilbert])
def test_classifiers(make: Callable, padded: bool, length: int, dtype: torch.dtype) -> None:
    inputs = {"input_ids": ids(length)}
    if padded:
        lengths = torch.tensor([[length], [1], [length - 1]])
        inputs["attention_mask"] = (torch.arange(length) < lengths).long()
    batch = Batch(kwargs=inputs, target=torch.tensor([0, 3, 4]))
    check_exact(randomized(make()), batch, classify, dtype=dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [ROWS, 7])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_models(make: Callable, length: int, dtype: torch.dtype) -> None:
    tokens = ids(length)
    batch = Batch(kwargs={"input_ids": tokens}, target=tokens)
    check_exact(randomized(make()), batch, predict_next, dtype=dtype)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "target"), [(7, 5), (ROWS, 5), (6, ROWS), (ROWS, ROWS)])
def test_encoder_decoder(source: int, target: int, dtype: torch.dtype) -> None:
    """Either length may equal the number of rows."""
    labels = ids(target)
    batch = Batch(
        kwargs={"input_ids": ids(source), "decoder_input_ids": labels.roll(1, 1)}, target=labels
    )
    check_exact(randomized(t5()), batch, predict, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_images(loss_reduction: str, dtype: torch.dtype) -> None:
    batch = Batch(
        kwargs={"pixel_values": torch.randn(ROWS, 3, 16, 16)}, target=torch.tensor([0, 3, 4])
    )
    model = randomized(vit())
    check_exact(model, batch, classify, dtype=dtype, loss_reduction=loss_reduction)


@pytest.mark.parametrize("make", [bert, gpt2, t5])
def test_fused_attention(make: Callable) -> None:
    tokens = ids(7)
    inputs, loss_fn, target = {"input_ids": tokens}, predict, tokens
    if make is t5:
        inputs["decoder_input_ids"] = tokens.roll(1, 1)
    if make is bert:
        loss_fn, target = classify, torch.tensor([0, 3, 4])
    batch = Batch(kwargs=inputs, target=target)
    model, dtype = randomized(make(), attention="sdpa"), torch.float64
    check_exact(model, batch, loss_fn, dtype=dtype)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("padded", [0, 1])
def test_a_mask_that_is_left_out_where_no_row_is_padded(padded: int) -> None:
    """transformers gives fused attention T5's bias alone then, as among copies of an unpadded row."""
    source, labels = ids(6), ids(5)
    keep = torch.ones_like(source)
    keep[padded, 2:] = 0
    inputs = {"input_ids": source, "attention_mask": keep, "labels": labels.clone()}
    labels[2, 3:] = inputs["labels"][2, 3:] = -100

    def predict_labels(output: Any, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels != -100).sum(1)

    model = randomized(t5(), attention="sdpa")
    check_exact(model, Batch(kwargs=inputs, target=labels), predict_labels, dtype=torch.float64)
