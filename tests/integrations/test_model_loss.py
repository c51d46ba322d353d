"""model_loss="per_sample": heads of transformers against one sample at a time, by their own loss."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle import (
    Batch,
    assert_sums,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    summed,
)
from tests.refusal import refused

hf = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY, SAMPLES, LONGEST, IGNORED = 30, 5, 7, -100
LENGTHS = (7, 5, 4, 3, 6)
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 12, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert(head: str, **more: Any) -> nn.Module:
    return getattr(hf, head)(hf.BertConfig(**BERT, **more))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=12, embd_pdrop=0.0,
            attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def bart() -> nn.Module:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCABULARY, d_model=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12,
            max_position_embeddings=12, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=2, forced_eos_token_id=2,
        )
    )  # fmt: skip


def tokens(classes: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Labels of a sample's own tokens; those of the last sample count for nothing but one."""
    labels = torch.randint(0, classes, (SAMPLES, LONGEST))
    for i, length in enumerate(LENGTHS):
        labels[i, length:] = IGNORED
    labels[-1, :2] = IGNORED
    return {"labels": labels}


def classes() -> dict[str, torch.Tensor]:
    return {"labels": torch.tensor([0, 1, 2, 1, 0])}


def ends() -> dict[str, torch.Tensor]:
    """One lies outside of what its sample holds."""
    return {
        "start_positions": torch.tensor([0, 1, 2, 1, 20]),
        "end_positions": torch.tensor([3, 4, 3, 2, 5]),
    }


HEADS: dict[str, tuple[Any, Any]] = {
    "causal": (llama, tokens),
    "causal, older": (gpt2, tokens),
    "masked": (lambda: bert("BertForMaskedLM"), tokens),
    "tokens": (lambda: bert("BertForTokenClassification", num_labels=3), lambda: tokens(3)),
    "classes": (lambda: bert("BertForSequenceClassification", num_labels=3), classes),
    "several": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        lambda: {"labels": torch.randint(0, 2, (SAMPLES, 3)).double()},
    ),
    "numbers": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        lambda: {"labels": torch.randn(SAMPLES, dtype=torch.float64)},
    ),
    "answers": (lambda: bert("BertForQuestionAnswering"), ends),
    "choices": (lambda: bert("BertForMultipleChoice"), classes),
    "t5": (t5, tokens),
    "bart": (bart, tokens),
}
RAGGED = ["causal", "causal, older", "masked", "tokens", "t5", "bart"]
"""Whose own loss divides by the labels of the batch."""


def case(head: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    make, labels = HEADS[head]
    model = make().double().train()
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LONGEST))
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head == "choices":
        inputs = {n: torch.stack([x, x.roll(1, 0), x.roll(2, 0)], 1) for n, x in inputs.items()}
    return model, {**inputs, **labels()}


def alone(batch: Batch, i: int) -> Batch:
    """A sample without its padding."""
    length = int(batch.kwargs["attention_mask"][i].sum(-1).max())
    cut = {
        n: x[i : i + 1, ..., :length] if n in ("input_ids", "attention_mask") else x[i : i + 1]
        for n, x in batch.kwargs.items()
    }
    if batch.kwargs.get("labels", torch.zeros(1)).shape == batch.kwargs["input_ids"].shape:
        cut["labels"] = cut["labels"][:, :length]
    return Batch(kwargs=cut)


def own_loss(output: Any, _: Any) -> torch.Tensor:
    """The model's own loss of one sample; of several only how many there are."""
    rows = (output.start_logits if "start_logits" in output else output.logits).shape[0]
    return output.loss.expand(rows)


def check(model: nn.Module, batch: dict[str, Any], *, steps: int = 1, tol: float = 1e-5) -> Any:
    """The sums are those of one sample at a time, and move by C at most without any of them."""
    given = {n: x for n, x in batch.items() if isinstance(x, torch.Tensor) and x.dim()}
    grads = per_sample_gradients(model, Batch(kwargs=given, take=alone), own_loss)
    found = norms(grads)
    threshold = found.quantile(0.5).item()
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=threshold, model_loss="per_sample", batch_size=SAMPLES, lr=0.0
    )
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for _ in range(steps):
        optimizer.zero_grad()
        private(**batch).loss.backward()
        whole = summed(params)
        assert relative_error(optimizer.per_sample_norms, found) <= tol
        assert_sums(whole, clipped_sum(grads, threshold), tol)
        optimizer.step()
    for i in range(SAMPLES):
        kept = [k for k in range(SAMPLES) if k != i]
        optimizer.zero_grad()
        fewer = {n: x[kept] if n in given else x for n, x in batch.items()}
        private(**fewer).loss.backward()
        moved = [(whole[n] - x).norm() for n, x in summed(params).items()]
        assert float(torch.stack(moved).norm()) <= threshold * (1 + tol)
        optimizer.step()
    return private


