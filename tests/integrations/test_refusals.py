"""What a Trainer may be asked for and is not supported is refused, with the way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fastclip import clipping
from fastclip.integrations.huggingface import check_training_arguments
from fastclip.losses import per_sample_cross_entropy
from tests.integrations.tiny import (
    BATCH,
    bert,
    furthest,
    gpt2,
    hf,
    integration,
    pad,
    pad_tokens,
    rows,
    trainer,
    weights,
)
from tests.refusal import refused


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        ({"max_grad_norm": 0.1}, "per_sample_max_grad_norm"),
        ({"auto_find_batch_size": True}, "Choose per_device_train_batch_size"),
        ({"train_sampling_strategy": "group_by_length"}, "Leave it at 'random'"),
        ({"dataloader_drop_last": True}, "Leave it False"),
        ({"neftune_noise_alpha": 5.0}, "Omit it"),
        ({"optim": "lomo"}, "Use 'adamw_torch'"),
    ],
)
def test_arguments(tmp_path: Path, arguments: dict, way_out: str) -> None:
    with refused(way_out):
        trainer(tmp_path, arguments=arguments)


@pytest.mark.parametrize(
    ("changed", "way_out"),
    [
        ({"fp16": True}, "Use bf16=True"),
        ({"deepspeed": {"stage": 2}}, "Start one process per GPU"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "Use version 2"),
        ({"parallelism_config": object()}, "Start one process per GPU"),
        ({"n_gpu": 2}, "Start one process per GPU"),
        ({"use_liger_kernel": True}, "Omit it"),
        ({"torch_compile": True}, "Omit it"),
    ],
)
def test_arguments_that_need_other_hardware(changed: dict, way_out: str) -> None:
    """transformers itself refuses these on a CPU: only the check is asked."""
    ordinary = {"max_grad_norm": 1.0, "world_size": 1, "n_gpu": 1, "optim": "adamw_torch"}
    privacy = integration.PrivacyArguments(1.0, 1e-5, noise_multiplier=1.0)
    check_training_arguments(SimpleNamespace(**ordinary), privacy)
    with refused(rf"^TrainingArguments\(.*\) is not supported: .*{way_out}"):
        check_training_arguments(SimpleNamespace(**(ordinary | changed)), privacy)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"noise_multiplier": 1.0, "target_epsilon": 1.0},
        {"noise_multiplier": 1.0, "target_delta": 2.0},
    ],
)
def test_privacy_arguments(told: dict) -> None:
    with refused("expects"):
        integration.PrivacyArguments(
            **({"per_sample_max_grad_norm": 1.0, "target_delta": 0.1} | told)
        )


def test_privacy_arguments_come_from_a_command_line() -> None:
    parser = hf.HfArgumentParser(integration.PrivacyArguments)
    words = (
        "--per_sample_max_grad_norm 0.5 --target_delta 1e-5 --target_epsilon 3 --clipping adaptive"
    )
    (told,) = parser.parse_args_into_dataclasses(words.split())
    assert told == integration.PrivacyArguments(0.5, 1e-5, target_epsilon=3.0, clipping="adaptive")


def test_a_shuffled_run_may_drop_its_last_batch(tmp_path: Path) -> None:
    arguments = {"dataloader_drop_last": True}
    run = trainer(
        tmp_path, privacy={"poisson_sampling": False}, arguments=arguments, train_dataset=rows(20)
    )
    run.train()
    assert run.state.global_step == 4


class TokenMean(nn.Module):
    """A language model whose own loss is a mean over all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def test_a_mean_over_tokens(tmp_path: Path) -> None:
    """Of the model's own it is replaced by the mean of the rows' own."""

    def each_row(outputs, labels, num_items_in_batch=None):
        return per_sample_cross_entropy(outputs["logits"], labels)

    found = []
    for loss in (None, each_row):
        torch.manual_seed(0)
        model = TokenMean()
        trainer(
            tmp_path, model, data_collator=pad_tokens, compute_loss_func=loss,
            arguments={"max_steps": 2},
        ).train()  # fmt: skip
        found.append(weights(model))
    assert furthest(*found) < 1e-6


def test_a_loss_of_pairs(tmp_path: Path) -> None:
    """In-batch negatives."""

    def contrastive(outputs, labels, num_items_in_batch=None):
        similarity = outputs.logits @ outputs.logits.T
        return F.cross_entropy(similarity, torch.arange(len(labels)))

    with refused("couples samples"):
        trainer(tmp_path, compute_loss_func=contrastive).train()


