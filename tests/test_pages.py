"""Code on the pages runs as it is written; a page says what it takes for given, a scene here has it.

Tutorials and the quickstart stand for themselves (test_tutorials.py), as does the README's snippet
(test_package.py); the page on fairness has its own test (test_documents.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastclip
from examples import custom_layer
from fastclip import BatchMemoryManager, FastPrivacyEngine, clipping
from fastclip.accounting import FederatedLedger
from fastclip.clipping import Clipping, Hard
from fastclip.engine.optimizer import FastDPOptimizer
from fastclip.rules import protocol as layer_rules
from fastclip.rules import use as use_rules
from fastclip.testing import check_model, check_rule, check_strategy
from tests.distributed.world import run
from tests.integrations import tiny
from tests.page_blocks import ROOT, blocks
from tests.products import recipes

Known = dict[str, Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def plain(model: nn.Module | None = None, *columns: Tensor) -> Known:
    """What an ordinary script has, before it becomes private."""
    model = model or net()
    data = TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)), *columns)
    return {
        "torch": torch, "nn": nn, "F": nn.functional, "fastclip": fastclip, "model": model,
        "FastPrivacyEngine": FastPrivacyEngine, "engine": FastPrivacyEngine(), "data": data,
        "DataLoader": DataLoader, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=16), "criterion": nn.CrossEntropyLoss(), "device": "cpu",
    }  # fmt: skip


def private(*columns: Tensor, **options: Any) -> Known:
    """The same with model, optimizer and loader private."""
    known = plain(None, *columns)
    made = known["engine"].make_private(
        module=known["model"], optimizer=known["optimizer"], data_loader=known["loader"],
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip
    return {**known, **dict(zip(("model", "optimizer", "loader"), made, strict=True))}


def suspended() -> Known:
    """A run that has saved where its pass stands."""
    known = private()
    known["engine"].save_checkpoint(
        path="run.pt", module=known["model"], optimizer=known["optimizer"]
    )
    known["engine"].save_sampling("run.sampling")
    return known


class Scale(nn.Module):
    """A layer whose only parameter multiplies."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class Gate(nn.Module):
    """A layer with a parameter and two inputs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.w * x * z


class Gated(nn.Module):
    """Both inputs need a gradient, and come after a layer with the user's own autograd Function."""

    def __init__(self, own: nn.Module, features: int) -> None:
        super().__init__()
        self.own, self.gate = own, Gate(features)
        self.a, self.b = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.own(self.a(x)), self.b(x))


class LogAddExp2(nn.Module):
    """Nothing but the function whose rule is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp2(x, self.w)


class Rows(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(plain()["data"], batch_size=16)


def checked_model() -> Known:
    batch = torch.randn(4, 6), torch.randint(2, (4,))
    return plain() | {"bert": tiny.bert(), "tokens": tiny.pad(tiny.rows(3)), "batch": batch}


def evaluated() -> Known:
    test = torch.randn(20, 6), torch.randint(2, (20,))
    return private() | {
        "epochs": 2, "unwrap": fastclip.unwrap, "delta": 1e-3, "test_x": test[0], "test_y": test[1],
    }  # fmt: skip


def trainer() -> Known:
    """Rows of one length, which the Trainer's own collator takes."""
    rows = [{**row, "input_ids": row["input_ids"][:4]} for row in tiny.rows()]
    for row in rows:
        del row["group"]
    return {"model": tiny.bert(), "train_set": rows, "held_out": rows[:8]}


def adapted() -> Known:
    """A GPT-2 with adapters."""
    told = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_lora_weights=False,
    )
    return plain(peft.get_peft_model(tiny.gpt2(), told)) | {"Tensor": Tensor}


def preferences() -> Known:
    """Pairs of rows of 6 tokens, of which the answer is a part."""
    ids, mask = torch.randint(3, tiny.VOCABULARY, (8, 2, 6)), torch.ones(8, 2, 6, dtype=torch.long)
    mask[1::2, 1, 4:] = 0
    answer = mask * (torch.arange(6) > 1)
    return adapted() | {"ids": ids, "mask": mask, "answer": answer, "TensorDataset": TensorDataset}


