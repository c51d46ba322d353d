"""Which axis of a layer's input holds the samples: found from two batch sizes, never assumed.

A position table embeds ids of shape [1, t] or [t]; a recurrent layer may see [t, b, d]; t may equal
b by accident. So at the first training forward the model runs twice more, without gradients, on
its own input cut to 2 and to 3 rows: the axis of a layer's input that goes from 2 to 3 holds the
samples, and an input that does not change has none. Later calls are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from fastclip.errors import BatchSizeError

UNBATCHED = -1
_PROBES = (2, 3)


def batch_size_of(args: tuple, kwargs: dict, axis: int) -> int | None:
    """Number of samples in a model's inputs: the size along `axis` of its first tensor.

    A leading 1 broadcasts over the batch and does not count unless all are 1.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
    sizes = [
        leaf.shape[axis]
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) and leaf.dim() > axis
    ]
    return next((size for size in sizes if size != 1), sizes[0] if sizes else None)


class BatchLayout:
    """The samples' axis of every intercepted layer, by its path in the model.

    Args:
        axis: axis of the samples in the model's inputs (0 where batch_first).
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.known = False
        self._axes: dict[str, int] = {}
        self._probing: list[dict[str, list[tuple[int, ...]]]] = []

    @property
    def probing(self) -> bool:
        """A probe is running: layers call `observe` and otherwise run as they were."""
        return bool(self._probing)

    def observe(self, path: str, x: Any) -> None:
        """Note the shape of a layer's input during a probe."""
        if isinstance(x, Tensor):
            self._probing[-1].setdefault(path, []).append(tuple(x.shape))

    def learn(self, forward: Callable[..., Any], args: tuple, kwargs: dict, batch: int) -> None:
        """Run `forward` on 2 and on 3 rows of its input and note which axes follow.

        Random generators are restored, so that training is the same with and without this.
        Where the input cannot be cut (a PackedSequence), the model's own axis is taken on trust.
        """
        self.known = True
        if any(isinstance(leaf, PackedSequence) for leaf in (*args, *kwargs.values())):
            return
        cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        self._probing = [{}, {}]
        observed, self._probing = self._probing, []
        try:
            for rows, shapes in zip(_PROBES, observed, strict=True):
                self._probing = [shapes]
                few = self._cut(args, batch, rows), self._cut(kwargs, batch, rows)
                with torch.no_grad(), torch.random.fork_rng(devices=cuda):
                    forward(*few[0], **few[1])
        except Exception:  # the model needs its real input: fall back to the model's own axis
            return
        finally:
            self._probing = []
        for path, first in observed[0].items():
            axes = {
                _changed_axis(a, b) for a, b in zip(first, observed[1].get(path, []), strict=False)
            }
            if len(axes) == 1 and (axis := axes.pop()) is not None:
                self._axes[path] = axis

    def _cut(self, inputs: Any, batch: int, rows: int) -> Any:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() <= self.axis:
                return leaf
            if leaf.shape[self.axis] != batch:
                return leaf
            return leaf.narrow(self.axis, 0, 1).repeat_interleave(rows, dim=self.axis)

        return tree_map(cut, inputs)

    def locate(
        self, path: str, x: Tensor, batch: int | None, fixed: int | None
    ) -> tuple[int, Tensor]:
        """The samples' axis of `x`, and `x` expanded where one row serves the whole batch.

        Args:
            path: the layer's path. x: its input. batch: samples in the model's input, if known.
            fixed: the axis that the layer itself prescribes, if any.

        Raises:
            BatchSizeError: no axis of `x` can hold the samples.
        """
        axis = self._axes.get(path)
        if axis == UNBATCHED:
            return self._without_samples(path, x, batch)
        if axis is None:
            axis = fixed if fixed is not None else self._guess(x, batch)
        if fixed is not None and axis != fixed:
            raise BatchSizeError(
                f"{path}: this layer takes its samples along axis {fixed}, but in this model they "
                f"lie along axis {axis} of its input of shape {list(x.shape)}; move the batch first"
            )
        if x.dim() <= axis:
            raise BatchSizeError(
                f"{path}: expected an input with samples along axis {axis}, got shape "
                f"{list(x.shape)}"
            )
        rows = x.shape[axis]
        if batch is not None and rows != batch:
            if rows == 1 and axis == 0:
                return 0, x.expand(batch, *x.shape[1:])
            raise BatchSizeError(
                f"{path}: expected {batch} rows along axis {axis}, as in the model's input, got "
                f"shape {list(x.shape)}; layers must see one row a sample: keep the batch "
                "dimension apart (no reshape to [batch * length, ...]) and pass every input with it"
            )
        return axis, x

    def _guess(self, x: Tensor, batch: int | None) -> int:
        if self.axis and x.dim() > self.axis and x.shape[self.axis] == batch:
            return self.axis
        return 0

    def _without_samples(self, path: str, x: Tensor, batch: int | None) -> tuple[int, Tensor]:
        if batch is None:
            raise BatchSizeError(f"{path}: its input has no samples and the batch size is unknown")
        if x.dim() and x.shape[0] == 1:
            return 0, x.expand(batch, *x.shape[1:])
        if x.dim() == 1 and not x.is_floating_point():
            # ids of shape [t], whose rows are added to [b, t, d]: one copy of them a sample.
            return 0, x.expand(batch, *x.shape)
        raise BatchSizeError(
            f"{path}: its input of shape {list(x.shape)} has no batch dimension, so no per-sample "
            "gradient exists for it; give it a leading dimension of 1, or register a rule"
        )


def _changed_axis(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    """The one axis that went from 2 to 3 rows; UNBATCHED if none did; None if it is not clear."""
    if len(first) != len(second):
        return None
    changed = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not changed:
        return UNBATCHED
    if len(changed) == 1 and (first[changed[0]], second[changed[0]]) == _PROBES:
        return changed[0]
    return None
