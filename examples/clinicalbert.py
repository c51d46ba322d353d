"""A frozen clinical transformer with a trained head: `python -m examples.clinicalbert [--folder F]`.

The setting of the SoftAdaClip paper: a frozen encoder, notes of up to 512 tokens, logical batches of 500
cut into physical ones, clipping that adapts softly. Only the head is trained: the encoder is not
intercepted, keeps no activations, and comes out bit for bit as it went in.

F holds what is yours and never leaves the machine:
    config.json, model.safetensors, tokenizer files    such as a download of ClinicalBERT
    notes.csv    columns text, label (0, 1, ...), group (0, 1, ...), one row a patient

Without --folder a tiny encoder with random weights reads made-up notes, in seconds. The privacy unit is
one row: where a patient has several notes, join them first.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    TrainingArguments,
)

from fastclip import clipping
from fastclip.integrations import head_only
from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

Notes = list[dict]
BATCH_SIZE, LONGEST = 500, 512
TINY_TOKENS, TINY_VOCABULARY, TINY_NOTES = 24, 200, 3000
CLS = 1  # what a tokenizer puts in front, and the classifier looks at
HELD_OUT = 5  # every fifth note


def made_up_notes(count: int = TINY_NOTES) -> Notes:
    """Notes whose words lean towards their label; a tenth of the patients writes in other words."""
    generator = torch.Generator().manual_seed(0)
    notes = []
    for _ in range(count):
        label = int(torch.randint(2, (), generator=generator))
        group = int(torch.rand((), generator=generator) < 0.1)
        low = 3 + 60 * label + 40 * group
        tokens = torch.randint(low, low + 80, (TINY_TOKENS,), generator=generator)
        notes.append({"input_ids": [CLS, *tokens.tolist()], "label": label, "group": group})
    return notes


def made_up_model() -> PreTrainedModel:
    """A BERT of two layers with random weights."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=TINY_VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=128, max_position_embeddings=TINY_TOKENS + 1, num_labels=2,
            initializer_range=0.2,
        )
    )  # fmt: skip


def load(folder: Path) -> tuple[PreTrainedModel, Notes]:
    """The model and the notes of a folder; nothing is downloaded."""
    with open(folder / "notes.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    notes = [
        {
            "input_ids": tokenizer(row["text"], truncation=True, max_length=LONGEST)["input_ids"],
            "label": int(row["label"]),
            "group": int(row["group"]),
        }
        for row in table
    ]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1 + max(note["label"] for note in notes), local_files_only=True
    )
    return model, notes


def pad(drawn: Notes) -> dict[str, torch.Tensor]:
    """To the longest note of the physical batch; the mask keeps padding out of attention."""
    longest = max(len(note["input_ids"]) for note in drawn)
    lengths = torch.tensor([[len(note["input_ids"])] for note in drawn])
    ids = [note["input_ids"] + [0] * (longest - len(note["input_ids"])) for note in drawn]
    return {
        "input_ids": torch.tensor(ids),  # [b, t]
        "attention_mask": (torch.arange(longest) < lengths).long(),
        "labels": torch.tensor([note["label"] for note in drawn]),
    }


def train(model: PreTrainedModel, notes: Notes, folder: str, **options: float) -> PrivateTrainer:
    """Train the head privately.

    Args:
        options: physical (rows of a physical batch, a divisor of 500), epochs, epsilon.
    """
    physical = int(options["physical"])
    trainer = PrivateTrainer(
        model=head_only(model, "classifier"),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=physical,
            gradient_accumulation_steps=BATCH_SIZE // physical,
            per_device_eval_batch_size=physical,
            num_train_epochs=options["epochs"],
            learning_rate=2e-2,
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=[note for i, note in enumerate(notes) if i % HELD_OUT],
        data_collator=pad,
        privacy=PrivacyArguments(
            per_sample_max_grad_norm=1.0,
            target_epsilon=options["epsilon"],
            target_delta=1e-5,
            clipping=clipping.soft_ada_clip(),
        ),
    )
    trainer.train()
    return trainer


def accuracy_by_group(trainer: PrivateTrainer, notes: Notes) -> dict[int, float]:
    """Of the held-out notes. It looks at raw data: not private."""
    held_out = [note for i, note in enumerate(notes) if i % HELD_OUT == 0]
    right = trainer.predict(held_out).predictions.argmax(1) == [note["label"] for note in held_out]
    groups = torch.tensor([note["group"] for note in held_out])
    return {
        group: torch.tensor(right)[groups == group].double().mean().item()
        for group in sorted(set(groups.tolist()))
    }


def main() -> None:
    """Train, and say what was spent and how each group fares."""
    parser = argparse.ArgumentParser(prog="python -m examples.clinicalbert", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="your model and notes; made up without it")
    parser.add_argument("--physical", type=int, default=50, help="rows at once; divides 500")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--epsilon", type=float, default=3.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    torch.manual_seed(0)
    model, notes = load(options.folder) if options.folder else (made_up_model(), made_up_notes())
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(
            model, notes, folder, physical=options.physical, epochs=options.epochs,
            epsilon=options.epsilon,
        )  # fmt: skip
        print(trainer.engine.plan())
        print(f"epsilon {trainer.epsilon():.2f} at delta {trainer.privacy.target_delta:g}")
        for group, accuracy in accuracy_by_group(trainer, notes).items():
            print(f"group {group}: accuracy {accuracy:.1%} (raw data, not private)")


if __name__ == "__main__":
    main()
