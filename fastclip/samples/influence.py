"""Influence: the gradient of some rows' outputs may reach no other row of any layer's output.

This sees smooth coupling that values show too little of (a millionth in float32), and says whose every
entry is. The other view of the same law is fastclip.samples.independence.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fastclip.errors import BatchSizeError
from fastclip.samples.gradients import gradients, normal
from fastclip.samples.independence import by_row, coupled
from fastclip.samples.owners import MIXED, NOBODY, coded_by, owners
from fastclip.samples.place import called
from fastclip.samples.probing import Output

_LOUD = 32.0
"""Gradients that are asked for are as large as that, but for float16."""
_PEAK, _LOWEST = 2.0**12, 2.0**8
"""Largest gradient in float16, about, and at least: smaller ones would be rounded away."""
_MOST_TRIALS = 8
_LARGE = 2**24
"""Bytes of gradients, from which on half of them are held at a time."""


class Influence:
    """Whose every entry of what the layers returned is, from gradients of one run.

    Args:
        output: of the run. of_outputs: axes of its samples. count: rows of the run.
    """

    def __init__(self, output: Any, of_outputs: list[int], count: int) -> None:
        self.count = count
        pairs = [
            (x, axis) for x, axis in zip(by_row(output), of_outputs, strict=False)
            if axis >= 0 and x.dim() > axis and x.shape[axis] == count and x.requires_grad
        ]  # fmt: skip
        self._from = [x for x, _ in pairs]
        self._seeds: list[Tensor] = []
        self._coded: list[Tensor] = []
        for x, axis in pairs:
            seed = normal(x, 1 + len(self._seeds)).mul_(_LOUD).to(x.dtype)
            self._seeds.append(seed)
            digits = torch.arange(count, dtype=torch.int64, device=x.device)
            self._coded.append(coded_by(seed, axis, digits - count // 2))

    def owners(self, asked: Iterable[Output]) -> list[tuple[Hashable, Tensor | None]]:
        """The sample of every entry, int8, by name, in the order asked; None: no gradient reaches it."""
        if not self._from:
            return []
        return [one for part in _parts(list(asked)) for one in self._owners(part)]

    def check_unmixed(self, name: Hashable, owner: Tensor, sources: Iterable[Output]) -> None:
        """Refuse an entry that follows from several samples.

        Args:
            sources: what was asked for, among it what has this name.

        Raises:
            BatchSizeError: naming where it is.
        """
        if not bool((owner == MIXED).any()):
            return
        edges = [source.edge for source in sources if source.name == name]
        one, other = (gradients(self._from, edges, self._seeds, keep_graph=True) for _ in range(2))
        for x, y in zip(one, other, strict=True):
            if x is not None and y is not None and not torch.equal(x.nan_to_num(), y.nan_to_num()):
                raise BatchSizeError(
                    f"{called(name)}: two backward passes over the same rows give different gradients: "
                    "one draws random numbers, or a kernel adds up in another order each time. Draw "
                    "them in the forward pass, or switch its library to deterministic gradients."
                )
        raise coupled(called(name))

    def _owners(self, asked: list[Output]) -> list[tuple[Hashable, Tensor | None]]:
        edges = [output.edge for output in asked]
        plain, scaled = self._both(edges)
        for _ in range(_MOST_TRIALS):
            halves = [x for x in (*plain, *scaled) if x is not None and x.dtype == torch.float16]
            factor = _louder(halves)
            if factor == 1:
                break
            self._seeds = [x * factor for x in self._seeds]
            self._coded = [x * factor for x in self._coded]
            plain, scaled = self._both(edges)
        found: list[tuple[Hashable, Tensor | None]] = []
        pairs = list(zip(plain, scaled, strict=True))
        del plain, scaled
        for number, output in enumerate(asked):
            one, other = pairs[number]
            pairs[number] = (None, None)  # gradients of everything are large
            owner = None
            if one is not None and other is not None:
                owner = owners(one, other, self.count, coarse=bool(halves))
            reached = owner is not None and bool((owner != NOBODY).any())
            found.append((output.name, owner if reached else None))
        return found

    def _both(self, edges: list[GradientEdge]) -> tuple[tuple[Tensor | None, ...], ...]:
        one, other = (
            gradients(self._from, edges, seeds, keep_graph=True)
            for seeds in (self._seeds, self._coded)
        )
        return one, other


def _parts(asked: list[Output]) -> list[list[Output]]:
    """Those whose gradients are asked for together: each part takes two backward passes.

    float16 anywhere leaves rounding everywhere, so all are seen together there.
    """
    sizes = [math.prod(output.shape) * output.dtype.itemsize for output in asked]
    half = sum(sizes) // 2
    if 2 * half < _LARGE or any(output.dtype == torch.float16 for output in asked):
        return [asked] if asked else []
    first = sum(until <= half for until in accumulate(sizes))
    return [part for part in (asked[:first], asked[first:]) if part]


def _louder(halves: list[Tensor]) -> float:
    """The power of two by which gradients in float16 should be larger, so that none is rounded."""
    sizes = [x.abs().amax().item() for x in halves if x.numel()]
    if not all(map(math.isfinite, sizes)):
        return 2.0**-3
    peak = max(sizes, default=0.0)
    return 2.0 ** math.floor(math.log2(_PEAK / peak)) if 0 < peak < _LOWEST else 1.0
