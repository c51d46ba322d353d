"""GANs with two optimizers, of which only the discriminator's sees data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import GraphError
from tests.refusal import refused

C, LATENT = 0.5, 3
Critic = Callable[[nn.Module, Tensor, Tensor], Tensor]


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(LATENT, 8), nn.ReLU(), nn.Linear(8, 4))
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1))
    return generator.double(), discriminator.double()


def cross_entropy(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    of_real, of_fake = discriminator(real), discriminator(fake)
    return F.binary_cross_entropy_with_logits(
        of_real, torch.ones_like(of_real)
    ) + F.binary_cross_entropy_with_logits(of_fake, torch.zeros_like(of_fake))


def wasserstein(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """With the penalty on slopes between each pair of a sample and what was generated."""
    of_real, of_fake = critic(real), critic(fake)
    slope = (of_real - of_fake).squeeze(1) / (real - fake).norm(dim=1)
    return (of_fake - of_real).mean() + 10 * (slope.abs() - 1).relu().square().mean()


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP's."""
    share = torch.rand(len(real), 1, dtype=real.dtype)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (critic(fake) - critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def start() -> tuple:
    generator, discriminator = networks()
    engine = FastPrivacyEngine()
    columns = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, LATENT, dtype=torch.float64)
    private, optimizer, loader = engine.make_private(
        module=discriminator, optimizer=torch.optim.Adam(discriminator.parameters(), lr=1e-2),
        data_loader=DataLoader(TensorDataset(*columns), batch_size=6), noise_multiplier=0.0,
        max_grad_norm=C,
    )  # fmt: skip
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    return engine, generator, discriminator, private, optimizer, of_generator, loader


@pytest.mark.parametrize("loss", [cross_entropy, wasserstein])
def test_both_train_and_sums_are_exact(loss: Critic) -> None:
    """The generator follows from the private discriminator alone; its pass is no step."""
    engine, generator, discriminator, private, optimizer, of_generator, loader = start()
    plain = networks()[1]
    first = [p.detach().clone() for p in generator.parameters()]
    for real, noise in loader:
        with torch.no_grad():
            fake = generator(noise if loss is wasserstein else torch.randn_like(noise))
        optimizer.zero_grad()
        loss(private, real, fake).backward()
        sums = [p.summed_grad.clone() for p in discriminator.parameters()]
        plain.load_state_dict(discriminator.state_dict())
        optimizer.step()
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for i in range(len(real)):
            own = loss(plain, real[i : i + 1], fake[i : i + 1])
            grads = torch.autograd.grad(own, list(plain.parameters()), materialize_grads=True)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for held, g in zip(total, grads, strict=True):
                held += min(1.0, C / float(norm)) * g
        for found, expected in zip(sums, total, strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-9)
        with engine.paused():
            of_generator.zero_grad()
            (-private(generator(torch.randn(6, LATENT, dtype=real.dtype)))).mean().backward()
            of_generator.step()
    assert all(not torch.equal(p, q) for p, q in zip(generator.parameters(), first, strict=True))
    assert sum(steps for *_, steps in engine.accountant.history) == len(loader)


def test_a_pass_of_the_generator_that_is_not_paused() -> None:
    _, generator, _, private, optimizer, _, loader = start()
    for real, _ in loader:
        optimizer.zero_grad()
        with refused("paused"):
            (-private(generator(torch.randn(6, LATENT, dtype=real.dtype)))).mean().backward()
        break


def test_a_gradient_penalty_is_refused() -> None:
    """It differentiates private layers twice; the message says what to take."""
    *_, private, optimizer, _, loader = start()
    for real, _ in loader:
        optimizer.zero_grad()
        with refused("difference of its outputs", GraphError):
            gradient_penalty(private, real, torch.randn_like(real)).backward()
        break
