"""diffusers' UNet2D, trained to predict noise, exact; in an environment with diffusers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from tests.products.step import check_step

pytest.importorskip("diffusers")
pytestmark = pytest.mark.extras

STEPS, SIZE = 50, 8


def network(**options: Any) -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=SIZE, in_channels=1, out_channels=1, block_out_channels=(8, 16),
        layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **options,
    )  # fmt: skip


def noising() -> Any:
    from diffusers import DDPMScheduler

    return DDPMScheduler(num_train_timesteps=STEPS)


def columns() -> tuple[Tensor, Tensor, Tensor]:
    """Images, and what is drawn for each: noise and a step."""
    x = torch.randn(4, 1, SIZE, SIZE, dtype=torch.float64)
    return x, torch.randn_like(x), torch.randint(STEPS, (4,))


@pytest.mark.parametrize("options", [{}, {"resnet_time_scale_shift": "scale_shift"}])
def test_step(options: dict[str, Any]) -> None:
    scheduler = noising()

    def loss(model: nn.Module, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(model(scheduler.add_noise(x, noise, t), t).sample, noise)

    check_step(network(**options), columns(), loss)


def test_step_with_classes() -> None:
    scheduler = noising()

    def loss(model: nn.Module, x: Tensor, noise: Tensor, t: Tensor, y: Tensor) -> Tensor:
        noisy = scheduler.add_noise(x, noise, t)
        return F.mse_loss(model(noisy, t, class_labels=y).sample, noise)

    check_step(network(num_class_embeds=3), (*columns(), torch.randint(3, (4,))), loss)


@pytest.mark.parametrize("views", [1, 3])
def test_noise_that_the_loop_draws(views: int) -> None:
    """As in the recipe: each view of a sample has its own noise and its own step."""
    scheduler, model = noising(), network().double()
    plain = network().double()
    data = TensorDataset(torch.randn(12, 1, SIZE, SIZE, dtype=torch.float64))
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=4), noise_multiplier=0.0, max_grad_norm=0.1,
        views=views,
    )  # fmt: skip
    for (x,) in loader:
        optimizer.zero_grad()
        x = x.repeat_interleave(views, 0)
        noise, t = torch.randn_like(x), torch.randint(STEPS, (len(x),))
        noisy = scheduler.add_noise(x, noise, t)
        F.mse_loss(private(noisy, t).sample, noise).backward()
        sums = [p.summed_grad.clone() for p in model.parameters()]
        plain.load_state_dict(model.state_dict())
        optimizer.step()
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for mine in range(0, len(x), views):
            own = slice(mine, mine + views)
            loss = F.mse_loss(plain(noisy[own], t[own]).sample, noise[own])
            grads = torch.autograd.grad(loss, list(plain.parameters()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for held, g in zip(total, grads, strict=True):
                held += min(1.0, 0.1 / float(norm)) * g
        whole = torch.cat([g.flatten() for g in total]).norm()
        for found, expected in zip(sums, total, strict=True):
            assert float((found - expected).norm()) <= 1e-8 * float(whole)
