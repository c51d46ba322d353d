"""Bare linear layers of one shape, whose samples have one position each: norms and sums in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastclip.layers.record import written_to
from fastclip.ops.numerics import lost_squares, may_be_zero


@dataclass
class LinearStack:
    """Weights [p, d] of k layers, with the layers' inputs a [b, d] and output gradients g [b, p].

    Attributes:
        transposed: weights are [d, p].
    """

    transposed: bool
    parameters: list[nn.Parameter] = field(default_factory=list)
    a: list[Tensor] = field(default_factory=list)
    g: list[Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    def add(self, weight: nn.Parameter, a: Tensor, g: Tensor) -> None:
        """One more layer."""
        self.parameters.append(weight)
        self.a.append(a)
        self.g.append(g)
        self._versions += a._version, g._version

    @property
    def device(self) -> torch.device:
        """On which the sums are computed."""
        return self.a[0].device

    def norms(self) -> Tensor:
        """Squared norms of the weights' gradients, [k, b]."""
        from fastclip import _step

        (_, d), (_, p), dtype = self.a[0].shape, self.g[0].shape, self.g[0].dtype
        return _step.single_norms(self.a, self.g, lost_squares(d, dtype), lost_squares(p, dtype))

    def clipped_sums(self, scales: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of every weight.

        Args:
            scales: [b], or [k, b].
        """
        from fastclip import _step

        now = [x._version for pair in zip(self.a, self.g, strict=True) for x in pair]
        if now != self._versions:
            raise written_to()
        a, g = (self.g, self.a) if self.transposed else (self.a, self.g)
        return zip(
            self.parameters, _step.scaled_sums(a, g, scales, may_be_zero(scales)), strict=True
        )
