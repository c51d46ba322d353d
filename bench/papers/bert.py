"""ClinicalBERT on clinical notes: the user's local weights, or a small random network that says so.

Set FASTCLIP_CLINICALBERT to a folder with config.json, model.safetensors and the tokenizer's files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from bench.papers.data import mimic, notes
from bench.papers.data.dataset import Dataset

WEIGHTS = "FASTCLIP_CLINICALBERT"
RANDOM = (
    f"a small random BERT on hashed words in place of ClinicalBERT ({WEIGHTS}=FOLDER names weights)"
)


def load(folder: Path | None) -> Dataset:
    """MIMIC-III's notes, by the tokenizer of the weights where there are some."""
    weights = os.environ.get(WEIGHTS)
    if not weights:
        data = mimic.load(folder)
        return dataclasses.replace(data, notes=(*data.notes, RANDOM))
    tokenizer = AutoTokenizer.from_pretrained(Path(weights), local_files_only=True)

    def tokens(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        made = tokenizer(
            list(texts), truncation=True, padding="max_length", max_length=notes.LENGTH,
            return_tensors="pt",
        )  # fmt: skip
        return made["input_ids"], made["attention_mask"]

    return mimic.load(folder, tokenize=tokens)


def frozen(data: Dataset) -> nn.Module:
    """Frozen, with a head that is trained (SoftAdaClip, appendix A.1)."""
    return FrozenBert(_encoder(), len(data.classes))


def adapted(data: Dataset) -> nn.Module:
    """With LoRA on queries and values: what a head alone cannot learn."""
    return AdaptedBert(_encoder(), len(data.classes))


class FrozenBert(nn.Module):
    """A BERT that stays as it is, without dropout, and a linear head on its [CLS] output.

    Args:
        encoder: of token ids int64 [b, t] and mask [b, t].
        classes: k.
    """

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def train(self, mode: bool = True) -> FrozenBert:
        """The head alone is trained."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [b, k]."""
        with torch.no_grad():
            hidden = self.encoder(ids, attention_mask=mask).last_hidden_state  # [b, t, d]
        return self.head(hidden[:, 0])


class AdaptedBert(nn.Module):
    """A BERT with LoRA, and a linear head on its [CLS] output."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
        self.encoder = get_peft_model(encoder, lora)
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [b, k]."""
        return self.head(self.encoder(ids, attention_mask=mask).last_hidden_state[:, 0])


def _encoder() -> nn.Module:
    weights = os.environ.get(WEIGHTS)
    if weights:
        return AutoModel.from_pretrained(Path(weights), local_files_only=True)
    config = BertConfig(
        vocab_size=notes.VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=notes.LENGTH,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)
