"""Prompt tuning of a language model with a PrivateTrainer: virtual tokens before the labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.integrations.adapters import peft
from tests.integrations.test_trainer import Sums
from tests.integrations.tiny import gpt2, pad_tokens, trainer
from tests.oracle import Batch, clipped_sum, norms, per_sample_gradients, relative_error


def prompted(kind: str) -> nn.Module:
    """Two virtual tokens before a language model."""
    base = gpt2()
    torch.manual_seed(2)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(base, config).double().train()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "threshold"), [("PromptTuningConfig", 0.009), ("PrefixTuningConfig", 0.02)]
)
def test_sums_are_those_of_one_row_at_a_time(tmp_path: Path, kind: str, threshold: float) -> None:
    model, sums, drawn = prompted(kind), [], []
    run = trainer(
        tmp_path, model, arguments={"max_steps": 1, "logging_steps": 5}, data_collator=pad_tokens,
        privacy={"poisson_sampling": False, "per_sample_max_grad_norm": threshold},
    )  # fmt: skip
    run.data_collator = lambda batch: drawn.append(batch) or pad_tokens(batch)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    run.add_callback(Sums(model, sums))
    start = prompted(kind)
    run.train()
    batch = pad_tokens([{k: v for k, v in row.items() if k != "group"} for row in drawn[0]])
    labels = batch.pop("labels")

    def own(output, labels):
        """The first token is predicted by the last virtual one, where these have logits."""
        logits = output.logits
        labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=-100)[:, 1:]
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels != -100).sum(1)

    grads = per_sample_gradients(start, Batch(kwargs=batch, target=labels), own)
    assert norms(grads).max() > threshold
    assert list(grads) == list(trained)
    found = dict(zip(trained, sums, strict=True))
    assert relative_error(found, clipped_sum(grads, threshold)) < 1e-6  # its loss is in float32
