"""Two networks without BatchNorm, to copy: a ResNet for small images, and a classifier for short texts.

Index letters: b sample, c channel, h and w pixel, t position, d feature, k class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import BertConfig, BertModel

from examples.data import PADDING, TOKENS, VOCABULARY


def group_norm(channels: int, groups: int, dtype: torch.dtype | None = None) -> nn.GroupNorm:
    """GroupNorm with the largest divisor common to `groups` and `channels` as its group count."""
    return nn.GroupNorm(math.gcd(groups, channels), channels, dtype=dtype)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016, figure 5 left), with GroupNorm.

    It uses `a + b` instead of `a += b`, and ReLU out of place. In-place operations on a layer's output
    break backward hooks, and therefore Opacus' hooks mode.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        stride: int,
        norm_groups: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False, dtype=dtype)
        self.norm1 = group_norm(c_out, norm_groups, dtype)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False, dtype=dtype)
        self.norm2 = group_norm(c_out, norm_groups, dtype)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False, dtype=dtype),
                group_norm(c_out, norm_groups, dtype),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, c_in, h, w]
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return self.relu(y + self.shortcut(x))  # [b, c_out, h / stride, w / stride]


class ResNet(nn.Module):
    """The CIFAR-style ResNet: 3x3 stem, no max-pool, each stage twice as wide as the last.

    Args:
        blocks: number of blocks in each stage; every stage except the first halves h and w.
        num_classes: number of outputs k.
        in_channels: channels of the image.
        width: channels of the first stage.
        norm_groups: groups of every GroupNorm (fewer if this does not divide the channels).
        dtype: of the parameters.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        num_classes: int = 10,
        in_channels: int = 3,
        width: int = 64,
        norm_groups: int = 32,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False, dtype=dtype),
            group_norm(width, norm_groups, dtype),
            nn.ReLU(),
        )
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                c_out = width * 2**stage
                layers.append(BasicBlock(channels, c_out, stride, norm_groups, dtype))
                channels = c_out
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, c, h, w]
        y = self.stages(self.stem(x))
        return self.head(y.mean(dim=(2, 3)))  # [b, k]


def resnet18(
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    norm_groups: int = 32,
    dtype: torch.dtype | None = None,
) -> ResNet:
    """ResNet-18 for small images: four stages of two blocks, `width` to 8 `width` channels.

    With the defaults, it has 11.2 M parameters. Input [b, in_channels, h, w], output [b, num_classes].
    """
    return ResNet((2, 2, 2, 2), num_classes, in_channels, width, norm_groups, dtype)


class TextClassifier(nn.Module):
    """A small BERT, the mean of its outputs over the words, and a linear layer.

    In few and noisy steps, the mean learns faster than BERT's usual [CLS] token.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=128, max_position_embeddings=TOKENS,
        )  # fmt: skip
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(64, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 [b, t], to logits [b, k]."""
        words = tokens != PADDING  # [b, t]
        hidden = self.encoder(tokens, attention_mask=words.long()).last_hidden_state  # [b, t, d]
        mask = words.unsqueeze(2).to(hidden.dtype)
        return self.head((hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1))
