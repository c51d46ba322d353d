"""Inputs without rows: what stays the same in every call says nothing of one batch, whatever it is.

A graph, a grid, a mask of positions have no samples, and are not cut for a look. Nor are the boxes of
all images one under another, of which a model may take the mean: every look would find it constant.
So what was not cut must be what it was before, or it may hold numbers of the samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip._torch import version_of
from fastclip.errors import BatchSizeError
from fastclip.samples import row_lists
from fastclip.samples.inputs import INPUT, Cuts, Way
from fastclip.samples.row_lists import is_array, is_rows

_COMPARED = 4
"""Calls in which tensors on a device are read, which waits for it; then every doubling is one."""
_MOST_KEPT = 32
"""Ways and lengths of inputs for which they are kept."""
_LARGEST = 2**22
"""Entries of a tensor that is copied, to be compared; of a larger one it is known which one it was."""
Lengths = tuple[tuple[int, ...], ...]
"""Sizes of a model's inputs along all axes but the samples'."""


class _Kept:
    """An input as it was in one call."""

    def __init__(self, value: Any) -> None:
        self.value, self.version = value, _version(value)
        small = not isinstance(value, Tensor) or value.numel() <= _LARGEST
        self.copy = row_lists.own(value) if small else None

    def is_there(self, now: Any) -> bool:
        """It is the same object, in which nothing was written."""
        return isinstance(now, Tensor) and now is self.value and _version(now) == self.version

    def differs(self, now: Any, read: bool) -> bool:
        """Whether this is another one; `read`: tensors on a device may be read."""
        if self.is_there(now):
            return False
        if not isinstance(now, Tensor) or not isinstance(self.value, Tensor):
            return not row_lists.same(self.copy, now)
        if now.shape != self.value.shape or now.dtype != self.value.dtype:
            return True
        if self.copy is None or now.device != self.copy.device or now.layout != torch.strided:
            return False
        return (read or now.device.type == "cpu") and not torch.equal(self.copy, now)


class Aside:
    """The inputs without rows of one kind of call, by the lengths of the others.

    No Snapshot: in every call they may be other tensors, whose numbers must be the same.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Way, Lengths, list[_Kept]]] = []
        self._calls = 0

    def check(self, leaves: list[Any], way: Way, cuts: Cuts) -> None:
        """Hold the inputs that are not cut against those of earlier calls; to be asked once a call.

        Those of other lengths (masks and positions of longer rows) are others.

        Raises:
            BatchSizeError: one has changed.
        """
        own = [
            n for n, (x, a) in enumerate(zip(leaves, cuts, strict=True)) if a is None and _holds(x)
        ]
        if not own or not torch.is_grad_enabled():
            return
        self._calls += 1
        read = self._calls <= _COMPARED or not self._calls & (self._calls - 1)
        if read and torch.cuda.is_available():
            read = not torch.cuda.is_current_stream_capturing()
        lengths = tuple(
            (*x.shape[:a], *x.shape[a + 1 :])
            for x, a in zip(leaves, cuts, strict=True) if a is not None and isinstance(x, Tensor)
        )  # fmt: skip
        for known, long, kept in self._kept:
            if long == lengths and known == way:
                for number, before in zip(own, kept, strict=False):
                    if before.differs(leaves[number], read):
                        raise _changed(number, leaves[number])
                return
        self._kept = [
            *self._kept[1 - _MOST_KEPT :],
            (way, lengths, [_Kept(leaves[n]) for n in own]),
        ]


def _holds(value: Any) -> bool:
    """Whether it may hold numbers of samples: several, which no optimizer changes."""
    if isinstance(value, PackedSequence) or is_rows(value):
        return not is_array(value) or value.size > 1
    if type(value) is not Tensor or isinstance(value, nn.Parameter):
        return False
    return value.numel() > 1 and not value.requires_grad


def _version(value: Any) -> int | None:
    return version_of(value) if isinstance(value, Tensor) and not value.is_inference() else None


def _changed(number: int, value: Any) -> BatchSizeError:
    shape = f", of shape {list(value.shape)}," if hasattr(value, "shape") else ""
    return BatchSizeError(
        f"{INPUT}{number}{shape} has no row for each sample, and is not what it was in an earlier call: "
        "it may hold numbers of the batch, on which the gradient of every row would depend (what "
        "earlier steps have released of them is not private either); pass one row for each sample, or, "
        "if it says nothing of samples, make it a buffer or an attribute of the model"
    )
