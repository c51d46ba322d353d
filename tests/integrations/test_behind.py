"""A private trainer of another one, `class P(PrivateTrainer, T)`: T gets its arguments, but no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from fastclip.errors import ArgumentTypeError
from tests.integrations.tiny import (
    bert,
    furthest,
    hf,
    integration,
    pad,
    rows,
    trainer,
    weights,
)
from tests.refusal import refused

LOSS = "compute_loss"


class Counts(hf.Trainer):
    """Hands on all that it gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted = True


class Between(hf.Trainer):
    """As TRL's DPOTrainer: another argument stands between model and args."""

    def __init__(
        self, model: Any = None, reference: Any = None, args: Any = None, **options: Any
    ) -> None:
        super().__init__(model=model, args=args, **options)
        self.reference = reference


class Private(integration.PrivateTrainer, Counts, Between):
    pass


def made(kind: type, *given: Any, **named: Any) -> Any:
    privacy = integration.PrivacyArguments(1.0, 1e-3, noise_multiplier=1.0)
    return kind(*given, privacy=privacy, **named)


def test_an_argument_between_model_and_args(tmp_path: Path) -> None:
    """It trains as without the other class."""
    mine, theirs = bert(), bert()
    run = trainer(tmp_path, mine, kind=Private, reference="kept")
    run.train()
    trainer(tmp_path, theirs).train()
    assert (run.reference, run.counted) == ("kept", True)
    assert furthest(weights(mine), weights(theirs)) == 0 < furthest(weights(mine), weights(bert()))


def test_arguments_by_position(tmp_path: Path) -> None:
    """They are those of the class behind; without one of transformers.Trainer."""
    model, arguments = bert(), hf.TrainingArguments(str(tmp_path), use_cpu=True)
    run = made(Private, model, "kept", arguments, train_dataset=rows())
    assert (run.model, run.reference, run.args.output_dir) == (model, "kept", str(tmp_path))
    run = made(integration.PrivateTrainer, model, arguments, pad, rows(5))
    assert (run.args.output_dir, run.data_collator) == (str(tmp_path), pad)
    assert len(run.train_dataset) == 5


def test_arguments_that_are_nobodys(tmp_path: Path) -> None:
    arguments = hf.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ArgumentTypeError, match=r"Private got 4 positional .* 3 .* by keyword"):
        made(Private, bert(), "kept", arguments, pad)
    with pytest.raises(
        ArgumentTypeError, match=r"args was given by position and by keyword\. Omit"
    ):
        made(integration.PrivateTrainer, bert(), arguments, args=arguments)


def test_a_loss_of_any_class_behind(tmp_path: Path) -> None:
    """It would be passed over, whatever lies between; a function that is given takes its place."""

    def focal(self: Any, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> Any:
        return 3 * model(**inputs).loss

    def cross_entropy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return F.cross_entropy(outputs.logits, labels, reduction="none")

    own = type("Own", (hf.Trainer,), {LOSS: focal})
    further = type("Further", (own,), {})
    for behind in ((own,), (further,), (Counts, further), (further, Between)):
        kind = type("Mine", (integration.PrivateTrainer, *behind), {})
        with refused(r"^Own\.compute_loss is not used by PrivateTrainer.*compute_loss_func"):
            trainer(tmp_path, kind=kind)
    run = trainer(tmp_path, kind=kind, compute_loss_func=cross_entropy)
    run.train()
    assert run.engine.accountant.history == [(1.0, pytest.approx(1 / 3), 6)]
