"""A BERT of a few thousand parameters, rows of tokens, and both ways to train on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from fastclip import FastPrivacyEngine

hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
integration = pytest.importorskip("fastclip.integrations.huggingface")

VOCABULARY, CLASSES, ROWS, BATCH, DATA_SEED, NOISE_SEED = 50, 3, 24, 8, 3, 11


def bert(dropout: float = 0.0) -> nn.Module:
    """Two layers, d = 16; the same weights every time."""
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=12, num_labels=CLASSES,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """One layer, d = 16, tied embeddings."""
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=12, embd_pdrop=0.0,
            attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Token lists of 4 to 10 tokens, without padding, and their classes and groups."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 11, (count,), generator=generator).tolist()
    return [
        {
            "input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist(),
            "label": i % CLASSES,
            "group": i % 2,
        }
        for i, n in enumerate(lengths)
    ]


def pad(drawn: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """To the longest row of the batch, with a mask."""
    longest = max(len(row["input_ids"]) for row in drawn)
    spare = [longest - len(row["input_ids"]) for row in drawn]
    cells = list(zip(drawn, spare, strict=True))
    batch = {
        "input_ids": [row["input_ids"] + [0] * k for row, k in cells],
        "attention_mask": [[1] * len(row["input_ids"]) + [0] * k for row, k in cells],
        "labels": [row["label"] for row in drawn],
    }
    if "group" in drawn[0]:
        batch["group"] = [row["group"] for row in drawn]
    return {name: torch.tensor(values) for name, values in batch.items()}


def pad_tokens(drawn: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """For language models: the tokens are the labels, padding is -100."""
    batch = pad(drawn)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def trainer(
    folder: Path, model: nn.Module | None = None, physical: int = BATCH, accumulation: int = 1,
    privacy: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None,
    kind: type = integration.PrivateTrainer, **kwargs: Any,
) -> Any:  # fmt: skip
    """A PrivateTrainer of two epochs on the CPU, with seeds for batches and noise."""
    told = {"per_sample_max_grad_norm": 0.5, "target_delta": 1e-3, "accountant": "rdp"}
    told |= {"noise_multiplier": 1.0} if "target_epsilon" not in (privacy or {}) else {}
    told |= privacy or {}
    given: dict[str, Any] = {
        "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "data_seed": DATA_SEED,
        "per_device_train_batch_size": physical, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    if not told.get("secure_mode"):
        engine = kwargs.get("engine")  # under which other runs drew from other seeds
        taken = sum(steps for *_, steps in engine.accountant.history) if engine is not None else 0
        kwargs.setdefault("noise_generator", torch.Generator().manual_seed(NOISE_SEED + taken))
    kwargs.setdefault("train_dataset", rows())
    kwargs.setdefault("data_collator", pad)
    return kind(
        model=bert() if model is None else model,
        args=hf.TrainingArguments(str(folder), **(given | (arguments or {}))),
        privacy=integration.PrivacyArguments(**told),
        **kwargs,
    )


def by_hand(model: nn.Module, physical: int, epochs: int = 2) -> FastPrivacyEngine:
    """What `trainer()` does, as a user of Opacus writes it: same seeds, same AdamW and schedule."""
    generator = torch.Generator()
    loader = DataLoader(rows(), BATCH, collate_fn=pad, generator=generator)
    engine = FastPrivacyEngine(accountant="rdp")
    total = epochs * len(loader)
    matrices = [p for p in model.parameters() if p.dim() > 1]  # the Trainer's two groups: noise is
    vectors = [p for p in model.parameters() if p.dim() == 1]  # drawn in the optimizer's order
    inner = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], 1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 - step / total)
    private, optimizer, loader = engine.make_private(
        module=model.train(), optimizer=inner, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=0.5, rand_on_empty=True,
        noise_generator=torch.Generator().manual_seed(NOISE_SEED),
    )  # fmt: skip
    for epoch in range(epochs):
        generator.manual_seed(DATA_SEED + epoch)
        loader.batch_sampler.draw_anew()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as batches:
            for batch in batches:
                optimizer.zero_grad()
                batch.pop("group")
                labels = batch.pop("labels")
                F.cross_entropy(private(**batch).logits, labels).backward()
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    schedule.step()
    private.cleanup()
    return engine


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any entry."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
