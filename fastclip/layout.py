"""Which axis of a layer's input holds the samples: found from two batch sizes, never assumed.

A position table embeds ids of shape [1, t] or [t]; a recurrent layer may see [t, b, d]; t may equal
b by accident. So at the first training forward the model runs twice more, without gradients, on
its own input cut to 2 and to 3 rows: the axis of a layer's input that goes from 2 to 3 holds the
samples, and an input that does not change has none. Later calls are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastclip.errors import BatchSizeError, FastclipError

UNBATCHED = -1
_PROBES = (2, 3)
_MOST_CUTS = 64
Cuts = tuple[int | None, ...]
Shapes = dict[str, list[tuple[int, ...]]]


@dataclass
class Probe:
    """One run of the model on a few rows."""

    rows: int
    expand: bool
    """Expand inputs and parameters without samples, as training does."""
    shapes: Shapes = field(default_factory=dict)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested structure, also inside dataclasses and mappings torch does not know."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_of(list(vars(leaf).values()))
        elif isinstance(leaf, Mapping):
            yield from tensors_of(list(leaf.values()))


def batch_sizes_of(args: tuple, kwargs: dict, axis: int) -> list[int]:
    """What the number of samples in a model's inputs may be, the likeliest first.

    These are the sizes along `axis` of its tensors, in order. A leading 1 broadcasts over the batch
    and does not count unless all are 1.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, PackedSequence):
            return [int(value.batch_sizes[0])]
    tensors = tensors_of((args, kwargs))
    sizes = [tensor.shape[axis] for tensor in tensors if tensor.dim() > axis]
    return list(dict.fromkeys(size for size in sizes if size != 1)) or sizes[:1]


