"""What runs release beside their sums, against the stated law: N(0, (sigma S / B)^2), once a step.

The laws are those of the audit (fastclip/audit/laws.py), whose own tests say what they find.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.audit.laws import of_repeats, of_squares, p_values_of_noise, shared
from fastclip.clipping import adaptive, dpsgd_f
from tests.clipping.reference_run import shares

ALPHA = 1e-6
C, SIGMA, B = 0.7, 1.3, 4


class Nothing(nn.Module):
    """Two matrices and a bias, of which no row has a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=i > 0) for i in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * sum(layer(x) for layer in self.layers)


class Idle:
    """A run whose sums are all zero, so that what it releases is noise."""

    def __init__(self, width: int, secure: bool = False, **options: Any) -> None:
        self.model = Nothing(width)
        self.sizes = [p.numel() for p in self.model.parameters()]
        self.engine = FastPrivacyEngine(secure_mode=secure)
        self.private, self.optimizer, self.loader = self.engine.make_private(
            module=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(torch.ones(4 * B, width)), batch_size=B),
            max_grad_norm=C, noise_multiplier=SIGMA, **options,
        )  # fmt: skip

    def step(self, x: Tensor) -> Tensor | None:
        """What a step releases, times B: flat, float64; None if the logical batch goes on."""
        self.optimizer.zero_grad()
        self.engine.set_groups(torch.arange(len(x)) % 2)
        self.private(x).sum().backward()
        self.optimizer.step()
        if self.optimizer._is_last_step_skipped:
            return None
        return B * torch.cat([p.grad.double().flatten() for p in self.model.parameters()])

    def one_pass(self) -> list[Tensor]:
        """Of batches that are drawn, in physical ones of two rows."""
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=2, optimizer=self.optimizer
        ) as batches:
            released = [self.step(x) for (x,) in batches]
        return [step for step in released if step is not None]

    def recorded(self) -> list[float]:
        """Sigma of each step, as the ledger has it."""
        return [sigma for sigma, _, n in self.engine.accountant.history for _ in range(n)]


def test_noise_is_what_is_stated() -> None:
    """Of every parameter and step, however many rows came and in how many physical batches."""
    run = Idle(width=120)
    released = torch.stack(run.one_pass() + run.one_pass())
    recorded = torch.tensor(run.recorded(), dtype=torch.float64)
    assert len(recorded) == len(released)
    found = p_values_of_noise(released / (recorded[:, None] * C), run.sizes)
    assert shared(found.values()) > ALPHA, found


def test_no_step_of_a_long_run_is_without_noise() -> None:
    run = Idle(width=6, poisson_sampling=False)
    released = torch.stack([run.step(torch.ones(B, 6)) for _ in range(240)])
    assert run.recorded() == [SIGMA] * 240
    noise = (released / (SIGMA * C)).numpy()
    assert shared([of_squares(step) for step in noise]) > ALPHA
    assert of_squares(noise) > ALPHA


@pytest.mark.parametrize("secure", [False, True])
def test_two_runs_have_nothing_in_common(secure: bool) -> None:
    first, second = (Idle(60, secure).one_pass()[0] for _ in range(2))
    assert of_repeats(first / (SIGMA * C), second / (SIGMA * C)) > ALPHA


COUNTING = {"adaptive": adaptive(count_noise_ratio=3.0), "dpsgd_f": dpsgd_f(2, 3.0)}


@pytest.mark.parametrize("name", COUNTING)
def test_noise_of_counts_is_what_is_stated(name: str) -> None:
    """Of no rows: what is counted is the noise. sigma_count = r sigma_grad, whatever C has become."""
    strategy = COUNTING[name]
    run = Idle(width=2, clipping=strategy, poisson_sampling=False)
    counts = []
    for _ in range(60):
        run.step(torch.zeros(0, 2))
        counts.append(run.optimizer.noisy_counts.flatten() / strategy.threshold.count_sensitivity)
    assert of_squares((torch.stack(counts) / shares(SIGMA, 3.0)[1]).double().numpy()) > ALPHA


def test_noise_follows_the_threshold() -> None:
    """C moves with every step, and the noise with it."""
    run = Idle(120, clipping=COUNTING["adaptive"], poisson_sampling=False)
    noise, thresholds = [], []
    for _ in range(4):
        thresholds.append(float(run.optimizer.max_grad_norm))
        released = run.step(torch.zeros(0, 120)) / (shares(SIGMA, 3.0)[0] * thresholds[-1])
        noise.append(released.numpy())
    assert len(set(thresholds)) == 4
    assert shared(map(of_squares, noise)) > ALPHA
