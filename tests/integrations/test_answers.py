"""Extractive question answering with a PrivateTrainer: a row is computed without its padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastclip.losses import per_sample_cross_entropy
from tests.integrations.test_trainer import Sums
from tests.integrations.tiny import bert, furthest, hf, pad, rows, trainer, weights
from tests.oracle import Batch, clipped_sum, norms, per_sample_gradients, relative_error
from tests.refusal import refused


def answering(kind: type[nn.Module] = hf.BertForQuestionAnswering) -> nn.Module:
    config = bert().config
    config.num_labels = 2
    torch.manual_seed(0)
    return kind(config).double()


def questions() -> list[dict[str, Any]]:
    """Rows of 4 to 10 tokens; the ends of some lie beyond them."""
    return [
        {"input_ids": row["input_ids"], "start": i % 6, "end": i % 6 + i % 3}
        for i, row in enumerate(rows())
    ]


def pad_questions(drawn: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = pad([{"input_ids": row["input_ids"], "label": 0} for row in drawn])
    del batch["labels"]
    ends = {
        f"{end}_positions": torch.tensor([row[end] for row in drawn]) for end in ("start", "end")
    }
    return batch | ends


def alone(batch: Batch, i: int) -> Batch:
    """A row without its padding."""
    length = int(batch.kwargs["attention_mask"][i].sum())
    inputs = {name: x[i : i + 1, :length] for name, x in batch.kwargs.items()}
    return Batch(kwargs=inputs, target=batch.target[i : i + 1])


def own(output: Any, ends: torch.Tensor) -> torch.Tensor:
    """Of rows without padding, by the definition."""
    losses = []
    for logits, positions in zip(
        (output.start_logits, output.end_logits), ends.unbind(1), strict=True
    ):
        outside = logits.shape[1]
        losses.append(
            F.cross_entropy(
                logits, positions.clamp(max=outside), ignore_index=outside, reduction="none"
            )
        )
    return (losses[0] + losses[1]) / 2


def by_answers(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own, which is given what the model calls its labels."""
    assert set(labels) == {"start_positions", "end_positions"}
    return sum(
        per_sample_cross_entropy(outputs[f"{end}_logits"], labels[f"{end}_positions"]) / 2
        for end in ("start", "end")
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("physical", [2, 8])
def test_sums_are_those_of_one_row_at_a_time(tmp_path: Path, physical: int) -> None:
    model, sums, drawn = answering(), [], []
    run = trainer(
        tmp_path, model, physical, 8 // physical, train_dataset=questions(),
        arguments={"max_steps": 1, "logging_steps": 5, "remove_unused_columns": False},
        privacy={"poisson_sampling": False, "per_sample_max_grad_norm": 2.0},
        data_collator=lambda batch: drawn.extend(batch) or pad_questions(batch),
    )  # fmt: skip
    run.add_callback(Sums(model, sums))
    start = answering()
    drawn.clear()
    run.train()
    batch = pad_questions(drawn[:8])
    ends = torch.stack([batch.pop("start_positions"), batch.pop("end_positions")], 1)
    outside = ends >= batch["attention_mask"].sum(1, keepdim=True)
    assert outside.any()
    assert not outside.all()
    grads = per_sample_gradients(start, Batch(kwargs=batch, target=ends, take=alone), own)
    assert norms(grads).min() < 2.0 < norms(grads).max()
    found = dict(zip([name for name, _ in model.named_parameters()], sums, strict=True))
    assert relative_error(found, clipped_sum(grads, 2.0)) < 1e-10


@pytest.mark.slow
def test_a_loss_of_the_users_own_is_given_both_ends(tmp_path: Path) -> None:
    given = {
        "train_dataset": questions(),
        "data_collator": pad_questions,
        "compute_loss_func": by_answers,
    }
    run = trainer(
        tmp_path, answering(), arguments={"remove_unused_columns": False},
        eval_dataset=questions(), **given,
    )  # fmt: skip
    run.train()
    assert run.evaluate()["eval_loss"] > 0


@pytest.mark.slow
def test_a_coupled_loss_of_the_users_own_is_refused(tmp_path: Path) -> None:
    def coupled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return by_answers(outputs, labels) * labels["start_positions"].float().mean()

    with refused("couples samples"):
        trainer(
            tmp_path, answering(), arguments={"remove_unused_columns": False},
            train_dataset=questions(), data_collator=pad_questions, compute_loss_func=coupled,
        ).train()  # fmt: skip


def test_the_loss_of_a_head_with_outputs_of_its_own(tmp_path: Path) -> None:
    """It is the model's, whatever else is returned."""

    class Spans(hf.BertForQuestionAnswering):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            return {"spans": output.start_logits, "loss": output.loss}

    found = []
    for kind in (Spans, hf.BertForQuestionAnswering):
        model = answering(kind)
        trainer(
            tmp_path, model, arguments={"remove_unused_columns": False, "max_steps": 2},
            train_dataset=questions(), data_collator=pad_questions,
        ).train()  # fmt: skip
        found.append(weights(model))
    assert furthest(*found) < 1e-12
    assert furthest(found[0], weights(answering())) > 0
