"""What the papers' loops run on: one sample at a time, ordinary autograd, float64, no fastclip."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MARGIN = 1e-4
"""Relative distance of every norm from every threshold it is compared with: far above the rounding
of float32, so that a run in float32 counts exactly what the loop in float64 counts."""


@dataclass(frozen=True)
class Batch:
    """A logical batch as the sampler might draw it."""

    x: Tensor  # [b, d]
    y: Tensor  # [b]
    groups: Tensor  # [b], from 0 to K - 1

    def split(self, most: int) -> list[Batch]:
        """Parts of at most `most` rows; an empty batch is one empty part."""
        parts = zip(*(t.split(most) for t in (self.x, self.y, self.groups)), strict=True)
        return [Batch(*part) for part in parts]


@dataclass(frozen=True)
class Step:
    """Everything that one step of an algorithm computes.

    Attributes:
        g, scales: gradients of the samples, [b] of flat vectors, and what they are multiplied by.
        total: sum of the clipped gradients. update: noisy gradient. weights: after the step.
        threshold, sensitivity: in use in this step. counts: noisy ones, None without count queries.
        sigma_grad, sigma_count: noise multipliers in use.
    """

    g: list[Tensor]
    scales: list
    total: Tensor
    update: Tensor
    weights: Tensor
    threshold: float | Sequence[float]
    sensitivity: float
    sigma_grad: float
    sigma_count: float | None = None
    counts: Tensor | None = None

    @property
    def sigma(self) -> float:
        """The total noise multiplier: bounded adaptive clipping, Lemma 3.1."""
        if self.sigma_count is None:
            return self.sigma_grad
        return (self.sigma_grad**-2 + self.sigma_count**-2) ** -0.5


class Run:
    """Weights, batches, public batch size, and the standard normals that the engine draws too.

    Args:
        model: as made private; copied, in float64.
        expected_batch_size: B, public. dtype: in which the noise of the gradients is drawn.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], expected_batch_size: int, lr: float,
        dtype: torch.dtype, seed: int,
    ) -> None:  # fmt: skip
        self.model = copy.deepcopy(model).double()
        self.parameters = list(self.model.parameters())
        self.batches = batches
        self.B = expected_batch_size
        self.lr = lr
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def gradients(self, batch: Batch) -> list[Tensor]:
        """g_i, the gradient of each sample's own loss, flat."""
        rows = []
        for x, y in zip(batch.x.double(), batch.y, strict=True):
            loss = nn.functional.cross_entropy(self.model(x[None]), y[None])
            rows.append(flatten(torch.autograd.grad(loss, self.parameters)))
        return rows

    def layers(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A flat gradient as one vector a parameter tensor."""
        return flat.split([p.numel() for p in self.parameters])

    def normal(self) -> Tensor:
        """N(0, I) of the gradient, drawn parameter by parameter."""
        draws = [torch.empty(p.shape, dtype=self.dtype) for p in self.parameters]
        return flatten([z.normal_(generator=self.generator) for z in draws]).double()

    def count_normal(self, *shape: int) -> Tensor:
        """N(0, I) of the counts."""
        return torch.empty(shape, dtype=torch.float64).normal_(generator=self.generator)

    def descend(self, clipped: Sequence[Tensor], std: float) -> tuple[Tensor, Tensor, Tensor]:
        """(sum_i g_i + N(0, std^2 I)) / B and a step of gradient descent: total, update, weights."""
        total = torch.zeros(sum(p.numel() for p in self.parameters), dtype=torch.float64)
        for g_bar in clipped:
            total = total + g_bar
        update = (total + std * self.normal()) / self.B
        with torch.no_grad():
            for p, part in zip(self.parameters, self.layers(update), strict=True):
                p -= self.lr * part.view(p.shape)
        return total, update, flatten(self.parameters).detach().clone()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def norm(g: Tensor) -> float:
    """L2 norm."""
    return math.sqrt(float((g * g).sum()))


def at_most(n: float, limit: float) -> bool:
    """n <= limit, where the answer does not hang on rounding."""
    assert abs(n - limit) > MARGIN * limit, "a norm sits on a threshold: choose another seed"
    return n <= limit


def shares(sigma: float, r: float) -> tuple[float, float]:
    """sigma_grad and sigma_count = r sigma_grad that together cost sigma.

    Bounded adaptive clipping, Lemma 3.1: sigma^-2 = sigma_grad^-2 + sigma_count^-2.
    """
    sigma_grad = sigma * math.sqrt(1 + 1 / r**2)
    return sigma_grad, r * sigma_grad
