"""transformers.Trainer on several ranks, and one process that trains on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fastclip import FastPrivacyEngine, clipping
from fastclip.errors import ArgumentError
from tests.distributed.accelerated import choose_fsdp
from tests.distributed.training import full
from tests.distributed.world import as_torchrun
from tests.integrations.tiny import bert, hf, integration, pad, rows, trainer

ROWS, EACH, STEPS = 23, 1, 14
RATE, EPS = 0.05, 1e-3
SETTINGS: dict[str, Any] = {
    "logging_steps": 1, "adam_epsilon": EPS, "learning_rate": RATE, "save_steps": 4, "max_steps": STEPS,
    "save_strategy": "steps",
}  # fmt: skip


def data() -> list[dict[str, Any]]:
    """Rows that know their numbers."""
    return [{**row, "number": i} for i, row in enumerate(rows(ROWS))]


class Watched(integration.PrivateTrainer):
    """Notes who was drawn."""

    def _make_private(self, loader: Any) -> Any:
        private = super()._make_private(loader)
        split, self.drawn = private.collate_fn, []

        def noted(drawn: list[dict[str, Any]]) -> Any:
            rows = [row[1] if isinstance(row, tuple) else row for row in drawn]  # (unit, row)
            self.drawn.append([row["number"] for row in rows])
            return split(drawn)

        private.collate_fn = noted
        return private


class Cast(hf.BertForSequenceClassification):
    """Notes whether autocast is on."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.cast = torch.is_autocast_enabled("cpu")
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels)


def _trainer(folder: Path, fsdp: bool, model: nn.Module | None = None, **kwargs: Any) -> Any:
    """Of a BERT in double precision: a row in a physical batch, two in a draw of each rank."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    kwargs["arguments"] = SETTINGS | kwargs.get("arguments", {})
    given = {"noise_multiplier": 0.0, "per_sample_max_grad_norm": 0.5} | kwargs.pop("privacy", {})
    physical = kwargs.pop("physical", EACH)
    run = trainer(
        folder, bert().double() if model is None else model, physical, 2, given, kind=Watched,
        train_dataset=data(), **kwargs,
    )  # fmt: skip
    if fsdp:  # Accelerate chooses it on GPUs alone
        choose_fsdp(
            run.accelerator.state, auto_wrap_policy="transformer_based_wrap",
            state_dict_type="FULL_STATE_DICT", transformer_cls_names_to_wrap=["BertLayer"],
        )  # fmt: skip
        run.is_fsdp_enabled = True
    return run


def _found(run: Any) -> dict[str, Any]:
    model = run.model
    return {
        "weights": torch.cat([full(p.detach()).reshape(-1) for p in model.parameters()]),
        "names": [name for name, _ in model.named_parameters()],
        "history": run.engine.accountant.history,
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "spread": isinstance(model, FSDPModule),
    }


def trained(folder: str, kind: str) -> dict[str, Any]:
    """A run, the same run cut in two, and one with noise."""
    as_torchrun()
    fsdp, where = kind == "fsdp", Path(folder)
    told = {"clipping": clipping.soft_ada_clip()}
    whole = _trainer(where / "a", fsdp, privacy=told, eval_dataset=rows(7),
                     arguments={"eval_strategy": "steps", "eval_steps": 3})  # fmt: skip
    whole.train()
    found = {"whole": _found(whole), "drawn": whole.drawn}
    found["evaluated"] = [e["eval_loss"] for e in whole.state.log_history if "eval_loss" in e]
    cut = _trainer(where / "a", fsdp, privacy=told)
    cut.train(resume_from_checkpoint=str(where / "a" / "checkpoint-4"))
    found["cut"] = _found(cut)
    noisy = _trainer(where / "b", fsdp, privacy={"noise_multiplier": 1.0, "accountant": "prv"},
                     noise_generator=None, arguments={"data_seed": None})  # fmt: skip
    noisy.train()
    found["noisy"], found["epsilon"] = _found(noisy), noisy.epsilon()
    half = _trainer(
        where / "d", fsdp, Cast(bert().config), arguments={"bf16": True, "max_steps": 2}
    )
    for _ in range(2):
        half.model.cast = None
        half.train()
    found["half"], found["cast"] = _found(half), half.model.cast
    shuffled = _trainer(where / "c", fsdp, privacy={"poisson_sampling": False})
    shuffled.train()
    found["shuffled"], found["dealt"] = _found(shuffled), shuffled.drawn
    return found


def units() -> dict[str, Any]:
    """Patients of up to three rows: DistributedDataParallel and FSDP2, which fills up draws."""
    as_torchrun()
    told = {
        "unit_ids": [i // 3 for i in range(ROWS)],
        "sample_rate": 0.3,
        "expected_batch_size": 3.0,
    }
    found = {}
    for fsdp in (False, True):
        run = _trainer(Path("units"), fsdp, privacy=told, arguments={"save_strategy": "no"},
                       physical=4)  # fmt: skip
        run.train()
        found["fsdp" if fsdp else "ddp"] = {**_found(run), "drawn": run.drawn}
    return found


def again(folder: str) -> dict[str, Any]:
    """Two runs of one trainer, with evaluations before (which FSDP2 forbids), within and after them."""
    as_torchrun()
    told = {"save_strategy": "no", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    found = {}
    for fsdp in (False, True):
        run = _trainer(Path(folder), fsdp, arguments=told, eval_dataset=rows(7))
        if not fsdp:
            run.evaluate()
        run.train()
        first = run.drawn
        run.train()
        metrics = run.evaluate()
        found["fsdp" if fsdp else "ddp"] = {
            **_found(run), "drawn": [*first[:4], *run.drawn[:4]], "loss": metrics["eval_loss"]
        }  # fmt: skip
    model = fully_shard(bert().double())
    with pytest.raises(ArgumentError, match="fsdp=True"):
        _trainer(Path(folder), False, model).train()
    return found


def replayed(drawn: list[list[int]], strategy: Any = "flat", batch: float = 3.0) -> torch.Tensor:
    """The weights of one process that trains on these rows."""
    model, table = bert().double(), data()
    inner = torch.optim.AdamW(model.parameters(), RATE, eps=EPS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 - step / len(drawn))
    loader = torch.utils.data.DataLoader(table, 8, collate_fn=pad)
    engine = FastPrivacyEngine(accountant="rdp")
    private, optimizer, _ = engine.make_private(
        module=model.train(), optimizer=inner, data_loader=loader, noise_multiplier=0.0,
        max_grad_norm=0.5, poisson_sampling=False, expected_batch_size=batch, clipping=strategy,
    )  # fmt: skip
    for numbers in drawn:
        optimizer.zero_grad()
        given = pad([table[i] for i in numbers])
        given.pop("group")
        labels = given.pop("labels")
        F.cross_entropy(private(**given).logits, labels).backward()
        optimizer.step()
        schedule.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