def test_losses_of_tokens(tmp_path: Path) -> None:
    """Their mean would divide by the length that the batch was padded to."""

    def tokens(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="none")

    run = trainer(tmp_path, TokenMean(), data_collator=pad_tokens, compute_loss_func=tokens)
    with refused("Average inside each sample first"):
        run.train()


def test_a_classifier_with_a_loss_of_its_own(tmp_path: Path) -> None:
    """Cross entropy does not take its place."""

    def focal(outputs, labels, num_items_in_batch=None):
        losses = F.cross_entropy(outputs["logits"], labels, reduction="none")
        return (1 - (-losses).exp()) ** 2 * losses

    class FocalForSequenceClassification(hf.BertForSequenceClassification):
        def forward(self, input_ids, attention_mask=None, labels=None):
            output = super().forward(input_ids, attention_mask)
            if labels is not None:
                output["loss"] = focal(output, labels).mean()
            return output

    found = []
    for kind, loss in ((FocalForSequenceClassification, None), (type(bert()), focal)):
        torch.manual_seed(0)
        model = kind(bert().config)
        trainer(tmp_path, model, compute_loss_func=loss, arguments={"max_steps": 2}).train()
        found.append(weights(model))
    assert furthest(*found) < 1e-6


def test_smoothed_answers(tmp_path: Path) -> None:
    """No loss of transformers: smoothing would reward padding."""
    model = hf.BertForQuestionAnswering(bert().config)
    data = [{"input_ids": [5, 6, 7], "start_positions": 1, "end_positions": 2} for _ in range(24)]
    with refused("compute_loss_func"):
        trainer(
            tmp_path, model, train_dataset=data, data_collator=None,
            arguments={"label_smoothing_factor": 0.1},
        ).train()  # fmt: skip


def test_strategies_that_need_the_whole_batch(tmp_path: Path) -> None:
    told = {"clipping": clipping.dpsgd_f(2, thresholds="same_step"), "group_column": "group"}
    with refused("previous_step"):
        trainer(tmp_path, physical=4, accumulation=2, privacy=told)
    trainer(tmp_path, privacy=told).train()


def test_a_search_over_hyperparameters(tmp_path: Path) -> None:
    with refused("fastclip.accounting --trials"):
        trainer(tmp_path).hyperparameter_search()


def test_data_without_a_length(tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(rows())

    with refused("with a length"):
        trainer(tmp_path, train_dataset=Stream(), arguments={"max_steps": 2}).train()


def test_a_sampler_of_the_users_own(tmp_path: Path) -> None:
    """It would choose some rows, and all are drawn from."""
    run = trainer(tmp_path, arguments={"max_steps": 2})
    chosen = type("Chosen", (type(run),), {"_get_train_sampler": lambda self, data=None: None})
    run.__class__ = chosen
    with refused("overrides _get_train_sampler.*train_dataset"):
        run.train()


def test_a_loader_of_the_users_own(tmp_path: Path) -> None:
    """Whether it is another, or the private one with another collator, nothing is released."""

    class Another(integration.PrivateTrainer):
        def get_train_dataloader(self):
            super().get_train_dataloader()
            return DataLoader(self.train_dataset, BATCH, collate_fn=pad)

    class Plain(Another):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, BATCH, collate_fn=pad)

    class Changed(integration.PrivateTrainer):
        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            loader.collate_fn = pad
            return loader

    for kind in (Another, Plain, Changed):
        run = trainer(tmp_path, kind=kind)
        with refused(f"{kind.__name__}.get_train_dataloader.*return super.*train_dataset"):
            run.train()
        assert run.engine.accountant.history == []


@pytest.mark.slow
def test_a_checkpoint_of_an_ordinary_trainer(tmp_path: Path) -> None:
    run = trainer(tmp_path, arguments={"save_strategy": "epoch"})
    run.train()
    (tmp_path / "checkpoint-3" / "privacy_accountant.json").unlink()
    with refused("the privacy cost of its run is unknown"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_batch_norm_and_leaks_are_the_engine_s_to_refuse(tmp_path: Path) -> None:
    model = gpt2()
    model.extra = nn.BatchNorm1d(4)
    with refused("get_compatible_module"):
        trainer(tmp_path, model, data_collator=pad_tokens).train()
