"""Which norm rule for which layer and shape: one visible place, by cost, within a memory budget.

Three ways to a linear or convolutional layer's norm (KERNELS: One backward pass):

- ghost: Gram matrices of input and output gradient; both are held for the clipped sum;
- keep: the per-sample gradient itself is computed and held; its weighted sum is the clipped sum,
  so the ordinary weight gradient is never computed;
- recompute: the per-sample gradient is computed a few samples at a time for its norm only.

The constants are rates of one machine, measured by `bench`; only their ratios matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastclip.ops import ConvGeometry


@dataclass(frozen=True)
class Choice:
    """What the planner decided for one layer and shape."""

    method: str
    seconds: float
    nbytes: int
    """Bytes held until the end of the backward pass."""

    @property
    def keep(self) -> bool:
        return self.method == "keep"

    @property
    def ghost(self) -> bool:
        return self.method == "ghost"


@dataclass(frozen=True)
class Costs:
    """Rates that the cost model divides by (a 2-core AVX2 CPU, float32)."""

    matmul: float = 200e9
    """Floating-point operations a second of a batched matrix product."""
    copy: float = 20e9
    """Bytes a second of an elementwise pass."""
    kept: float = 4e9
    """Bytes a second at which a linear layer's fresh per-sample gradients are written, summed."""
    kept_conv: float = 1.2e9
    """The same for a convolution with samples as groups."""


class Planner:
    """Chooses, remembers what it chose for `engine.plan()`, and keeps to the memory budget.

    Args:
        memory_factor: budget: a layer's kept per-sample gradients may take this many times the
            bytes of the input and output gradient that they replace; 1 never holds more than
            book-keeping does, 0 keeps nothing.
        gram_tolerance: relative error of a norm that a Gram's rounding bound may add; above it the
            norm is instantiated (float32 Grams over long sequences).
        costs: rates of the machine.
    """

    def __init__(
        self, memory_factor: float = 1.5, gram_tolerance: float = 1e-4, costs: Costs | None = None
    ) -> None:
        self.memory_factor = memory_factor
        self.gram_tolerance = gram_tolerance
        self.costs = costs or Costs()

    def linear(self, b: int, t: int, d: int, p: int, itemsize: int, may_keep: bool) -> Choice:
        """For a [b, t, d] and g [b, t, p]."""
        held = b * t * (d + p) * itemsize
        if t == 1:
            return Choice("ghost", 0.0, held)
        product = 2 * b * t * d * p / self.costs.matmul
        kept_bytes = b * d * p * _accumulated(itemsize)
        ghost = 2 * b * t * t * (d + p) / self.costs.matmul + b * t * t * 12 / self.costs.copy
        options = [
            Choice("ghost", ghost + product, held),
            Choice("recompute", 2 * product + kept_bytes / self.costs.copy, held),
        ]
        if may_keep and kept_bytes <= self.memory_factor * held:
            options.append(Choice("keep", product + kept_bytes / self.costs.kept, kept_bytes))
        return self._cheapest(options, t, itemsize)

    def conv(
        self, b: int, space: int, out: int, geometry: ConvGeometry, itemsize: int, may_keep: bool
    ) -> Choice:
        """For x with `space` pixels a channel and g with `out` positions."""
        o, c = geometry.weight_shape[:2]
        c_all = c * geometry.groups
        taps = torch.Size(geometry.kernel).numel()
        pixels = out if geometry.is_pointwise else space
        held = b * (space * c_all + out * o) * itemsize
        product = 2 * b * out * taps * c * o / self.costs.matmul
        kept_bytes = b * taps * c * o * _accumulated(itemsize)
        grams = 2 * b * (pixels**2 * c_all + out**2 * o) / self.costs.matmul
        shifts = 0 if geometry.is_pointwise else sum(geometry.kernel)
        passes = b * geometry.groups * (pixels * out * 4 * shifts + out * out * 12)
        options = [
            Choice("ghost", grams + passes / self.costs.copy + product, held),
            Choice("recompute", 2 * product + kept_bytes / self.costs.kept_conv, held),
        ]
        if may_keep and kept_bytes <= self.memory_factor * held:
            options.append(Choice("keep", product + kept_bytes / self.costs.kept_conv, kept_bytes))
        return self._cheapest(options, out, itemsize)

    def _cheapest(self, options: list[Choice], positions: int, itemsize: int) -> Choice:
        roundoff = 1e-16 if itemsize == 8 else 6e-8
        if roundoff * positions > self.gram_tolerance:
            options = [choice for choice in options if not choice.ghost]
        return min(options, key=lambda choice: choice.seconds)


def _accumulated(itemsize: int) -> int:
    return max(itemsize, 4)
