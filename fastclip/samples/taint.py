"""Which tensors hold numbers of the batch: whatever was computed from one that does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import StorageWeakRef, TorchDispatchMode, memory_of, tree_leaves
from fastclip.samples.ignored import Told, tell
from fastclip.samples.inputs import tensors_of
from fastclip.samples.parts import parts_of
from fastclip.samples.selected import selects
from fastclip.samples.undrawn import Undrawn
from fastclip.samples.writes import written_by

_CONSTANTS = {
    getattr(torch.ops.aten, name)
    for name in (
        "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty",
        "new_full", "new_empty_strided",
    )
}  # fmt: skip
"""Operators that take of a tensor its shape and its kind."""
DOUBLE, SINGLE = (torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32))


class Taint(TorchDispatchMode):
    """Follows the numbers of a batch through every operation that runs inside, views included.

    Random numbers are the same for all rows.

    Args:
        batch: the tensors that hold them at first. undrawn: what is drawn.
    """

    def __init__(self, batch: Iterable[Tensor], undrawn: Undrawn | None = None) -> None:
        super().__init__()
        self.undrawn = Undrawn() if undrawn is None else undrawn.again()
        self._memory: dict[int, Any] = {}
        self._numbers: dict[int, Any] = {}
        """Of these, what holds more than the shape of the batch: zeros of as many rows do not."""
        self.rounding = DOUBLE
        """Machine epsilon of the coarsest type in which numbers of the batch were computed."""
        self.selects = False
        """Rows were taken that numbers of the batch select."""
        self.told: Told = {}
        """Labels that the model leaves out, as far as it has told."""
        for x in batch:
            self.mark(x)

    def of(self, leaves: list[Any], cut: list[Any]) -> Taint:
        """Another one, of a run on these inputs.

        Args:
            cut: those that hold samples.
        """
        return Taint(tensors_of(cut), self.undrawn)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` holds numbers of the batch."""
        return self._among(x, self._memory)

    def follows(self, x: Tensor) -> bool:
        """Whether its numbers follow from those of the batch, not from its shape alone."""
        return self._among(x, self._numbers)

    @staticmethod
    def _among(x: Tensor, memory: dict[int, Any]) -> bool:
        parts = parts_of(x)
        return any(_storage(part) is None or memory_of(part) in memory for part in parts)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = self.undrawn(func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if any(self.holds(x) for x in given):
            self.selects |= selects(func, args)
            tell(self.told, func, args)
            follows = func.overloadpacket not in _CONSTANTS and any(map(self.follows, given))
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.mark(x, follows)
                    if x.is_floating_point() or x.is_complex():
                        self.rounding = max(self.rounding, torch.finfo(x.dtype).eps)
            if func._schema.is_mutable:
                for x in written_by(func, args, kwargs):
                    self.mark(x, follows)
        return out

    def mark(self, x: Tensor, follows: bool = True) -> None:
        """`x` holds numbers of the batch if it `follows`, or has its samples."""
        for part in parts_of(x):
            storage = _storage(part)
            if storage is None:
                continue
            # its number is no other's until this is let go, its memory is free
            self._memory[memory_of(part)] = StorageWeakRef(storage)
            if follows:
                self._numbers[memory_of(part)] = self._memory[memory_of(part)]


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # shards have none
        return None
