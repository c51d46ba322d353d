"""Patients as units, from make_private to the released step: drawn whole, clipped and told as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError
from tests.refusal import refused

D, C = 4, 0.2
SIZES = [1, 3, 2, 5, 1, 4, 2, 2, 6, 1]
OWNERS = [unit for unit, size in enumerate(SIZES) for _ in range(size)]


class Notes(Dataset):
    """Rows (number of the row, features); those of a patient do not lie together."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.order = torch.randperm(len(OWNERS), generator=generator)
        self.x = torch.randn(len(OWNERS), D, generator=generator, dtype=torch.float64)
        self.ids = [f"patient {OWNERS[i]}" for i in self.order.tolist()]

    def __len__(self) -> int:
        return len(OWNERS)

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        return row, self.x[row]


def start(clipping: Any = "flat", reduction: str = "mean", **options: Any) -> tuple:
    torch.manual_seed(1)
    notes = Notes()
    model = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    engine = FastPrivacyEngine(secure_mode=options.pop("secure", False))
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data_loader=DataLoader(notes, batch_size=9, num_workers=options.pop("workers", 0)),
        noise_multiplier=0.0, max_grad_norm=C, unit_ids=notes.ids, sample_rate=0.4,
        expected_batch_size=4, unit_reduction=reduction, clipping=clipping, **options,
    )  # fmt: skip
    return notes, engine, model, private, optimizer, loader


def losses(out: Tensor) -> Tensor:
    return 0.5 * (out - 1.0).square().sum(1)


def expected_sum(model: nn.Module, notes: Notes, rows: list[int], reduction: str) -> list[Tensor]:
    """One patient at a time."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for patient in {notes.ids[row] for row in rows}:
        mine = [row for row in rows if notes.ids[row] == patient]
        each = losses(model(notes.x[mine]))
        loss = each.mean() if reduction == "mean" else each.sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        for held, g in zip(total, grads, strict=True):
            held += min(1.0, C / float(norm)) * g
    return total


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_released_sums(workers: int, physical: int | None, reduction: str, secure: bool) -> None:
    notes, _, model, private, optimizer, loader = start(
        reduction=reduction, workers=workers, secure=secure
    )
    plain = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    steps = 0
    for _ in range(3 if not workers else 1):
        batches, held = loader, []
        if physical is not None:
            manager = BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            )
            batches = manager.__enter__()
        for rows, x in batches:
            optimizer.zero_grad()
            losses(private(x)).mean().backward()
            if not len(x):  # a step, too
                optimizer.step()
                continue
            held += rows.tolist()
            plain.load_state_dict(model.state_dict())
            sums = [p.summed_grad.clone() for p in model.parameters()]
            optimizer.step()
            if optimizer._is_last_step_skipped:
                continue
            for found, expected in zip(
                sums, expected_sum(plain, notes, held, reduction), strict=True
            ):
                assert torch.allclose(found, expected, rtol=0, atol=1e-10 * max(1.0, len(held)))
            owners = [notes.ids[row] for row in held]
            assert all(owners.count(u) == notes.ids.count(u) for u in set(owners))  # all its rows
            steps, held = steps + 1, []
    assert steps


def test_all_is_said_of_units() -> None:
    notes, engine, _, _, _, loader = start()
    found = engine.mechanism(delta=1e-3, epochs=2)
    assert (found.unit, found.units, found.expected_batch_size) == (
        "unit",
        None,
        4,
    )  # N is a secret
    assert engine.sampling.units == len(SIZES)
    assert "one unit, added or removed" in found.neighbors
    assert len(loader) == 2  # round(1 / 0.4)
    assert sum(steps for *_, steps in found.planned) == 4
    told = engine.explain(
        module=nn.Linear(D, 2), data_loader=DataLoader(notes, batch_size=9), delta=0.2,
        unit_ids=notes.ids,
    )  # fmt: skip
    assert any("of units, N = 10" in trap for trap in told.traps)
    assert any("1 / N = 0.1" in trap and "unit" in trap for trap in told.traps)


def test_rows_of_a_step_that_were_left_out_are_refused() -> None:
    *_, private, _, loader = start()
    for _, x in loader:
        if len(x) > 1:
            with refused("samples that the loader drew of its units, each once and in order"):
                losses(private(x[1:])).mean().backward()
            break


def test_a_unit_that_no_physical_batch_holds() -> None:
    *_, optimizer, loader = start()
    with refused("max_physical_batch_size", (ArgumentError, ValueError)), BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as batches:  # fmt: skip
        for _ in range(20):
            for _rows, _x in batches:
                pass


def test_opacus_modes_refuse_units() -> None:
    with refused("samples as Opacus does.*unit_ids"):
        start(grad_sample_mode="hooks")
