"""transformers.Trainer with differential privacy: `python -m examples.hf_trainer`.

A small ModernBERT learns which package of Python's standard library a function comes from. Compared with
a standard Trainer, the class has another name and one more argument. The script takes half a minute.
--physical changes memory, not the result.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings

import numpy as np
import torch
from torch.utils.data import TensorDataset
from transformers import (
    EvalPrediction,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    TrainingArguments,
)

from examples.data import PADDING, TOKENS, VOCABULARY, functions
from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

BATCH_SIZE = 512


def samples(data: TensorDataset) -> list[dict[str, list[int] | int]]:
    """The output of a tokenizer: ids without padding, and the class."""
    tokens, labels = data.tensors
    return [
        {"input_ids": ids[ids != PADDING].tolist(), "label": label}
        for ids, label in zip(tokens, labels.tolist(), strict=True)
    ]


def pad(batch: list[dict]) -> dict[str, torch.Tensor]:
    """A data collator that pads to the longest sample of the physical batch, with its mask."""
    longest = max(len(sample["input_ids"]) for sample in batch)
    ids = [
        sample["input_ids"] + [PADDING] * (longest - len(sample["input_ids"])) for sample in batch
    ]
    tokens = torch.tensor(ids)  # [b, t]
    labels = torch.tensor([sample["label"] for sample in batch])
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}


def model(classes: int) -> ModernBertForSequenceClassification:
    """Two layers, d = 64, from scratch. The mean over the words learns faster than a [CLS] token."""
    return ModernBertForSequenceClassification(
        ModernBertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=128, max_position_embeddings=TOKENS, num_labels=classes,
            classifier_pooling="mean", pad_token_id=PADDING, bos_token_id=None, eos_token_id=None,
            cls_token_id=None, sep_token_id=None,
        )
    )  # fmt: skip


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy on the held-out samples; not private."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(1) == prediction.label_ids))}


def train(folder: str, epochs: float, physical: int) -> PrivateTrainer:
    """Train privately. The trainer holds the log."""
    train_set, test_set, classes = functions()
    torch.manual_seed(0)
    trainer = PrivateTrainer(
        model=model(len(classes)),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=physical,
            gradient_accumulation_steps=BATCH_SIZE // physical,  # the logical batch: 512 samples
            per_device_eval_batch_size=256,
            num_train_epochs=epochs,
            learning_rate=1e-2,
            logging_steps=5,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=samples(train_set),
        eval_dataset=samples(test_set),
        data_collator=pad,
        compute_metrics=accuracy,
        privacy=PrivacyArguments(
            per_sample_max_grad_norm=1.0, target_epsilon=8.0, target_delta=1e-5
        ),
    )
    trainer.train()
    return trainer


def main() -> None:
    """Train, then print the privacy spent and what is kept of every layer."""
    parser = argparse.ArgumentParser(prog="python -m examples.hf_trainer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--physical", type=int, default=128, help="samples of a physical batch")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(folder, options.epochs, options.physical)
    print(trainer.engine.plan())
    print(f"epsilon {trainer.epsilon():.2f} at delta {trainer.privacy.target_delta:g}")


if __name__ == "__main__":
    main()
