"""Patients as units through transformers.Trainer: released sums, and what no physical batch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip.errors import BatchSizeError
from tests.integrations.tiny import bert, hf, pad, rows, trainer
from tests.refusal import refused

C = 0.5
ROWS = [{name: row[name] for name in ("input_ids", "label")} for row in rows()]
PATIENTS = [f"patient {(5 * i) % 7 // 2}" for i in range(len(ROWS))]
"""Of 3 to 7 rows each, which do not lie together."""
UNITS = {"noise_multiplier": 1e-9, "unit_ids": PATIENTS, "sample_rate": 0.4}
UNITS |= {"expected_batch_size": 2}


def expected_sum(model: Any, drawn: list[int], reduction: str) -> dict[str, torch.Tensor]:
    """One patient at a time."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for patient in {PATIENTS[i] for i in drawn}:
        mine = [ROWS[i] for i in drawn if PATIENTS[i] == patient]
        model.zero_grad()
        for row in mine:
            (model(**pad([row])).loss / (len(mine) if reduction == "mean" else 1)).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, g in grads.items():
            total[name] += min(1.0, C / float(norm)) * g
    return total


class Released(hf.TrainerCallback):
    """Holds every sum against `expected_sum`."""

    def __init__(self, run: Any, reduction: str) -> None:
        self.run, self.reduction, self.plain = run, reduction, bert()
        self.numbers = {tuple(row["input_ids"]): i for i, row in enumerate(ROWS)}
        self.seen: list[int] = []
        self.steps = 0

    def collate(self, drawn: list[dict]) -> dict[str, torch.Tensor]:
        self.seen += [self.numbers[tuple(row["input_ids"])] for row in drawn]
        return pad(drawn)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        drawn, self.seen = self.seen, []
        self.plain.load_state_dict(self.run.model.state_dict())
        size = self.run.dp_optimizer.grad_state.batch.draws._used[-1].draw.size
        expected = expected_sum(self.plain, drawn if size else [], self.reduction)
        for name, p in self.run.model.named_parameters():
            found = torch.zeros_like(p) if p.summed_grad is None else p.summed_grad
            assert (found - expected[name]).norm() < 1e-4 * C
        self.steps += 1


@pytest.mark.one_in(6)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("physical", "accumulation"), [(24, 1), (8, 1), (4, 2)])
def test_released_sums(tmp_path: Path, physical: int, accumulation: int, reduction: str) -> None:
    told = UNITS | {
        "unit_reduction": reduction,
        "max_samples_per_unit": 3 if physical == 4 else None,
    }
    run = trainer(
        tmp_path, None, physical, accumulation, told | {"per_sample_max_grad_norm": C},
        train_dataset=ROWS,
    )  # fmt: skip
    watch = Released(run, reduction)
    run.data_collator = watch.collate
    run.add_callback(watch)
    run.engine._prepare_data_loader = watching(run.engine._prepare_data_loader, watch)
    run.train()
    assert watch.steps == 4  # 2 passes of round(1 / 0.4)


def watching(prepare: Any, watch: Released) -> Any:
    """What make_private reads of the data to try the collator is no draw."""

    def prepared(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        watch.seen.clear()
        return made

    return prepared


def test_a_unit_that_no_physical_batch_holds(tmp_path: Path) -> None:
    """Said before the first step, not after steps were released, when the unit is drawn."""
    run = trainer(tmp_path, None, 4, 1, UNITS | {"sample_rate": 0.01}, train_dataset=ROWS)
    with refused("hold a unit of 7 samples.*per_device_train_batch_size", BatchSizeError):
        run.train()
    assert run.engine.accountant.history == []
    assert not any("forward" in module.__dict__ for module in run.model.modules())
