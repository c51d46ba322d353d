"""Which norm rule for which layer and shape: one visible place, by cost, within a memory budget.

Three ways to a linear or convolutional layer's norm:

- ghost: Gram matrices of input and output gradient; both are held for the clipped sum;
- keep: the per-sample gradient itself is computed and held; its weighted sum is the clipped sum,
  so the ordinary weight gradient is never computed. Where it is larger than what the others hold,
  it is kept only if that saves a tenth of the layer's time;
- recompute: the per-sample gradient is computed a few samples at a time, for its norm, and again
  for the clipped sum.

The constants are the rates of the device (costs.py); only their ratios matter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fastclip.ops import ConvGeometry, by_matrices, matrices
from fastclip.planner.costs import Costs, costs_of, gram_share

_CPU = torch.device("cpu")
_WORTH = 0.1
"""Part of a layer's time that must be saved where it holds more than its operands."""


@dataclass(frozen=True)
class Choice:
    """What the planner decided for one layer and shape."""

    method: str
    seconds: float
    nbytes: int
    """Bytes held until the end of the backward pass."""
    of_units: bool = False
    """It is of units, whose rows are still to be put together."""

    @property
    def keep(self) -> bool:
        return self.method == "keep"

    @property
    def ghost(self) -> bool:
        return self.method == "ghost"


class Planner:
    """Chooses, remembers what it chose for `engine.plan()`, and keeps to the memory budget.

    Args:
        memory_factor: budget: a layer's kept per-sample gradients may take this many times the
            bytes of the input and output gradient that they replace, where that pays; 1 never
            holds more than book-keeping does, 0 keeps nothing.
        gram_tolerance: relative error of a norm that a Gram's rounding bound may add; above it the
            norm is instantiated (float32 Grams over long sequences).
        costs: rates of the machine; those of each tensor's own device if None.
    """

    def __init__(
        self, memory_factor: float = 1.5, gram_tolerance: float = 1e-4, costs: Costs | None = None
    ) -> None:
        self.memory_factor = memory_factor
        self.gram_tolerance = gram_tolerance
        self.costs = costs

    def rates(self, device: torch.device) -> Costs:
        """The rates of a device: the user's, the measured or the built-in ones."""
        return self.costs or costs_of(device.type, device.index)

    def linear(
        self, b: int, t: int, d: int, p: int, itemsize: int, may_keep: bool,
        device: torch.device = _CPU,
    ) -> Choice:  # fmt: skip
        """For a [b, t, d] and g [b, t, p]."""
        given = (self.rates(device), self.memory_factor, self.gram_tolerance)
        return _linear(b, t, d, p, itemsize, may_keep, *given)

    def conv(
        self, b: int, space: int, out: int, geometry: ConvGeometry, itemsize: int, may_keep: bool,
        device: torch.device = _CPU,
    ) -> Choice:  # fmt: skip
        """For x with `space` pixels a channel and g with `out` positions."""
        given = (self.rates(device), self.memory_factor, self.gram_tolerance)
        return _conv(b, space, out, geometry, itemsize, may_keep, *given)


@functools.lru_cache(maxsize=4096)
def _linear(
    b: int, t: int, d: int, p: int, itemsize: int, may_keep: bool, costs: Costs,
    memory_factor: float, tolerance: float,
) -> Choice:  # fmt: skip
    """`Planner.linear`; every layer asks in every step."""
    held = b * t * (d + p) * itemsize
    if t <= 1:
        return Choice("ghost", 0.0, held)
    flops = 2 * b * t * d * p
    product = flops / costs.matmul
    kept_bytes = b * d * p * _accumulated(itemsize)
    ghost = 2 * b * t * t * (d + p) * gram_share(t, costs.tile) / costs.gram
    if costs.scratch:
        ghost += b * t * t * 12 / costs.copy
    keep = product + kept_bytes / costs.kept
    options = [Choice("ghost", ghost + product, held), Choice("recompute", 2 * keep, held)]
    if may_keep and kept_bytes <= memory_factor * held:
        options.append(Choice("keep", keep, kept_bytes))
    return _cheapest(options, held, t, itemsize, tolerance)


@functools.lru_cache(maxsize=4096)
def _conv(
    b: int, space: int, out: int, geometry: ConvGeometry, itemsize: int, may_keep: bool, costs: Costs,
    memory_factor: float, tolerance: float,
) -> Choice:  # fmt: skip
    """`Planner.conv`; the same."""
    o, c = geometry.weight_shape[:2]
    c_all = c * geometry.groups
    taps = torch.Size(geometry.kernel).numel()
    pixels = out if geometry.is_pointwise else space
    held = b * (space * c_all + out * o) * itemsize
    flops = 2 * b * out * taps * c * o
    product = flops / costs.matmul
    kept_bytes = b * taps * c * o * _accumulated(itemsize)
    # The fused kernels compute the Gram of the patches, not of the pixels, and that of the gradients
    # once for each of the matrices.
    linear = by_matrices(geometry) and not costs.scratch
    rows = matrices(geometry) if linear else 1
    of_inputs = pixels**2 * c_all if costs.scratch else out**2 * taps * c_all
    ghost = 2 * b * (of_inputs + out**2 * o * rows) * gram_share(out, costs.tile) / costs.gram
    if costs.scratch:
        shifts = 0 if geometry.is_pointwise else sum(geometry.kernel)
        passes = b * geometry.groups * (pixels * out * 4 * shifts + out * out * 12)
        ghost += passes / costs.copy
    keep = product + kept_bytes / (costs.kept if linear else costs.kept_conv)
    options = [
        Choice("ghost", ghost + product, held),
        Choice("recompute", 2 * keep, held),
    ]
    if may_keep and kept_bytes <= memory_factor * held:
        options.append(Choice("keep", keep, kept_bytes))
    return _cheapest(options, held, out, itemsize, tolerance)


def _cheapest(
    options: list[Choice], held: int, positions: int, itemsize: int, tolerance: float
) -> Choice:
    """The fastest, of those that are accurate; it holds more than `held` only where that pays."""
    roundoff = 1e-16 if itemsize == 8 else 6e-8
    if roundoff * positions > tolerance:
        options = [choice for choice in options if not choice.ghost]
    lean = min((x for x in options if x.nbytes <= held), key=lambda choice: choice.seconds)
    best = min(options, key=lambda choice: choice.seconds)
    return best if best.seconds <= (1 - _WORTH) * lean.seconds else lean


def _accumulated(itemsize: int) -> int:
    return max(itemsize, 4)