def language_model() -> Known:
    """A Llama and rows of its tokens."""
    config = tiny.hf.LlamaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    rows = [{"input_ids": torch.randint(3, tiny.VOCABULARY, (6,))} for _ in range(16)]
    return plain() | {
        "base": tiny.hf.LlamaForCausalLM(config), "loader": DataLoader(rows, batch_size=4),
    }  # fmt: skip


def accelerated() -> Known:
    return private() | {
        "accelerator": Accelerator(cpu=True),
        "BatchMemoryManager": BatchMemoryManager,
    }


def lightning() -> Known:
    silent = partial(
        Trainer, logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    return plain() | {"LightningModule": LightningModule, "Trainer": silent, "data": Rows()}


def tokens() -> Known:
    labels = torch.randint(5, (4, 7)).masked_fill(torch.rand(4, 7) < 0.3, -100)
    return {"F": nn.functional, "logits": torch.randn(4, 7, 5), "labels": labels}


def two_tasks() -> Known:
    x, targets = torch.randn(4, 6), torch.randn(4, 2)
    return {"torch": torch, "nn": nn, "Tensor": Tensor, "net": net(), "x": x, "targets": targets}


def one_batch() -> Known:
    """Where a page shows no loop."""
    known = private()
    x, y = next(iter(known["loader"]))
    return known | {"x": x, "y": y}


def federated() -> Known:
    return {"nn": nn, "torch": torch, "DataLoader": DataLoader, "data": halves()}


def watched() -> Known:
    return private() | {"FederatedLedger": FederatedLedger}


def halves() -> dict[str, TensorDataset]:
    """Of two clients."""
    return {
        name: TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)))
        for name in ("north", "south")
    }


def with_canaries() -> Known:
    canaries = TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)))
    return plain() | {
        "torch": torch, "DataLoader": DataLoader, "data_set": plain()["data"], "canaries": canaries,
    }  # fmt: skip


def counted() -> Known:
    """A private run, and data to count."""
    known = private()
    own = {
        "train_sex": torch.arange(64) % 2, "train_age": torch.arange(64) + 40,
        "train_right": torch.arange(64) % 3 > 0, "patient_of_row": torch.arange(64) // 2,
    }  # fmt: skip
    validation = {
        "val_x": torch.randn(300, 6), "val_y": torch.randint(2, (300,)),
        "val_sex": torch.arange(300) % 2,
    }  # fmt: skip
    return known | own | validation | {
        "delta": 1e-3, "epochs": 3, "unwrap": fastclip.unwrap,
    }  # fmt: skip


