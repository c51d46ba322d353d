"""What the blocks of docs/recipes.md take for given; of those that need a library, where it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

PAGE = "docs/recipes.md"
Known = dict[str, Any]


def plain() -> Known:
    """What each has: an engine, and data of samples that are not images."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)))
    return {
        "torch": torch, "F": F, "engine": FastPrivacyEngine(), "model": model, "DataLoader": DataLoader,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "criterion": nn.CrossEntropyLoss(),
        "loader": DataLoader(data, batch_size=16),
    }  # fmt: skip


def adversarial() -> Known:
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
    return plain() | {
        "discriminator": nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        "generator": generator, "of_generator": torch.optim.Adam(generator.parameters()),
        "samples": torch.randn(64, 6),
    }  # fmt: skip


def with_timm() -> Known:
    try:
        import timm
        from timm.layers import GroupNormAct
    except Exception as error:  # without it, or with a torchvision that does not fit torch
        pytest.skip(f"timm cannot be imported here: {error}")
    data = TensorDataset(torch.randn(12, 3, 32, 32), torch.randint(10, (12,)))
    images = DataLoader(data, batch_size=4)
    return plain() | {
        "timm": timm,
        "GroupNormAct": GroupNormAct,
        "partial": partial,
        "images": images,
    }


def with_monai() -> Known:
    pytest.importorskip("monai")
    from monai.losses import DiceCELoss
    from monai.networks.nets import DynUNet

    data = TensorDataset(torch.randn(12, 1, 16, 16), torch.randint(2, (12, 1, 16, 16)))
    return plain() | {
        "DiceCELoss": DiceCELoss, "DynUNet": DynUNet, "scans": DataLoader(data, batch_size=4),
        "patients": [i // 2 for i in range(12)],
    }  # fmt: skip


def with_diffusers() -> Known:
    pytest.importorskip("diffusers")
    from diffusers import DDPMScheduler, UNet2DModel

    images = DataLoader(TensorDataset(torch.randn(12, 1, 8, 8)), batch_size=4)
    return plain() | {"DDPMScheduler": DDPMScheduler, "UNet2DModel": UNet2DModel, "images": images}


SCENES = [plain, with_timm, with_monai, with_diffusers, adversarial, adversarial]