class BatchLayout:
    """The samples' axis of every intercepted layer, by its path in the model.

    Args:
        axis: axis of the samples in the model's inputs (0 where batch_first).
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.known = False
        self.probe: Probe | None = None
        """The probe that is running: layers show it their inputs and otherwise run as they were."""
        self._axes: dict[str, int] = {}
        self._told_by: int | None = None
        """The input, by its number, whose size along `axis` is that of the batch."""
        self._integer: set[str] = set()
        self._expand: set[str] = set()

    def batch_size(self, args: tuple, kwargs: dict) -> int | None:
        """Number of samples in the model's inputs."""
        if self._told_by is not None:
            leaves = tree_leaves((args, kwargs))
            leaf = leaves[self._told_by] if self._told_by < len(leaves) else None
            if isinstance(leaf, Tensor) and leaf.dim() > self.axis:
                return leaf.shape[self.axis]
        return next(iter(batch_sizes_of(args, kwargs, self.axis)), None)

    def learn(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict
    ) -> None:
        """Run the model's `forward` on 2 and on 3 rows of its input and note which axes follow.

        Further rounds do so with inputs and parameters without samples expanded, as training
        will, until every layer has samples, and check that the model still computes the same.
        Random generators and buffers are restored: training is the same with and without this.
        Where the input cannot be cut (a PackedSequence), the model's own axis is taken on trust.
        """
        if self.known or not self.batch_size(args, kwargs):
            return
        self.known = True
        if any(isinstance(leaf, PackedSequence) for leaf in (*args, *kwargs.values())):
            return
        first = self._first_run(model, forward, args, kwargs)
        if first is None:  # the model needs its real input: trust its own axis
            return
        cuts, shapes, plain = first
        self._told_by = next((i for i, axis in enumerate(cuts) if axis == self.axis), None)
        self._axes = _followed(*shapes)
        self._expand = {path for path in self._unbatched() if path in self._integer}
        while True:
            try:
                shapes, out = self._run(model, forward, args, kwargs, cuts, expand=True)
            except FastclipError:
                raise
            except Exception as error:
                raise self._changed(f"fails ({type(error).__name__}: {error})") from error
            if not _same(plain, out):
                raise self._changed("computes something else")
            self._axes = _followed(*shapes)
            remaining = [path for path in self._unbatched() if path not in self._expand]
            if not remaining:
                return
            self._expand.add(remaining[0])  # the first in call order; later ones may follow from it

    def _unbatched(self) -> list[str]:
        return [path for path, axis in self._axes.items() if axis == UNBATCHED]

    def _changed(self, what: str) -> BatchSizeError:
        return BatchSizeError(
            f"{', '.join(sorted(self._expand)) or 'parameters of shape [1, ...]'}: used without a "
            f"batch dimension, and the model {what} once there is one row a sample; add them by "
            "broadcasting over a leading batch dimension, or register a rule"
        )

    def _first_run(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict
    ) -> tuple[Cuts, list[Shapes], Any] | None:
        """The first way to cut the inputs with which the model runs on 2 and on 3 rows."""
        for cuts in islice(self._ways_to_cut(args, kwargs), _MOST_CUTS):
            try:
                shapes, out = self._run(model, forward, args, kwargs, cuts, expand=False)
            except FastclipError:
                raise
            except Exception:  # this way does not fit the model
                continue
            if any(axis != UNBATCHED for axis in _followed(*shapes).values()):
                return cuts, shapes, out
        return None

    def _ways_to_cut(self, args: tuple, kwargs: dict) -> Iterator[Cuts]:
        """The axis of each input that holds samples (None: it has none), likely ways first.

        An input without samples may have the batch's size by accident, so every subset of the
        inputs is a way; a state may hold its samples along axis 1, so the other axis comes last.
        """
        leaves = tree_leaves((args, kwargs))
        for axes in ((self.axis,), (self.axis, 1 - self.axis)):
            for size in batch_sizes_of(args, kwargs, self.axis):
                options = [
                    [axis for axis in axes if leaf.dim() > axis and leaf.shape[axis] == size]
                    if isinstance(leaf, Tensor)
                    else []
                    for leaf in leaves
                ]
                for cuts in product(*([*option, None] for option in options)):
                    if any(axis == self.axis for axis in cuts):
                        yield cuts

    def _run(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict, cuts: Cuts,
        *, expand: bool,
    ) -> tuple[list[Shapes], Any]:  # fmt: skip
        """Shapes of the layers' inputs on 2 and on 3 rows, and the model's output on 2."""
        leaves, structure = tree_flatten((args, kwargs))
        probes, outputs = [Probe(rows, expand) for rows in _PROBES], []
        try:
            for probe in probes:
                self.probe = probe
                few = [
                    leaf if axis is None else _cut(leaf, axis, probe.rows)
                    for leaf, axis in zip(leaves, cuts, strict=True)
                ]
                few_args, few_kwargs = tree_unflatten(few, structure)
                with _undisturbed(model):
                    outputs.append(forward(*few_args, **few_kwargs))
        finally:
            self.probe = None
        return [probe.shapes for probe in probes], outputs[0]

    def observe(self, path: str, x: Any) -> Any:
        """Note the shape of a layer's input during a probe; expanded as training would."""
        assert self.probe is not None
        if not isinstance(x, Tensor):
            return x
        self.probe.shapes.setdefault(path, []).append(tuple(x.shape))
        if not x.is_floating_point():
            self._integer.add(path)
        return _expanded(path, x, self.probe.rows) if path in self._expand else x

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
            if batch is None:
                raise BatchSizeError(f"{path}: its input has no samples, and the batch is unknown")
            return 0, _expanded(path, x, batch)
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


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Without gradients; random generators and the model's buffers are as before afterwards."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    saved = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for buffer, version, value in saved:
            if buffer._version != version:
                buffer.copy_(value)


def _cut(leaf: Tensor, axis: int, rows: int) -> Tensor:
    """The first row of `leaf` along `axis`, so many times."""
    return leaf.narrow(axis, 0, 1).repeat_interleave(rows, dim=axis)


def _expanded(path: str, x: Tensor, batch: int) -> Tensor:
    """An input without samples, one copy a sample."""
    if x.dim() and x.shape[0] == 1:
        return x.expand(batch, *x.shape[1:])
    if x.dim() == 1 and not x.is_floating_point():
        return x.expand(batch, *x.shape)  # ids of shape [t], whose rows are added to [b, t, d]
    raise BatchSizeError(
        f"{path}: its input of shape {list(x.shape)} has no batch dimension, so no per-sample "
        "gradient exists for it; give it a leading dimension of 1, or register a rule"
    )


def _followed(first: Shapes, second: Shapes) -> dict[str, int]:
    """The axis that followed the number of rows, by path; paths that are not clear are left out."""
    axes = {}
    for path, shapes in first.items():
        pairs = zip(shapes, second.get(path, []), strict=False)
        found = {_changed_axis(a, b) for a, b in pairs}
        if len(found) == 1 and (axis := found.pop()) is not None:
            axes[path] = axis
    return axes


def _same(first: Any, second: Any) -> bool:
    """Whether two outputs of a model agree within rounding."""
    one, two = tree_leaves(first), tree_leaves(second)
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if isinstance(a, Tensor)]
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-3, equal_nan=True)
        for a, b in pairs
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
