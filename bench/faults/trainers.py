"""The training that is killed under transformers' Trainer: a BERT of a few thousand parameters."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from bench.faults.injected import UsersError
from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

ROWS, BATCH, WORDS, CLASSES = 24, 8, 20, 3


def model() -> BertForSequenceClassification:
    """The same weights every time."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, max_position_embeddings=8, num_labels=CLASSES,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Token lists of one length, and their classes."""
    tokens = torch.randint(WORDS, (ROWS, 6), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "label": i % CLASSES} for i, row in enumerate(tokens)]


class Told(transformers.TrainerCallback):
    """Seeds the noise of a step by its number, and tells of each release."""

    def __init__(self, noise: torch.Generator, tell: Callable[[], None]) -> None:
        self.noise, self.tell = noise, tell
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The private optimizer is there."""
        inner = self.trainer.dp_optimizer.original_optimizer
        inner.register_step_post_hook(lambda *_: self.tell())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Of a run that goes on as well."""
        self.noise.manual_seed(1000 + state.global_step)


class Fails(transformers.TrainerCallback):
    """A callback of the user's own, which fails once."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.step:
            raise UsersError("of a callback of the user's own")


EVENTS = (
    "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end",
    "on_log", "on_save",
)  # fmt: skip


def train(
    folder: Path, each: Callable[[int], None] = lambda released: None, callback: Any = None
) -> None:
    """Go on from the newest checkpoint that is whole, if there is one, to the end of the run.

    Args:
        each: called right after a release, with the number of releases of this process.
        callback: one more.
    """
    transformers.utils.logging.set_verbosity_error()
    released, seen = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND), []

    def tell() -> None:
        os.write(released, b"x")
        seen.append(1)
        each(len(seen))

    def number(path: Path) -> int:
        return int(path.name.rpartition("-")[2])

    found = sorted((folder / "hf").glob("checkpoint-*"), key=number, reverse=True)
    for checkpoint in [*map(str, found), None]:
        try:
            trained = _attempt(folder, tell, checkpoint, callback)
            break
        except Exception as error:
            if checkpoint is None:
                raise
            with (folder / "refused").open("a") as file:
                file.write(f"{type(error).__name__}\n")
        gc.collect()  # lets go of the ledger
    torch.save({name: p.detach() for name, p in trained.named_parameters()}, folder / "end.pt")


def _attempt(
    folder: Path, tell: Callable[[], None], checkpoint: str | None, callback: Any
) -> torch.nn.Module:
    noise = torch.Generator()
    told, trained = Told(noise, tell), model()
    told.trainer = trainer = PrivateTrainer(
        model=trained,
        args=TrainingArguments(
            str(folder / "hf"), num_train_epochs=4, learning_rate=1e-2, save_strategy="steps",
            save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, data_seed=3,
            logging_steps=4, per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2,
        ),
        train_dataset=rows(), noise_generator=noise,
        callbacks=[told, *([] if callback is None else [callback])],
        privacy=PrivacyArguments(
            per_sample_max_grad_norm=0.5, target_delta=1e-3, accountant="rdp", noise_multiplier=1.0
        ),
    )  # fmt: skip
    trainer.engine.write_ahead(folder / "ledger")
    trainer.train(resume_from_checkpoint=checkpoint)
    return trained
