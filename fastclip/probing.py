"""Runs of a model on a few rows, and what their shapes and values say about its samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_unflatten

from fastclip.errors import BatchSizeError, UnsupportedLayerError
from fastclip.inputs import Cuts, flatten, rows_of, take_rows, tensors_of

UNBATCHED, UNCLEAR = -1, -2
SIZES = (2, 3)
Shapes = dict[str, list[tuple[int, ...]]]


@dataclass
class Probe:
    """One run of the model on a few rows, without gradients."""

    rows: int
    expand: bool = False
    """Expand inputs and parameters without samples, as training does."""
    disturb: int | None = None
    """Change this row of what has been expanded, to see where it goes."""
    shapes: Shapes = field(default_factory=dict)

    def expanded(self, value: Tensor) -> Tensor:
        """What an expanded input or parameter becomes in this run; value is [rows, ...]."""
        if self.disturb is None or not value.is_floating_point():
            return value
        value = value.clone()
        row = value[self.disturb]
        steps = torch.linspace(-1, 1, row.numel(), dtype=row.dtype, device="cpu")
        row += steps.to(row.device).view(row.shape)
        return value


class Runs:
    """Runs of a model on a few rows of its inputs."""

    def __init__(
        self, layout: Any, model: nn.Module, forward: Callable[..., Any], args: tuple,
        kwargs: dict,
    ) -> None:  # fmt: skip
        self.layout, self.model, self.forward = layout, model, forward
        self.args, self.kwargs = args, kwargs
        self.last_error = ""

    def rows(self, cuts: Cuts) -> int:
        """Number of samples in the real inputs, cut this way."""
        leaves, _ = flatten((self.args, self.kwargs))
        found = (rows_of(x, a) for x, a in zip(leaves, cuts, strict=True) if a is not None)
        return next(rows for rows in found if rows is not None)

    def once(self, cuts: Cuts, probe: Probe, rows: list[int] | None = None) -> Any:
        """The output on these rows; on copies of the first if not given."""
        leaves, structure = flatten((self.args, self.kwargs))
        rows = rows or [0] * probe.rows
        few = [
            leaf if axis is None else take_rows(leaf, axis, rows)
            for leaf, axis in zip(leaves, cuts, strict=True)
        ]
        args, kwargs = tree_unflatten(few, structure)
        self.layout.probe = probe
        try:
            with _undisturbed(self.model), _uncompiled():
                return self.forward(*args, **kwargs)
        finally:
            self.layout.probe = None

    def both(self, cuts: Cuts, expand: bool = False) -> tuple[list[Shapes], list[Any]]:
        """Shapes of the layers' inputs, and outputs, on 2 and on 3 rows."""
        probes = [Probe(rows, expand) for rows in SIZES]
        outputs = [self.once(cuts, probe) for probe in probes]
        return [probe.shapes for probe in probes], outputs


def _uncompiled() -> AbstractContextManager:
    """Compiled parts of the model run as they were written: nothing is compiled for 2 or 3 rows."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and the import is slow
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Without gradients or dropout; generators are as before afterwards, and buffers must be."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    saved = [(name, b, b._version, b.clone()) for name, b in model.named_buffers()]
    dropout = [(m, m.p) for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    try:
        for module, _ in dropout:
            module.p = 0.0
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for module, probability in dropout:
            module.p = probability
        changed = [name for name, buffer, version, _ in saved if buffer._version != version]
        for _, buffer, version, value in saved:
            if buffer._version != version:
                buffer.copy_(value)
    replaced = [name for name, buffer, _, _ in saved if model.get_buffer(name) is not buffer]
    if changed or replaced:
        raise UnsupportedLayerError(
            f"buffers {[*changed, *replaced]} change in the forward pass: what they learn from the "
            "batch is not private; freeze them (eval mode) or remove them"
        )


def followed(first: Shapes, second: Shapes) -> dict[str, int]:
    """The axis that followed the number of rows, by path; UNBATCHED if none did, or UNCLEAR."""
    axes = {}
    for path, shapes in first.items():
        others = second.get(path, [])
        found = {_changed_axis(a, b) for a, b in zip(shapes, others, strict=False)}
        clear = len(found) == 1 and len(shapes) == len(others)
        axes[path] = found.pop() if clear else UNCLEAR
    return axes


def _changed_axis(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The one axis that went from 2 to 3 rows; UNBATCHED if none did; else UNCLEAR."""
    if len(first) != len(second):
        return UNCLEAR
    changed = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not changed:
        return UNBATCHED
    if len(changed) == 1 and (first[changed[0]], second[changed[0]]) == SIZES:
        return changed[0]
    return UNCLEAR


def rows_come_out(outputs: list[Any], axis: int) -> bool:
    """An output has its samples along axis 0 or the model's own; or none has any (a loss)."""
    if any(isinstance(leaf, PackedSequence) for leaf in flatten(outputs[0])[0]):
        return True
    pairs = list(zip(tensors_of(outputs[0]), tensors_of(outputs[1]), strict=False))
    axes = {_changed_axis(tuple(a.shape), tuple(b.shape)) for a, b in pairs}
    return bool(axes & {0, axis}) or all(a.dim() == 0 for a, _ in pairs)


def same(first: Any, second: Any) -> bool:
    """Whether two outputs of a model agree within rounding."""
    return all(
        a.shape == b.shape and _close(a, b)
        for a, b in zip(_by_row(first), _by_row(second), strict=True)
    )


def _by_row(output: Any) -> Iterator[Tensor]:
    """The tensors of an output; a PackedSequence padded, for its data has no axis of samples."""
    for leaf in flatten(output)[0]:
        leaf = pad_packed_sequence(leaf)[0] if isinstance(leaf, PackedSequence) else leaf
        if isinstance(leaf, Tensor):
            yield leaf


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-2, atol=1e-3, equal_nan=True)


def check_apart(plain: list[Any], other: Any, row: int, what: str) -> None:
    """This row of the outputs must not have changed when only the other row's input did."""
    triples = zip(_by_row(plain[0]), _by_row(plain[1]), _by_row(other), strict=False)
    for two, three, changed in triples:
        axis = _changed_axis(tuple(two.shape), tuple(three.shape))
        if axis < 0 or two.dim() != changed.dim():
            continue
        # Another row may be longer and pad this one: what both have must agree.
        sizes = [slice(min(n, m)) for n, m in zip(two.shape, changed.shape, strict=True)]
        if not _close(two[tuple(sizes)].select(axis, row), changed[tuple(sizes)].select(axis, row)):
            raise BatchSizeError(
                f"{what}: one sample's output depends on another sample's row, so no per-sample "
                "gradient exists; let every row of the batch be computed from itself alone"
            )
