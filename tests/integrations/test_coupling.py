"""Rows that are not rows, and losses that couple them, are found before anything is released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastclip.integrations.trainer_loss import Checked
from tests.integrations.tiny import bert, gpt2, hf, integration, pad, pad_tokens, rows, trainer
from tests.refusal import refused

TOKENS = [{"input_ids": row["input_ids"], "label": 0} for row in rows()]


def four_chunks(drawn: list) -> dict:
    return pad([row for row in drawn for _ in range(4)])


def packed(drawn: list) -> dict:
    joined = [token for row in drawn for token in row["input_ids"]][:12]
    return {"input_ids": torch.tensor([joined]), "labels": torch.tensor([joined])}


def dropping(drawn: list) -> dict:
    return pad([row for row in drawn if len(row["input_ids"]) > 4][:1])


def only_inputs(drawn: list) -> dict:
    return {**four_chunks(drawn), "labels": pad(drawn)["labels"]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("collate", [four_chunks, packed, dropping, only_inputs])
def test_a_row_must_stay_a_row(tmp_path: Path, collate) -> None:
    model = gpt2() if collate is packed else bert()
    run = trainer(tmp_path, model, data_collator=collate)
    with refused(r"at most \d+ samples in this|errors\.html#data-order|(repeats|mixes) samples?"):
        run.train()
    assert run.engine.accountant.history == []


def test_the_placeholder_row_is_one_row() -> None:
    from fastclip.integrations.trainer_run import SplitCollate

    with refused("returned 4 samples for 1 samples"):
        SplitCollate(four_chunks, rows(), 8)([])
    assert SplitCollate(pad, rows(), 8)([]).sizes == [0]


def token_losses(outputs, labels) -> torch.Tensor:
    logits = outputs["logits"][:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    return token_losses(outputs, labels).sum() / (labels[:, 1:] != -100).sum()


def each_token(outputs, labels, num_items_in_batch=None):
    return token_losses(outputs, labels).flatten()


def each_valid_token(outputs, labels, num_items_in_batch=None):
    return token_losses(outputs, labels)[labels[:, 1:] != -100]


def each_row(outputs, labels, num_items_in_batch=None):
    return token_losses(outputs, labels).sum(1) / (labels[:, 1:] != -100).sum(1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("loss", [mean_over_tokens, each_token, each_valid_token])
def test_losses_of_tokens(tmp_path: Path, loss, bf16: bool) -> None:
    """A fresh model gives every token the same loss, and bf16 rounds what is left of a difference."""
    run = trainer(
        tmp_path, gpt2(), data_collator=pad_tokens, train_dataset=TOKENS, compute_loss_func=loss,
        arguments={"bf16": bf16},
    )  # fmt: skip
    with refused("Average inside each sample|couples samples"):
        run.train()
    assert run.engine.accountant.history == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_of_rows_passes(tmp_path: Path, bf16: bool) -> None:
    run = trainer(
        tmp_path, gpt2(), data_collator=pad_tokens, train_dataset=TOKENS, compute_loss_func=each_row,
        arguments={"bf16": bf16, "max_steps": 2},
    )  # fmt: skip
    run.train()
    assert run.state.global_step == 2


class LanguageModel(nn.Module):
    """Whose own loss is a mean over tokens, or over rows."""

    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.loss = nn.Embedding(50, 8), nn.Linear(8, 50), loss
        nn.init.normal_(self.head.weight, std=1e-4)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids, attention_mask=None, labels=None):
        outputs = {"logits": self.head(self.embedding(input_ids))}
        return {"loss": self.loss(outputs, labels).mean(), **outputs}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bf16", [False, True])
def test_the_model_s_own_mean_over_tokens(tmp_path: Path, bf16: bool) -> None:
    """All its losses are ln 50, so only gradients tell."""
    told = {"data_collator": pad_tokens, "train_dataset": TOKENS, "arguments": {"bf16": bf16}}
    with refused("is part of the loss|whole batch|mixes samples"):
        trainer(tmp_path, LanguageModel(mean_over_tokens), **told).train()
    run = trainer(tmp_path, LanguageModel(each_row), **told)
    run.train()
    assert run.state.global_step == 6


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_weighted_classes(tmp_path: Path, seed: int) -> None:
    """Their mean divides by the weights of the batch; most batches here hold one class only."""
    rare = [{**row, "label": 1 if i > 20 else 0} for i, row in enumerate(rows())]
    weight = torch.tensor([1.0, 10.0, 1.0])
    seen = []

    def weighted(outputs, labels, num_items_in_batch=None):
        seen.append(len(set(labels.tolist())) > 1)
        return F.cross_entropy(outputs.logits, labels, weight=weight)

    run = trainer(
        tmp_path, train_dataset=rare, compute_loss_func=weighted,
        arguments={"data_seed": seed, "num_train_epochs": 4},
    )  # fmt: skip
    with refused("couples samples|by a number of the whole batch"):
        run.train()
    assert sum(seen) <= 2 + 8  # in the first batch that can show it


def test_ignored_rows(tmp_path: Path) -> None:
    """A mean over the rows that have a label divides by their number."""
    some = [{**row, "label": -100 if i % 3 == 0 else 1} for i, row in enumerate(rows())]

    def mean(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels)

    with refused("couples samples"):
        trainer(tmp_path, train_dataset=some, compute_loss_func=mean).train()


@pytest.mark.slow
def test_losses_that_do_not_take_any_number(tmp_path: Path) -> None:
    """Probabilities: the model's own outputs are looked at instead."""

    class Probabilities(hf.BertForSequenceClassification):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return {"p": super().forward(input_ids, attention_mask).logits.softmax(-1)}

    def entropy(outputs, labels):
        return F.binary_cross_entropy(outputs["p"], F.one_hot(labels, 3).float(), reduction="none")

    def own(outputs, labels, num_items_in_batch=None):
        return entropy(outputs, labels).mean(1)

    def coupled(outputs, labels, num_items_in_batch=None):
        return entropy(outputs, labels).mean() * (labels == 1).float().mean()

    trainer(tmp_path, Probabilities(bert().config), compute_loss_func=own).train()
    with refused("couples samples"):
        trainer(tmp_path, Probabilities(bert().config), compute_loss_func=coupled).train()


def test_a_batch_is_looked_at_while_it_may_show_more() -> None:
    def batch(*labels: int) -> dict:
        return {"labels": torch.tensor(labels)}

    checked = Checked()
    for labels, due in (
        ((1,), False),
        ((0, 0), True),
        ((0, 0), True),
        ((0, 1), True),
        ((1, 0, 0), False),
        ((2, 3), True),
        ((1, 2), True),
        ((0, 3), False),
        ((0, -100), True),
    ):
        assert checked.due(batch(*labels)) == due, labels
        if due:
            checked.done(batch(*labels))


def test_a_subclass_with_a_loss_of_its_own() -> None:
    class Mine(integration.PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    with refused("Mine overrides compute_loss.*compute_loss_func"):
        Mine(
            bert(), hf.TrainingArguments("unused", use_cpu=True),
            privacy=integration.PrivacyArguments(1.0, 1e-3, noise_multiplier=1.0),
        )  # fmt: skip