def counted_by_patient() -> Known:
    known = plain() | {name: value for name, value in counted().items() if "train" in name}
    return known | {"patient_of_row": torch.arange(64) // 2}


def by_patient() -> Known:
    return plain() | {"patient_of_sample": (torch.arange(64) // 2).tolist()}


RANKS = None  # two of them: tests/distributed/pages.py
PRODUCTS = "tests/products"  # has a test of it, for where the packages are installed
SCENES: dict[str, list[Callable[[], Known] | str | None]] = {
    "docs/accelerate.md": [
        lambda: plain() | {"accelerator": Accelerator(cpu=True)},
        RANKS,
        RANKS,
        accelerated,
    ],
    "docs/audit.md": [
        with_canaries,
        lambda: {"inside": torch.randn(300) + 1, "outside": torch.randn(300)},
    ],
    "docs/checks.md": [
        checked_model,
        plain,
        lambda: {"Scale": custom_layer.Scale, "torch": torch, "check_rule": check_rule},
        lambda: {"Clipping": Clipping, "MyScale": Hard, "check_strategy": check_strategy},
    ],
    "docs/clipping.md": [dict, lambda: private(torch.arange(64) % 2, clipping=clipping.dpsgd_f(2))],
    "docs/compile.md": [private, plain],
    "docs/counts.md": [counted, counted_by_patient, counted, plain],
    "docs/cuda_graphs.md": [private],
    "docs/distributed.md": [RANKS, RANKS],
    "docs/errors.md": [
        plain, plain, plain, plain, tokens, plain, private, private, private, private, plain, by_patient,
        plain, private, private, checked_model,
    ],
    "docs/federated.md": [federated, watched, dict],
    "docs/guarantee.md": [
        lambda: plain() | {"patient_of_row": torch.arange(64) // 2}, plain, private, suspended, plain,
        dict,
    ],
    "docs/huggingface.md": [trainer],
    "docs/lightning.md": [lightning, lightning],
    "docs/llm.md": [PRODUCTS, PRODUCTS, preferences, language_model, PRODUCTS, adapted],
    "docs/losses.md": [tokens, tokens, plain, two_tasks],
    "docs/mixed_precision.md": [one_batch, private, plain],
    "docs/own_loop.md": [
        evaluated, evaluated, private, lambda: private() | {"noise_like": torch.randn_like}, private,
        private, plain,
    ],
    "docs/planning.md": [plain],
    "docs/recipes.md": [*recipes.SCENES],
    "docs/secure_mode.md": [plain],
}  # fmt: skip
"""What each block of a page takes for given."""
RULES = ("docs/own_layer.md", "docs/own_strategy.md")
OTHERS = ("docs/tutorials/", "docs/quickstart.md", "docs/fairness.md")


def test_every_block_has_a_scene() -> None:
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"]
    shown = {page.relative_to(ROOT).as_posix(): 0 for page in pages}
    shown = {page: len(blocks(page)) for page in shown if not page.startswith(OTHERS)}
    assert {page: count for page, count in shown.items() if count and page not in RULES} == {
        page: len(scenes) for page, scenes in SCENES.items()
    }


@pytest.mark.extras
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("page", "number"),
    [(page, n) for page, own in SCENES.items() for n, scene in enumerate(own) if scene != PRODUCTS],
)
def test_a_block(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs; a loop has spent something, a call of make_private returned a private optimizer."""
    code, scene = blocks(page)[number], SCENES[page][number]
    if scene is RANKS:
        assert run(2, "tests.distributed.pages:block", tmp_path, page, str(number)) == [True, True]
        return
    monkeypatch.chdir(tmp_path)
    known = {"__name__": __name__, **scene()}
    exec(compile(code, page, "exec"), known)
    assert released(code, known)


def released(code: str, known: Known) -> bool:
    """What the block says it does, it did."""
    if "ledger.record(" in code:  # by engines of its functions
        return len(known["ledger"].clients) == 2
    if "engine.make_private(" in code:
        inner = known["optimizer"]
        assert isinstance(getattr(inner, "optimizer", inner), FastDPOptimizer)
    return "step()" not in code or len(known["engine"].accountant) > 0


@pytest.mark.extras
@pytest.mark.parametrize("page", RULES)
def test_rules_of_ones_own(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked as the page says, by the code that it says, in one namespace."""
    monkeypatch.setattr(layer_rules, "_RULES", dict(layer_rules._RULES))
    monkeypatch.setattr(use_rules, "_RULES", {n: list(r) for n, r in use_rules._RULES.items()})
    batch = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    criterion = nn.functional.mse_loss
    known: Known = {
        "__name__": __name__, "torch": torch, "Scale": Scale, "Gate": Gate, "model": LogAddExp2(),
        "batch": batch, "loss": criterion, "criterion": criterion,
    }  # fmt: skip
    for code in blocks(page):
        exec(compile(code, page, "exec"), known)
    if page == RULES[0]:
        found = check_model(known["model"], batch, lambda m, b: criterion(m(b[0]), b[1]))
        assert [row.rule for row in found.rows] == ["logaddexp2"]
        gated = Gated(known["Swish"](6), 6)
        found = check_model(gated, batch, lambda m, b: criterion(m(b[0]), b[1]))
        found.raise_if_wrong()
        rules = {row.name: row.rule for row in found.rows}
        assert (rules["own.beta"], rules["gate.w"]) == ("grad_sampler", "gate")
    else:
        check_strategy(Clipping(known["Smooth"]())).raise_if_wrong()
