"""The papers' networks, as functions of a data set: inputs [n, ...] to logits [n, k].

Index letters: b sample, c channel, d feature, k class.
"""

from __future__ import annotations

import torch
from torch import nn

from bench.papers.data.dataset import Dataset
from examples.models import ResNet, group_norm

NORM_GROUPS = 8
"""Groups of the GroupNorm of tabular networks, which the papers do not state."""


def logistic(data: Dataset) -> nn.Module:
    """Logistic regression of two classes: one linear layer, one logit (Xu et al., Zhao et al.)."""
    return nn.Linear(_features(data), 1)


def esipova_mlp(data: Dataset) -> nn.Module:
    """256 and 256 tanh units (Esipova et al. 2023, public code)."""
    return _mlp(_features(data), (256, 256), len(data.classes), nn.Tanh)


def income_simple(data: Dataset) -> nn.Module:
    """256 and 256 ReLU units and one logit (SoftAdaClip, Appendix A.3)."""
    return _mlp(_features(data), (256, 256), 1, nn.ReLU)


def icu_network(data: Dataset) -> nn.Module:
    """128, 64, 32 and 2 units, GroupNorm after the first two (SoftAdaClip, Appendix A.2).

    The paper's Adult "complex" model is the same network.
    """
    return nn.Sequential(
        nn.Linear(_features(data), 128),
        group_norm(128, NORM_GROUPS),
        nn.ReLU(),
        nn.Linear(128, 64),
        group_norm(64, NORM_GROUPS),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(32, len(data.classes)),
    )


def xu_cnn(data: Dataset) -> nn.Module:
    """Two convolutions and two linear layers, 431,080 parameters at 28 x 28 (Xu et al. 2020)."""
    c = data.train.x[0].shape[1]
    return _with_head(
        nn.Sequential(
            nn.Conv2d(c, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        ),
        (500,), data,
    )  # fmt: skip


def esipova_cnn(data: Dataset) -> nn.Module:
    """3 x 3 convolutions of 32 and 16 channels, tanh, one linear layer (Esipova et al. 2023)."""
    c = data.train.x[0].shape[1]
    return _with_head(
        nn.Sequential(
            nn.Conv2d(c, 32, 3), nn.Tanh(), nn.Conv2d(32, 16, 3), nn.Tanh(), nn.Flatten()
        ),
        (), data,
    )  # fmt: skip


def zhao_cnn(data: Dataset) -> nn.Module:
    """3 x 3 convolutions of 64 and 64 channels, 500 and 500 units (Zhao et al. 2025, A.5)."""
    c = data.train.x[0].shape[1]
    return _with_head(
        nn.Sequential(
            nn.Conv2d(c, 64, 3), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
        ),
        (500, 500), data,
    )  # fmt: skip


def small_cnn(data: Dataset) -> nn.Module:
    """For the 8 x 8 digits: convolutions of 16 and 32 channels, one hidden layer of 64."""
    c = data.train.x[0].shape[1]
    return _with_head(
        nn.Sequential(
            nn.Conv2d(c, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        ),
        (64,), data,
    )  # fmt: skip


def resnet18(data: Dataset) -> nn.Module:
    """ResNet-18 with GroupNorm, from scratch (Zhao et al. 2025; SAD-DPSGD, which starts pretrained)."""
    return ResNet((2, 2, 2, 2), len(data.classes), in_channels=data.train.x[0].shape[1])


def small_resnet(data: Dataset) -> nn.Module:
    """A ResNet of four blocks with GroupNorm (Esipova et al. 2023 train a like one on CelebA)."""
    return ResNet(
        (1, 1, 1, 1),
        len(data.classes),
        in_channels=data.train.x[0].shape[1],
        width=16,
        norm_groups=8,
    )


def _features(data: Dataset) -> int:
    return data.train.x[0].shape[1]


def _mlp(d: int, hidden: tuple[int, ...], outputs: int, activation: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(d, units), activation()]
        d = units
    return nn.Sequential(*layers, nn.Linear(d, outputs))


def _with_head(body: nn.Module, hidden: tuple[int, ...], data: Dataset) -> nn.Module:
    """The convolutions and, sized by a run of one image through them, the linear layers."""
    with torch.no_grad():
        d = body(data.train.x[0][:1]).shape[1]
    return nn.Sequential(body, _mlp(d, hidden, len(data.classes), nn.ReLU))
