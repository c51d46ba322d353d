"""Adaptive clipping in Opacus' modes: what is accounted, and what C follows (Andrew et al. 2021)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.accounting.epsilon import compose
from fastclip.engine.opacus_modes.optimizers import MaterializedAdaptiveOptimizer
from fastclip.errors import ArgumentError, StepError
from fastclip.ops.noise import NoiseSource
from tests.oracle import sample_loss
from tests.refusal import refused

D, B, N = 5, 8, 64
MODES = ("hooks", "functorch", "ew")
KEYWORDS = {
    "target_unclipped_quantile": 0.3, "clipbound_learning_rate": 0.4, "max_clipbound": 50.0,
    "min_clipbound": 0.01, "unclipped_num_std": 0.6,
}  # fmt: skip


class Scripted(NoiseSource):
    """Draws a constant times the standard deviation, which it remembers."""

    secure = False

    def __init__(self, value: float = 0.0) -> None:
        self.value, self.stds = value, []

    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        self.stds.append(std)
        return out.fill_(self.value * std)


def start(mode: str = "hooks", batch: int = B, **kwargs: Any) -> tuple:
    """(net, private model, optimizer, loader) at sigma = 1 and C = 1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    data = TensorDataset(torch.randn(N, D) * torch.rand(N, 1) * 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        engine = FastPrivacyEngine(accountant="rdp")
    options = KEYWORDS | {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | kwargs
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), clipping="adaptive",
        data_loader=DataLoader(data, batch, generator=torch.Generator().manual_seed(3)),
        grad_sample_mode=mode, **options,
    )  # fmt: skip
    return net, model, optimizer, loader


def one_step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    sample_loss(model(x)).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("row", [1e-4, 1e4])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.19])
@pytest.mark.parametrize("mode", MODES)
def test_joint_noise_multiplier(mode: str, sigma: float, row: float) -> None:
    """Of both queries, at the sensitivities that one more sample really has: sigma, not 0.569.

    A plain count changes by 1, which noise of 0.6 bounds at 0.569 together with the gradients'.
    """
    seen = []
    x = torch.randn(B, D)
    more = torch.cat([x, row * torch.ones(1, D)])
    for batch in (x, more):
        _, model, optimizer, _ = start(mode, noise_multiplier=sigma)
        source = optimizer.noise_source = Scripted()
        one_step(model, optimizer, batch)
        *gradients, counts = source.stds
        assert len(set(gradients)) == 1
        seen.append((float(optimizer.unclipped_num), gradients[0], counts))
    (without, std, counts), (within, *_) = seen
    change = abs(within - without)
    assert change == 0.5
    joint = compose(std / 1.0, counts / change)  # C = 1
    assert joint == pytest.approx(sigma, rel=1e-12)
    closed = (sigma**-2 - (2 * 0.6) ** -2) ** -0.5  # Theorem 1
    assert std == pytest.approx(closed, rel=1e-12)
    if sigma == 1.0:
        assert compose(std, 0.6) == pytest.approx(0.569, abs=5e-4)  # what a plain count comes to


def reference(norms: list[list[float]], noise: float, size: int) -> list[float]:
    """C after each logical batch: C exp(-eta (1/2 + (sum_i (b_i - 1/2) + noise) / B - target))."""
    found, c = [], 1.0
    for batch in norms:
        count = sum((n <= c) - 0.5 for n in batch) + noise
        c *= math.exp(-0.4 * (0.5 + count / size - 0.3))
        c = min(max(c, 0.01), 50.0)
        found.append(c)
    return found


@pytest.mark.parametrize("noise", [0.0, -2.0])
@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("mode", MODES)
def test_c_follows_the_quantile_by_the_public_batch_size(
    mode: str, physical: int | None, noise: float
) -> None:
    """Batches of any size, an empty one too; counts of physical batches add up."""
    net, model, optimizer, _ = start(mode, poisson_sampling=False)
    optimizer.noise_source = Scripted(noise)
    twin = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    norms, seen = [], []
    for rows in (5, 11, int(mode == "ew"), 8, 16, 2):  # "ew" takes no empty batch
        x = torch.randn(rows, D) * torch.rand(rows, 1) * 4
        twin.load_state_dict(net.state_dict())  # the noise of the gradients has moved it
        norms.append([gradient_norm(twin, row[None]) for row in x])
        parts = x.split(physical or N) if rows else [x]
        for i, part in enumerate(parts):
            optimizer.signal_skip_step(i < len(parts) - 1)
            before = float(optimizer.max_grad_norm)
            one_step(model, optimizer, part)
            assert i == len(parts) - 1 or float(optimizer.max_grad_norm) == before
        seen.append(float(optimizer.max_grad_norm))
        assert optimizer.sample_size == B
    assert seen == pytest.approx(reference(norms, noise * 0.6, B), rel=1e-6)


def test_accumulated_batches_have_as_many_denominators() -> None:
    """Without Poisson sampling, two backward passes before a step: fractions are of 2 B."""
    _, model, optimizer, _ = start(poisson_sampling=False)
    optimizer.noise_source = Scripted()
    for x in (torch.zeros(B, D), torch.zeros(B, D)):
        (sample_loss(model(x)).mean() * 0).backward()
    optimizer.step()
    assert optimizer.sample_size == optimizer.unclipped_num == 2 * B  # all within C
    assert float(optimizer.max_grad_norm) == pytest.approx(math.exp(-0.4 * (1 - 0.3)))


def gradient_norm(net: nn.Module, row: Tensor) -> float:
    net.zero_grad()
    sample_loss(net(row)).sum().backward()
    return float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())


def test_counts_of_a_step_that_is_not_accounted_are_not_shown() -> None:
    """Nor do they move C; the next batch is counted alone."""
    _, model, optimizer, _ = start()
    optimizer.noise_source = Scripted()

    def fails(_: Any) -> None:
        raise KeyboardInterrupt

    optimizer.attach_step_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        one_step(model, optimizer, torch.zeros(B, D))
    assert (float(optimizer.max_grad_norm), optimizer.unclipped_num) == (1.0, 0)
    optimizer.step_hook = None  # the accountant's stays
    optimizer.zero_grad()
    (sample_loss(model(torch.zeros(3, D))) * 0).mean().backward()
    optimizer.step()
    assert float(optimizer.unclipped_num) == 3 * 0.5 + B / 2


@pytest.mark.parametrize("sigma", [1.2, 5.0])
def test_a_sigma_that_the_counts_alone_would_spend(sigma: float) -> None:
    """At make_private as Opacus refuses it, and where a scheduler raises it later."""
    with pytest.raises(ValueError, match="smaller than 2 \\* unclipped_num_std"):
        start(noise_multiplier=sigma)
    net, model, optimizer, _ = start()
    optimizer.noise_multiplier = sigma
    before = [p.detach().clone() for p in net.parameters()]
    with refused("leaves nothing", StepError):
        one_step(model, optimizer, torch.randn(B, D))
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def test_a_public_batch_size_of_nothing() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with refused("expected_batch_size expects a number > 0", ArgumentError):
        MaterializedAdaptiveOptimizer(
            torch.optim.SGD(parameters, lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
            expected_batch_size=0, **KEYWORDS,
        )  # fmt: skip
