"""A frozen clinical transformer with a trained head: `python -m examples.clinicalbert [--folder F]`.

This is the setting of the SoftAdaClip paper: a frozen encoder, notes of up to 512 tokens, large logical
batches split into physical ones, and soft adaptive clipping. Only the head is trained. The encoder is
not intercepted, keeps no activations, and is unchanged bit for bit.

The privacy unit is the patient. All notes of a patient are drawn, clipped and protected as one, at most
16 of them per step. q and B are public. They follow from the approximate number of patients
(--patients, fixed before anyone counted), not from the data.

F holds your own files, which never leave the machine:
    config.json, model.safetensors, tokenizer files    such as a download of ClinicalBERT
    notes.csv    one line per note: text, label (0, 1, ...), group (0, 1, ...), patient (any name)

Without --folder, a tiny encoder with random weights reads made-up notes, in seconds.
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
BATCH_SIZE, LONGEST, MOST_NOTES = 250, 512, 16
"""Patients per step, tokens per note, notes per patient and step."""
TINY_TOKENS, TINY_VOCABULARY, TINY_PATIENTS, TINY_NOTES = 24, 200, 1200, 4
CLS = 1  # the first token, which the classifier reads
HELD_OUT = 5  # every fifth patient


def made_up_notes(patients: int = TINY_PATIENTS) -> Notes:
    """Notes with words that depend on their label; a tenth of the patients uses other words.

    A patient has 1 to 4 notes, all with one label.
    """
    generator = torch.Generator().manual_seed(0)
    notes = []
    for patient in range(patients):
        label = int(torch.randint(2, (), generator=generator))
        group = int(torch.rand((), generator=generator) < 0.1)
        low = 3 + 60 * label + 40 * group
        for _ in range(1 + int(torch.randint(TINY_NOTES, (), generator=generator))):
            tokens = torch.randint(low, low + 80, (TINY_TOKENS,), generator=generator)
            notes.append({
                "input_ids": [CLS, *tokens.tolist()], "label": label, "group": group,
                "patient": str(patient),
            })  # fmt: skip
    return notes


def split(notes: Notes) -> tuple[Notes, Notes]:
    """Training notes and test notes; no patient has notes in both."""
    number: dict[str, int] = {}
    for note in notes:
        number.setdefault(note["patient"], len(number))
    parts: tuple[Notes, Notes] = ([], [])
    for note in notes:
        parts[number[note["patient"]] % HELD_OUT == 0].append(note)
    return parts


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
    """The model and the notes of a folder. Nothing is downloaded."""
    with open(folder / "notes.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    notes = [
        {
            "input_ids": tokenizer(row["text"], truncation=True, max_length=LONGEST)["input_ids"],
            "label": int(row["label"]),
            "group": int(row["group"]),
            "patient": row["patient"],
        }
        for row in table
    ]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1 + max(note["label"] for note in notes), local_files_only=True
    )
    return model, notes


def pad(batch: Notes) -> dict[str, torch.Tensor]:
    """Pad to the longest note of the physical batch; the mask excludes padding from attention."""
    longest = max(len(note["input_ids"]) for note in batch)
    lengths = torch.tensor([[len(note["input_ids"])] for note in batch])
    ids = [note["input_ids"] + [0] * (longest - len(note["input_ids"])) for note in batch]
    return {
        "input_ids": torch.tensor(ids),  # [b, t]
        "attention_mask": (torch.arange(longest) < lengths).long(),
        "labels": torch.tensor([note["label"] for note in batch]),
    }


def train(model: PreTrainedModel, notes: Notes, folder: str, **options: float) -> PrivateTrainer:
    """Train the head privately.

    Args:
        options: physical (notes per physical batch, at least 16), epochs, epsilon, patients (approximate
            number of training patients).
    """
    physical, (training, _) = int(options["physical"]), split(notes)
    trainer = PrivateTrainer(
        model=head_only(model, "classifier"),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=physical,
            per_device_eval_batch_size=physical,
            num_train_epochs=options["epochs"],
            learning_rate=2e-2,
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=training,
        data_collator=pad,
        privacy=PrivacyArguments(
            per_sample_max_grad_norm=1.0,
            target_epsilon=options["epsilon"],
            target_delta=1e-5,
            clipping=clipping.soft_ada_clip(),
            unit_ids=[note["patient"] for note in training],
            sample_rate=min(1.0, BATCH_SIZE / options["patients"]),
            expected_batch_size=BATCH_SIZE,
            max_samples_per_unit=MOST_NOTES,
        ),
    )
    trainer.train()
    return trainer


def accuracy_by_group(trainer: PrivateTrainer, notes: Notes) -> dict[int, float]:
    """Accuracy on the held-out notes, by group. It reads raw data and is not private."""
    _, held_out = split(notes)
    right = trainer.predict(held_out).predictions.argmax(1) == [note["label"] for note in held_out]
    groups = torch.tensor([note["group"] for note in held_out])
    return {
        group: torch.tensor(right)[groups == group].double().mean().item()
        for group in sorted(set(groups.tolist()))
    }


def main() -> None:
    """Train, then print the privacy spent and each group's accuracy."""
    parser = argparse.ArgumentParser(prog="python -m examples.clinicalbert", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="your model and notes; made up if omitted")
    parser.add_argument("--physical", type=int, default=50, help="notes at once, at least 16")
    parser.add_argument("--patients", type=int, default=1000, help="approximate number, public")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--epsilon", type=float, default=3.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    torch.manual_seed(0)
    model, notes = load(options.folder) if options.folder else (made_up_model(), made_up_notes())
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(
            model, notes, folder, physical=options.physical, epochs=options.epochs,
            epsilon=options.epsilon, patients=options.patients,
        )  # fmt: skip
        print(trainer.engine.plan())
        print(trainer.engine.mechanism())
        for group, accuracy in accuracy_by_group(trainer, notes).items():
            print(f"group {group}: accuracy {accuracy:.1%} (raw data, not private)")


if __name__ == "__main__":
    main()
