"""Accelerate on one process: make_private first, then prepare."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from tests.integrations.tiny import furthest, weights
from tests.refusal import refused

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture(autouse=True)
def a_fresh_process() -> None:
    """Accelerate keeps one state a process."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def parts() -> tuple:
    """(model, optimizer, loader), the same every time."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 6, generator=generator), torch.arange(48) % 3
    loader = DataLoader(TensorDataset(x, y), 12, generator=torch.Generator().manual_seed(2))
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.5), loader


def private(model, optimizer, loader, strategy="flat") -> tuple:
    engine = FastPrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(3), clipping=strategy,
    )  # fmt: skip
    return engine, *made


def run(model, optimizer, loader, accelerator=None) -> None:
    """One epoch as Accelerate's users write it."""
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        if accelerator is not None:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # there is nothing to clip yet
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["flat", clipping.soft_ada_clip()])
@pytest.mark.parametrize("split", [None, 4])
def test_prepared_after_make_private(split: int | None, strategy) -> None:
    """The same weights and the same epsilon as without Accelerate."""
    plain, ours = parts(), parts()
    engine, model, optimizer, loader = private(*plain, strategy)
    other, *made = private(*ours, strategy)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(*made)
    for rounds, who, inner in ((1, (model, optimizer, loader), optimizer), (1, prepared, made[1])):
        for _ in range(rounds):
            if split is None:
                run(*who, accelerator if who is prepared else None)
                continue
            with BatchMemoryManager(
                data_loader=who[2], max_physical_batch_size=split, optimizer=inner
            ) as batches:
                run(who[0], who[1], batches, accelerator if who is prepared else None)
    assert furthest(weights(plain[0]), weights(ours[0])) == 0
    assert engine.accountant.history == other.accountant.history == [(1.0, 0.25, 4)]


def test_bfloat16() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    engine, *made = private(*parts())
    model, optimizer, loader = accelerator.prepare(*made)
    run(model, optimizer, loader, accelerator)
    assert engine.accountant.history == [(1.0, 0.25, 4)]
    assert made[1].per_sample_norms.isfinite().all()


def test_its_gradient_accumulation_is_refused() -> None:
    """It would join several Poisson samples in one step."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    engine, *made = private(*parts())
    model, optimizer, loader = accelerator.prepare(*made)
    with refused("BatchMemoryManager"):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert engine.accountant.history == []


def test_prepared_first_is_refused() -> None:
    """A prepared optimizer skips steps that the accountant records."""
    model, optimizer, loader = parts()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    with refused("Call make_private first, then accelerator.prepare"):
        private(model, optimizer, loader)


def test_prepared_physical_batches_are_refused() -> None:
    """Accelerate draws one batch ahead: steps would end at the wrong physical batch."""
    _, model, optimizer, loader = private(*parts())

    def train() -> None:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as batches:
            for x, y in accelerate.Accelerator(cpu=True).prepare(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    with refused("A physical batch was drawn before the previous one was stepped"):
        train()
