"""TRL's trainers made private, against TRL's own loss of one row, or one pair, at a time.

In float32: TRL's fused head knows no float64. A step is large, so that its rounding is small beside it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastclip.data.dataset import digest_of
from tests.page_blocks import blocks
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


KINDS = {
    "sft": (private.PrivateSFTTrainer, trl.SFTTrainer, trl.SFTConfig),
    "dpo": (private.PrivateDPOTrainer, trl.DPOTrainer, trl.DPOConfig),
}


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def clipped_steps(trainer: Any) -> dict[str, torch.Tensor]:
    """What a step of rate 1 is to take off the parameters: TRL's own loss, one row at a time."""
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
    compare(before, trained(run.model), expected)
    return run


def compare(before: dict, after: dict, expected: dict[str, torch.Tensor]) -> None:
    """What the step has taken off the parameters is what it was to take off."""
    scale = max(g.norm().item() for g in expected.values())
    for name, g in expected.items():
        assert ((before[name] - after[name]) / RATE - g).norm().item() < TOLERANCE * scale, name
    assert not set(after) - set(expected)


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


def test_every_loss_that_is_a_mean_over_pairs(tmp_path: Path) -> None:
    """All in one sum."""
    losses = [
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
        "apo_down", "discopop", "sigmoid_norm",
    ]  # fmt: skip
    check(
        private.PrivateDPOTrainer, trl.DPOTrainer, trl.DPOConfig, lora, tmp_path, loss_type=losses,
        loss_weights=[1.0 + 0.1 * i for i in range(len(losses))], label_smoothing=0.1,
    )  # fmt: skip


def test_weights_of_pairs(tmp_path: Path) -> None:
    """Of WPO, by the model's own probabilities; f-divergences."""
    check(
        private.PrivateDPOTrainer, trl.DPOTrainer, trl.DPOConfig, lora, tmp_path, use_weighting=True,
        f_divergence_type="js_divergence",
    )  # fmt: skip


def adapter(**options: Any) -> Any:
    """What a trainer itself makes LoRA of."""
    told = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**told | options)


@pytest.mark.parametrize("precomputed", [False, True])
def test_the_reference_of_an_adapter(precomputed: bool, tmp_path: Path) -> None:
    """It is the model without it, in the step or before training."""
    torch.manual_seed(3)
    run = check(
        private.PrivateDPOTrainer, trl.DPOTrainer, trl.DPOConfig, llama, tmp_path,
        named={"peft_config": adapter()}, precompute_ref_log_probs=precomputed,
    )  # fmt: skip
    assert run.ref_model is None


def test_label_smoothing(tmp_path: Path) -> None:
    check(
        private.PrivateSFTTrainer, trl.SFTTrainer, trl.SFTConfig, lora, tmp_path,
        label_smoothing_factor=0.1,
    )  # fmt: skip


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"selective": True},
}


@pytest.mark.parametrize("form", CHECKPOINTS)
@pytest.mark.parametrize("body", [llama, lora])
def test_gradient_checkpointing(body: Callable[[], nn.Module], form: str, tmp_path: Path) -> None:
    if (body, form) == (lora, "selective"):
        pytest.skip("TRL 1.16 itself hands `selective` on to torch, which does not know it")
    check(
        private.PrivateSFTTrainer, trl.SFTTrainer, trl.SFTConfig, body, tmp_path,
        gradient_checkpointing=True, gradient_checkpointing_kwargs=CHECKPOINTS[form],
    )  # fmt: skip


