"""TRL's trainers made private, against TRL's own loss of one row, or one pair, at a time.

In float32: TRL's fused head knows no float64. A step is large, so that its rounding is small beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.refusal import refused

trl = pytest.importorskip("trl", reason="TRL is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
private = pytest.importorskip("fastclip.integrations.trl")
datasets = pytest.importorskip("datasets")
hf = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

WORDS, ROWS, THRESHOLD, TOLERANCE = 40, 6, 0.05, 1e-5
RATE = 1e3


def llama(dropout: float = 0.0) -> nn.Module:
    """Two layers, d = 16; the same weights every time."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=WORDS + 3, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attention_dropout=dropout,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def lora(**options: Any) -> nn.Module:
    told = {"r": 2, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(llama(), peft.LoraConfig(**told | options))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return model


def tokenizer() -> Any:
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def text(length: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(WORDS, (length,)).tolist())


def texts() -> Any:
    """Prompts and completions of different lengths."""
    torch.manual_seed(1)
    lengths = [(2, 7), (3, 2), (1, 1), (4, 9), (2, 3), (3, 5)]
    return datasets.Dataset.from_list(
        [{"prompt": text(p), "completion": " " + text(c)} for p, c in lengths]
    )


def pairs() -> Any:
    """Prompts with a better and a worse completion."""
    torch.manual_seed(1)
    lengths = [(2, 7, 3), (3, 2, 6), (1, 1, 1), (4, 9, 2), (2, 3, 3), (3, 5, 4)]
    return datasets.Dataset.from_list(
        [
            {"prompt": text(p), "chosen": " " + text(c), "rejected": " " + text(r)}
            for p, c, r in lengths
        ]
    )


def made(kind: type, model: nn.Module, folder: Path, config: type, **options: Any) -> Any:
    """A trainer of one large step of SGD on all rows, without noise where it is private."""
    given = {
        "per_device_train_batch_size": ROWS, "max_steps": 1, "learning_rate": RATE, "optim": "sgd",
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "bf16": False,
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "logging_steps": 1,
    }  # fmt: skip
    if config is trl.DPOConfig:
        given["beta"] = 0.5
    named = {"train_dataset": pairs() if config is trl.DPOConfig else texts()}
    named |= options.pop("named", {})
    if issubclass(kind, private.PrivateTrainer):
        named["privacy"] = private.PrivacyArguments(
            THRESHOLD, 1e-3, noise_multiplier=0.0, **options.pop("privacy", {})
        )
    args = config(str(folder), **(given | options))
    return kind(model=model, args=args, processing_class=tokenizer(), **named)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def clipped_steps(trainer: Any) -> dict[str, torch.Tensor]:
    """What a step is to take off the parameters, a unit of its rate: TRL's own loss, one row at a time."""
    rows, total = trainer.train_dataset, {}
    trainer.model.train()
    norms = []
    for i in range(len(rows)):
        trainer.model.zero_grad()
        batch = trainer.data_collator([rows[i]])
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=None).backward()
        own = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        norms.append(torch.stack([g.norm() for g in own.values()]).norm())
        scale = min(1.0, THRESHOLD / norms[-1].item())
        for name, g in own.items():
            total[name] = total.get(name, 0) + scale * g / len(rows)
    assert min(norms) < THRESHOLD < max(norms) or min(norms) > THRESHOLD
    return total


def check(kind: type, plain: type, config: type, body: Callable[[], nn.Module], folder: Path,
          **options: Any) -> Any:  # fmt: skip
    named = options.pop("named", {})
    twin = {**named, "ref_model": llama()} if "ref_model" in named else named
    expected = clipped_steps(
        made(plain, body(), folder, config, named=dict(twin), **copy.deepcopy(options))
    )
    run = made(kind, body(), folder, config, named=dict(named), **options)
    before = trained(run.model)
    run.train()
    assert sum(steps for *_, steps in run.engine.accountant.history) == 1
    after = trained(run.model)
    scale = max(g.norm().item() for g in expected.values())
    for name, g in expected.items():
        assert ((before[name] - after[name]) / RATE - g).norm().item() < TOLERANCE * scale, name
    assert not set(after) - set(expected)
    return run


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("body", [llama, lora])
def test_sft(body: Callable[[], nn.Module], loss: str, tmp_path: Path) -> None:
    check(
        private.PrivateSFTTrainer, trl.SFTTrainer, trl.SFTConfig, body, tmp_path, loss_type=loss,
        max_length=None,
    )  # fmt: skip


@pytest.mark.parametrize("body", [llama, lora])
def test_dpo(body: Callable[[], nn.Module], tmp_path: Path) -> None:
    named = {} if body is lora else {"ref_model": llama()}
    check(private.PrivateDPOTrainer, trl.DPOTrainer, trl.DPOConfig, body, tmp_path, named=named)
