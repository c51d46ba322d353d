"""Bare linear layers on a CPU: norms in one call, sums in few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip._torch import version_of
from fastclip.backward import bare
from fastclip.layers.record import written_to
from fastclip.ops.numerics import lost_squares, may_be_zero

ROOM = 1 << 20
"""Bytes of sums that come into being at once; the operands of their layers are let go of then."""


@dataclass
class LinearStack:
    """Weights [p, d] of k layers, with the layers' inputs a [b, t, d] and output gradients g [b, t, p];
    where t is 1 they may be [b, d] and [b, p].

    Attributes:
        single: t is 1 of all of them, else of none. transposed: of each, whether its weight is [d, p].
    """

    single: bool
    parameters: list[nn.Parameter]
    a: list[Tensor]
    g: list[Tensor]
    transposed: list[bool]

    def __post_init__(self) -> None:
        self._versions = [*map(version_of, (*self.a, *self.g))]

    @property
    def device(self) -> torch.device:
        """On which the sums are computed."""
        return self.parameters[0].device

    def norms(self) -> Tensor:
        """Squared norms of the weights' gradients, [k, b]."""
        if not self.single:
            return ops.gram_norms([*zip(self.a, self.g, strict=True)]).raised()
        return bare.nodes.single_norms(self.a, self.g, *map(_lost, (self.a, self.g)))

    def clipped_sums(self, scales: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of every weight; its operands are let go of.

        Args:
            scales: [b], or [k, b].
        """
        if [*map(version_of, (*self.a, *self.g))] != self._versions:
            raise written_to()
        any_zero, last = may_be_zero(scales), len(self.parameters)
        while last:
            first = self._first_of(last)
            own = scales if scales.dim() == 1 else scales[first:last]
            turned = self.transposed[first:last]
            sides = zip(self.a[first:], self.g[first:], turned, strict=True)
            a, g = zip(*((g, a) if t else (a, g) for a, g, t in sides), strict=True)
            del self.a[first:], self.g[first:]
            sums = bare.nodes.scaled_sums(a, g, own, any_zero)
            del a, g
            yield from zip(self.parameters[first:last], sums, strict=True)
            last = first

    def _first_of(self, last: int) -> int:
        """The first of the layers before the `last`, counted from 1, whose sums have room together."""
        first, size = last - 1, self.parameters[last - 1].nbytes
        while first and (size := size + self.parameters[first - 1].nbytes) <= ROOM:
            first -= 1
        return first


def _lost(side: list[Tensor]) -> list[float]:
    """What squares that underflow can hide of each."""
    kinds = [(x.shape[-1], x.dtype) for x in side]
    known = {kind: lost_squares(*kind) for kind in {*kinds}}
    return [known[kind] for kind in kinds]