@pytest.mark.parametrize("form", ["reentrant", "not reentrant"])
def test_pairs_with_gradient_checkpointing(form: str, tmp_path: Path) -> None:
    check(
        private.PrivateDPOTrainer, trl.DPOTrainer, trl.DPOConfig, lora, tmp_path,
        gradient_checkpointing=True, gradient_checkpointing_kwargs=CHECKPOINTS[form],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_run(kind: str, tmp_path: Path) -> None:
    """Several physical batches, evaluation, checkpoints and a second run; of rows the log has the loss
    alone."""
    sft = kind == "sft"
    run = made(
        private.PrivateSFTTrainer if sft else private.PrivateDPOTrainer, lora(), tmp_path,
        trl.SFTConfig if sft else trl.DPOConfig, per_device_train_batch_size=1,
        gradient_accumulation_steps=3, learning_rate=1e-2, max_steps=6, eval_strategy="steps",
        eval_steps=3, save_strategy="steps", save_steps=3, bf16=True,
        named={"eval_dataset": texts() if sft else pairs()},
    )  # fmt: skip
    run.train()
    run.train()
    assert run.engine.accountant.history == [(0.0, 0.5, 12)]
    evaluated = [line for line in run.state.log_history if "eval_loss" in line]
    steps = [line for line in run.state.log_history if "loss" in line]
    known = {"loss", "learning_rate", "epsilon", "epoch", "step"}
    assert len(evaluated) == 2
    assert len(steps) == 6
    assert all(set(line) == known for line in steps)
    assert "eval_entropy" in evaluated[0]
    resumed = made(
        private.PrivateSFTTrainer if sft else private.PrivateDPOTrainer, lora(), tmp_path,
        trl.SFTConfig if sft else trl.DPOConfig, per_device_train_batch_size=1,
        gradient_accumulation_steps=3, max_steps=6, bf16=True,
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sum(steps for *_, steps in resumed.engine.accountant.history) == 9 + 3


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_several_rows_in_one_sequence(name: str, tmp_path: Path) -> None:
    with refused(rf"SFTConfig\({name}=True\) puts several samples .* into one"):
        made(private.PrivateSFTTrainer, llama(), tmp_path, trl.SFTConfig, **{name: True})


def test_padding_free_pairs(tmp_path: Path) -> None:
    with refused(r"DPOConfig\(padding_free=True\) puts several samples"):
        made(private.PrivateDPOTrainer, llama(), tmp_path, trl.DPOConfig, padding_free=True)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired", "sft"])
def test_losses_that_join_pairs(loss: str, tmp_path: Path) -> None:
    with refused(rf"DPOConfig\(loss_type='{loss}'\) couples pairs"):
        made(
            private.PrivateDPOTrainer, llama(), tmp_path, trl.DPOConfig, loss_type=["sigmoid", loss]
        )


def test_weights_of_a_pair_s_longer_row(tmp_path: Path) -> None:
    with refused(r"DPOConfig\(ld_alpha=\.\.\.\) is not supported: it weights tokens"):
        made(private.PrivateDPOTrainer, llama(), tmp_path, trl.DPOConfig, ld_alpha=0.5)


def test_classes_of_one_s_own(tmp_path: Path) -> None:
    """The error names the class that is there."""
    for base, config in ((trl.SFTTrainer, trl.SFTConfig), (trl.DPOTrainer, trl.DPOConfig)):
        kind = type("P", (private.PrivateTrainer, base), {})
        with refused(
            rf"^{base.__name__}.compute_loss .* fastclip.integrations.trl.Private{base.__name__}"
        ):
            made(kind, lora(), tmp_path, config)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, on the data of this module."""
    monkeypatch.chdir(tmp_path)
    shown = [code for code in blocks("docs/llm.md") if "from trl import" in code]
    for code in shown:
        known = {
            "model": llama(), "adapted": lora(), "texts": texts(), "pairs": pairs(),
            "tokenizer": tokenizer(),
        }  # fmt: skip
        exec(compile(code, "docs/llm.md", "exec"), known)
        assert 0 < known["trainer"].epsilon() <= 8
    assert len(shown) == 2


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    """They take the step of one process that has all rows."""
    _, plain, config = KINDS[kind]
    expected = clipped_steps(made(plain, lora(), tmp_path / "plain", config))
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    given = ["tests.products.ranks", str(tmp_path), kind]
    subprocess.run([sys.executable, "-m", *command, *given], check=True, timeout=300)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert (found["world"], found["history"]) == (2, [(0.0, 1.0, 1)])
        compare(found["before"], found["after"], expected)


def test_rows_that_processes_agree_on() -> None:
    """By what is in them: a fingerprint differs where a function that made them cannot be hashed."""
    one, two = texts(), texts()
    made = [
        own.map(lambda row: row, new_fingerprint=f"random{i}") for i, own in enumerate((one, two))
    ]
    assert made[0]._fingerprint != made[1]._fingerprint
    assert digest_of(made[0]) == digest_of(made[1])
    assert digest_of(one) != digest_of(two.select([1, 0, 2, 3, 4, 5]))
    assert digest_of(one) != digest_of(two.rename_column("prompt", "question"))
