"""A stand-in for what Opacus' tests take from torchvision, of which there is no build for every CPU.

Images are drawn from a generator by their index; networks have the layers that matter to a privacy
engine (convolutions, BatchNorm, a classifier), at a small width. It is in `sys.modules` only while
Opacus' test modules are imported: other libraries must not believe that torchvision is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class FakeData(Dataset):
    """Images with values in [0, 1) and a label, both a function of the index alone."""

    def __init__(
        self, size: int = 1000, image_size: Sequence[int] = (3, 224, 224), num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.size, self.image_size, self.num_classes = size, tuple(image_size), num_classes
        self.transform = transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(self.image_size, generator=generator)
        label = int(torch.randint(0, self.num_classes, (), generator=generator))
        return (image if self.transform is None else self.transform(image)), label


class Compose:
    """One transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Images are tensors already."""

    def __call__(self, image: Tensor) -> Tensor:
        return image


class Normalize:
    """(x - mean) / std of every channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std


def _convolution(c: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    )


class _Residual(nn.Module):
    def __init__(self, c: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(c, out, 3, stride), nn.ReLU(), _convolution(out, out, 3)
        )
        self.shortcut = _convolution(c, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Dense(nn.Module):
    def __init__(self, c: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, growth, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], dim=1)


class _InvertedResidual(nn.Module):
    def __init__(self, c: int, expanded: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(c, expanded, 1), nn.Hardswish(),
            _convolution(expanded, expanded, 3, stride, groups=expanded), nn.Hardswish(),
            _convolution(expanded, out, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class _Network(nn.Module):
    """Features, average over the pixels, a linear classifier of the name that tests look for."""

    def __init__(self, features: nn.Sequential, width: int, head: str) -> None:
        super().__init__()
        self.features, self.head = features, head
        setattr(self, head, nn.Linear(width, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.head)(self.features(x).mean((2, 3)))


def resnet18(weights: None = None) -> nn.Module:
    """Residual blocks, four widths, two blocks each, as in ResNet-18."""
    blocks = [
        _Residual(max(16, c // 2) if first else c, c, 2 if first and c > 16 else 1)
        for c in (16, 32, 64, 128)
        for first in (True, False)
    ]
    return _Network(nn.Sequential(_convolution(3, 16, 7, 2), nn.ReLU(), *blocks), 128, "fc")


def densenet121(weights: None = None) -> nn.Module:
    """Densely connected blocks with a transition between them, as in DenseNet."""
    features = nn.Sequential(
        _convolution(3, 64, 7, 2), nn.ReLU(), _Dense(64, 32), _Dense(96, 32),
        _convolution(128, 64, 1), nn.AvgPool2d(2), _Dense(64, 32), nn.BatchNorm2d(96), nn.ReLU(),
    )  # fmt: skip
    return _Network(features, 96, "classifier")


def mobilenet_v3_small(weights: None = None) -> nn.Module:
    """Inverted residuals with depthwise convolutions, as in MobileNetV3."""
    features = nn.Sequential(
        _convolution(3, 16, 3, 2), nn.Hardswish(),
        _InvertedResidual(16, 32, 16, 2), _InvertedResidual(16, 64, 32, 2),
    )  # fmt: skip
    return _Network(features, 32, "classifier")


_CONTENTS = {
    "datasets": (FakeData,),
    "transforms": (Compose, ToTensor, Normalize),
    "models": (resnet18, densenet121, mobilenet_v3_small),
}


@contextmanager
def installed() -> Iterator[None]:
    """`import torchvision` finds the stand-in inside, also where the real one is installed."""
    package = ModuleType("torchvision")
    modules = {"torchvision": package}
    for name, contents in _CONTENTS.items():
        part = ModuleType(f"torchvision.{name}")
        part.__dict__.update({thing.__name__: thing for thing in contents})
        setattr(package, name, part)
        modules[part.__name__] = part
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
