"""What layers show in a run, held once: where it is shown again, and where rows are copies."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch
from torch import Tensor


class Seen(dict[Hashable, list[Tensor]]):
    """Copies of values, call by call, by the name of the layer or use; they are not to be changed.

    Args:
        copies: the run is on so many copies of one row; 0: its rows differ.
    """

    def __init__(self, copies: int = 0) -> None:
        super().__init__()
        self._copies = copies
        self._last: tuple[Tensor, int, Tensor] | None = None

    def note(self, name: Hashable, value: Tensor) -> None:
        """One more value, which may be the last one again (the input of q, k and v)."""
        version = -1 if value.is_inference() else value._version
        if (
            self._last is None
            or self._last[0] is not value
            or self._last[1] != version
            or version < 0
        ):
            self._last = value, version, self._of_copies(value.detach())
        self.setdefault(name, []).append(self._last[2])

    def close(self) -> None:
        """The run is over: the last value is not held."""
        self._last = None

    def drop(self, names: Collection[Hashable]) -> None:
        """Hold nothing of these."""
        for name in self.keys() & names:
            del self[name]

    def _of_copies(self, value: Tensor) -> Tensor:
        """Without the copies, where all are the same to the bit, as most are."""
        for axis, size in enumerate(value.shape):
            if 1 < size == self._copies:
                first = value.narrow(axis, 0, 1)
                if torch.equal(value, first.expand_as(value)):
                    return first.clone().expand_as(value)
        return value.clone()
