"""Samples that lie folded with other dimensions: positions, windows, heads, patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, T, image

FOLDS = Family("folds")


@FOLDS.member
class SampleMajor(nn.Module):
    """[b * t, d] through layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.reshape(-1, D)).view(*x.shape[:2], 3)


@FOLDS.member
class TimeMajor(nn.Module):
    """[t * b, d] through layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, 3))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return self.layers(x.transpose(0, 1).reshape(-1, d)).view(t, b, 3).transpose(0, 1)


@FOLDS.member
class Between(nn.Module):
    """[t * b * h, d]: the samples in the middle of the folded axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.raw = nn.Linear(2, 2), parameter(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        folded = x.transpose(0, 1).reshape(t * b * 3, 2)
        out = self.layer(folded).tanh() @ self.raw
        return out.view(t, b, 6).transpose(0, 1)


@FOLDS.member
class Windows(nn.Module):
    """[b * windows, 2, d], attention within each with a learned bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(D, 3 * D), parameter(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, _, d = x.shape
        windows = x[:, :4].reshape(b * 2, 2, d)
        q, k, v = self.qkv(windows).chunk(3, -1)
        return (((q @ k.mT) + self.bias).softmax(-1) @ v).reshape(b, 4, d)


@FOLDS.member
class ShiftedWindows(nn.Module):
    """[windows * b, 2, d], rolled along time before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gamma = nn.Linear(D, D), parameter(2, D)

    def forward(self, x: Tensor) -> Tensor:
        b, _, d = x.shape
        windows = x[:, :4].roll(1, 1).reshape(b, 2, 2, d).transpose(0, 1).reshape(2 * b, 2, d)
        out = self.layer(windows) * self.gamma
        return out.view(2, b, 2, d).transpose(0, 1).reshape(b, 4, d).roll(-1, 1)


@FOLDS.member
class Heads(nn.Module):
    """[b * heads, t, d / heads], a norm and a scale within each."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.norm, self.scale = nn.Linear(D, 2 * D), nn.LayerNorm(3), parameter(3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k = self.qk(x).chunk(2, -1)
        fold = lambda y: y.view(b, t, 2, 3).transpose(1, 2).reshape(b * 2, t, 3)  # noqa: E731
        q, k = self.norm(fold(q)) * self.scale, self.norm(fold(k))
        out = torch.bmm((q @ k.mT).softmax(-1), fold(x))
        return out.view(b, 2, t, 3).transpose(1, 2).reshape(b, t, D)


@FOLDS.member
class HeadBiases(nn.Module):
    """A parameter of every head, repeated over the folded axis."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.bias = nn.Linear(D, D), parameter(2, T, T)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 2, 3).transpose(1, 2).reshape(b * 2, t, 3)
        scores = q @ q.mT + self.bias.repeat(b, 1, 1)
        return (scores.softmax(-1) @ q).view(b, 2, t, 3)


@FOLDS.member(inputs=image)
class Patches(nn.Module):
    """Pixels of every patch by unfold, [b * patches, pixels]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.mean = nn.Linear(8, 5), nn.LayerNorm(5), parameter(8)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2).reshape(-1, 8)
        return self.norm(self.layer(patches - self.mean)).view(len(x), 16, 5)


@FOLDS.member
class FramesOfVideo(nn.Module):
    """A convolution of every frame, [b * t, 1, 2, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.raw = nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), parameter(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        frames = self.norm(self.conv(x.reshape(b * t, 1, 2, 3))) * self.raw
        return frames.view(b, t, 4)


@FOLDS.member
class AxisByAxis(nn.Module):
    """Time, then features, in the batch's place; a layer in both."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time, self.over_features = nn.Linear(T, T), nn.Linear(D, D)
        self.scale = parameter(T)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.over_time(x.permute(2, 0, 1).reshape(d * b, t)) * self.scale
        h = h.view(d, b, t).permute(2, 1, 0).reshape(t * b, d)
        return self.over_features(h.tanh()).view(t, b, d).transpose(0, 1)


@FOLDS.member
class EinsumBatchLast(nn.Module):
    """The samples along the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shift = parameter(4, D), parameter(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("pd,btd->ptb", self.a, x) + self.shift
        return h.tanh().permute(2, 1, 0)


@FOLDS.member
class FlatFeatures(nn.Module):
    """Everything of a sample in one row, then split again: no fold of samples at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(T * D, T * 2), parameter(T, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)).view(-1, T, 2) * self.scale


@FOLDS.member
class Mixed(nn.Module):
    """One layer, called with a plain and with a folded batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        folded = self.layer(x.reshape(-1, D)).view(x.shape)
        return self.layer(folded.tanh()) + self.layer(x.mean(1))[:, None]
