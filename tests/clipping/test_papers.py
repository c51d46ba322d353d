"""Every preset, and combinations, against a plain float64 loop of the paper's algorithm.

The loops draw the very standard normals that the engine draws and scale them by the papers' own
formulas, so that whole runs can be compared number by number: batches of varying size (two empty,
some of one sample), unequal groups (one of them absent at times), noise on gradients and counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.clipping import resolve
from tests.clipping.cases import CASES, Case, K
from tests.clipping.reference_run import Batch, Run, Step
from tests.oracle import make_private, relative_error

WIDTH, HIDDEN, CLASSES = 5, 6, 3
SIZES = (5, 7, 1, 4, 0, 6, 1, 3, 8, 2, 5, 1, 6, 4, 0, 7, 3, 5, 1, 4, 6, 2, 5, 4)
DATASET, BATCH, LOADER = 17, 4, 5
B = 3
"""int(N / len(loader)) = int(17 / 5): neither the size asked of the loader nor that of a batch."""
LR, NOISE_SEED = 0.3, 11
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
EXACT = 1e-9
"""Of whatever depends on counts and public numbers alone, which are float64 in every run."""
SAME_STEP = {name for name, case in CASES.items() if resolve(case.strategy).threshold.same_step}
"""These clip a batch at its own counts, and refuse to split it."""


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batches(dtype: torch.dtype) -> list[Batch]:
    """Rows of unequal size, three groups with shares 6 : 3 : 1."""
    generator = torch.Generator().manual_seed(5)
    drawn = []
    for b in SIZES:
        x = torch.randn(b, WIDTH, generator=generator)
        x = x * torch.rand(b, 1, generator=generator) * 2
        y = torch.randint(CLASSES, (b,), generator=generator)
        share = torch.tensor([0.6, 0.3, 0.1])
        groups = share.multinomial(b, replacement=True, generator=generator) if b else y
        drawn.append(Batch(x.to(dtype), y, groups))
    assert {0, 1} <= {len(batch.x) for batch in drawn}
    assert any(len(batch.x) > 3 and len(batch.groups.unique()) < K for batch in drawn)
    return drawn


def close(found: Any, expected: Any, tol: float) -> bool:
    """Relative to the norm of all entries."""
    found = torch.as_tensor(found, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape
    return relative_error(found, expected) <= tol


def gathered(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def start(case: Case, dtype: torch.dtype) -> tuple:
    """(engine, private model, optimizer, parameters, batches, the loop's steps)."""
    model = network().to(dtype)
    drawn = batches(dtype)
    run = Run(model, drawn, B, LR, dtype, NOISE_SEED)
    engine, private, optimizer, _ = make_private(
        model, max_grad_norm=case.C, noise_multiplier=case.sigma, clipping=case.strategy,
        batch_size=BATCH, dataset_size=DATASET, lr=LR,
        noise_generator=torch.Generator().manual_seed(NOISE_SEED),
    )  # fmt: skip
    return engine, private, optimizer, list(model.parameters()), drawn, case.steps(run)


def backward(engine: Any, private: nn.Module, batch: Batch) -> None:
    engine.set_groups(batch.groups)
    nn.functional.cross_entropy(private(batch.x), batch.y).backward()


def check_clipped(optimizer: Any, parameters: list[nn.Parameter], step: Step, tol: float) -> None:
    """What holds between backward() and step(): the sums, at which thresholds, and the noise."""
    total = gathered([p.summed_grad for p in parameters])
    assert close(total, step.total, tol)
    if len(step.g) == 1 and not isinstance(step.scales[0], list):
        (g,), (scale,) = step.g, step.scales
        assert float(total @ g / (g @ g)) == pytest.approx(scale, rel=tol, abs=tol)
    assert close(optimizer.threshold, step.threshold, EXACT)
    assert close(optimizer.sensitivity, step.sensitivity, EXACT)
    levels = optimizer.noise_levels
    assert (levels.counts is None) == (step.sigma_count is None)
    expected = [step.sigma, step.sigma, step.sigma_grad, step.sigma_count or 0.0]
    found = [optimizer.noise_multiplier, levels.total, levels.gradients, levels.counts or 0.0]
    assert found == pytest.approx(expected, rel=EXACT)


def check_released(optimizer: Any, parameters: list[nn.Parameter], step: Step, tol: float) -> None:
    """What holds after step(): everything that is public now."""
    assert close(gathered([p.grad for p in parameters]), step.update, tol)
    assert close(gathered(parameters), step.weights, tol)
    assert close(optimizer.threshold, step.threshold, EXACT)
    assert (optimizer.noisy_counts is None) == (step.counts is None)
    if step.counts is not None:
        assert close(optimizer.noisy_counts, step.counts, EXACT)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_run_is_the_papers_loop(name: str, dtype: torch.dtype) -> None:
    """In float32 the loop stays in float64, from the same rounded numbers."""
    tol = TOLERANCE[dtype]
    engine, private, optimizer, parameters, drawn, steps = start(CASES[name], dtype)
    sigmas = []
    for batch, step in zip(drawn, steps, strict=True):
        optimizer.zero_grad()
        backward(engine, private, batch)
        check_clipped(optimizer, parameters, step, tol)
        optimizer.step()
        check_released(optimizer, parameters, step, tol)
        sigmas.append(step.sigma)
    accounted = [(s, q) for s, q, times in engine.accountant.history for _ in range(times)]
    assert [s for s, _ in accounted] == pytest.approx(sigmas, rel=EXACT)
    assert {q for _, q in accounted} == {1.0}  # of batches that no loader drew


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", sorted(CASES.keys() - SAME_STEP))
def test_split_batches_are_one_step_of_the_loop(name: str) -> None:
    """Physical batches of at most three rows: counts and sums of all, noise and thresholds once."""
    engine, private, optimizer, parameters, drawn, steps = start(CASES[name], torch.float64)
    for batch, step in zip(drawn, steps, strict=True):
        parts = batch.split(3)
        for part in parts:
            optimizer.zero_grad()
            optimizer.signal_skip_step(part is not parts[-1])
            backward(engine, private, part)
            if part is parts[-1]:
                check_clipped(optimizer, parameters, step, EXACT)
            optimizer.step()
        check_released(optimizer, parameters, step, EXACT)