@pytest.mark.parametrize("head", HEADS)
def test_sums_are_those_of_one_sample_at_a_time(head: str) -> None:
    check(*case(head))


@pytest.mark.parametrize("head", RAGGED)
def test_the_error_offers_it(head: str) -> None:
    model, batch = case(head)
    _, private, _, _ = make_private(model)
    with refused('model_loss="per_sample"'):
        private(**batch).loss.backward()


def test_a_sample_without_labels_contributes_nothing() -> None:
    model, batch = case("masked")
    batch["labels"][1] = IGNORED
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1, model_loss="per_sample")
    private(**batch).loss.backward()
    assert optimizer.per_sample_norms[1] < 1e-30
    assert bool((optimizer.per_sample_norms[[0, 2, 3, 4]] > 0).all())


def test_the_count_of_a_trainer_is_ignored_and_all_is_said_once() -> None:
    model, batch = case("causal")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(model, {**batch, "num_items_in_batch": torch.tensor(1000)}, steps=3)
    told = [str(each.message) for each in said if "model_loss" in str(each.message)]
    assert sum("LlamaForCausalLM" in each for each in told) == 1
    assert sum("num_items_in_batch" in each for each in told) == 1
    assert len(told) == 2


def test_nothing_is_said_of_a_loss_that_stays() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(*case("classes"))
    assert [str(each.message) for each in said if "model_loss" in str(each.message)] == []


@pytest.mark.parametrize("head", ["causal", "tokens"])
def test_evaluation_and_cleanup_have_the_model_s_own_loss(head: str) -> None:
    model, batch = case(head)
    own = model(**batch).loss.item()
    _, private, _, _ = make_private(model, model_loss="per_sample")
    with torch.no_grad():
        assert private.eval()(**batch).loss.item() == pytest.approx(own, rel=1e-6)
    trained = private.train()(**batch).loss
    assert abs(trained.item() - own) > 1e-6
    private.cleanup()
    assert model(**batch).loss.item() == pytest.approx(own, rel=1e-6)
    assert [name for name in vars(model) if "fastclip" in name or name == "_loss_function"] == []
    assert pickle.loads(pickle.dumps(model))(**batch).loss.item() == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("head", ["causal", "tokens"])
def test_a_copy_of_the_private_model(head: str) -> None:
    model, batch = case(head)
    _, private, _, _ = make_private(model, model_loss="per_sample")
    private(**batch).loss.backward()
    twin = copy.deepcopy(private)
    with torch.no_grad():
        for p in private.parameters():
            p.zero_()
    loss = twin(**batch).loss
    loss.backward()
    assert loss.item() != private(**batch).loss.item()
    rows = [alone(Batch(kwargs=batch), i).kwargs for i in range(SAMPLES)]
    with torch.no_grad():
        each = [twin(**row).loss.item() for row in rows]
    assert loss.item() == pytest.approx(sum(each) / SAMPLES, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["causal", "tokens", "answers"])
def test_compiled(head: str) -> None:
    """Also where the loss is computed in the model's own code, which a compiler would trace."""
    model, batch = case(head)
    grads = per_sample_gradients(model, Batch(kwargs=batch, take=alone), own_loss)
    threshold = norms(grads).quantile(0.5).item()
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=threshold, model_loss="per_sample", batch_size=SAMPLES, lr=0.0
    )
    compiled = torch.compile(private, backend="eager")
    for _ in range(5):
        optimizer.zero_grad()
        compiled(**batch).loss.backward()
        found = summed(dict(model.named_parameters()))
        assert_sums(found, clipped_sum(grads, threshold), 1e-5)
        optimizer.step()


@pytest.mark.parametrize("kind", ["lora", "prompts"])
def test_adapters(kind: str) -> None:
    """The loss of what PEFT wraps; behind virtual tokens, too."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, batch = case("causal")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    if kind == "prompts":
        config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).double().train()
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    check(adapted, batch)


@pytest.mark.parametrize("method", ["setter", "plain"])
def test_a_loss_function_that_was_set(method: str) -> None:
    """It is run per sample, and is there again afterwards."""
    model, batch = case("causal")

    def doubled(logits, labels, vocab_size, **kwargs):
        pairs = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        loss = F.cross_entropy if method == "plain" else nn.CrossEntropyLoss()
        return 2 * loss(*pairs)

    model.loss_function = doubled
    private = check(model, batch)
    private.cleanup()
    assert model.loss_function is doubled
