"""What runs on a few rows must agree on where every row is computed from itself alone, in its place.

Two views of one law. *Disturbance*: where the inputs of some rows change, no layer's input and no output
may change in another row; this sees statistics of the batch, detached or not, rows in other places, and
routing. *Influence*: the gradient of some rows' outputs may reach no other row of any layer's output;
this sees smooth coupling of any strength, however little of it the values show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from fastclip.errors import BatchSizeError
from fastclip.inputs import flatten, tensors_of
from fastclip.probing import Probe, Shapes

UNBATCHED, UNCLEAR = -1, -2
SIZES = (2, 3)

_VALUES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far values of one row may differ, relative to the largest of the tensor: a kernel may add up in
another order where another row is longer."""
_OTHER_SIZE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""The same in batches of another size."""
_GRADIENTS = {torch.float64: 1e-13, torch.float32: 1e-6}
"""What of a row's gradient may reach another row: a maximum that is subtracted for safety leaves
roundings there."""


def changed_axis(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The one axis that went from 2 to 3 rows; UNBATCHED if none did; else UNCLEAR."""
    if len(first) != len(second):
        return UNCLEAR
    changed = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not changed:
        return UNBATCHED
    if len(changed) == 1 and (first[changed[0]], second[changed[0]]) == SIZES:
        return changed[0]
    return UNCLEAR


def followed(first: Shapes, second: Shapes) -> dict[str, int]:
    """The axis that followed the number of rows, by path; UNBATCHED if none did, or UNCLEAR."""
    axes = {}
    for path, shapes in first.items():
        others = second.get(path, [])
        found = {changed_axis(a, b) for a, b in zip(shapes, others, strict=False)}
        clear = len(found) == 1 and len(shapes) == len(others)
        axes[path] = found.pop() if clear else UNCLEAR
    return axes


def rows_come_out(outputs: list[Any], axis: int) -> bool:
    """An output has its samples along axis 0 or the model's own; or none has any (a loss)."""
    if any(isinstance(leaf, PackedSequence) for leaf in flatten(outputs[0])[0]):
        return True
    pairs = list(zip(tensors_of(outputs[0]), tensors_of(outputs[1]), strict=False))
    axes = {changed_axis(tuple(a.shape), tuple(b.shape)) for a, b in pairs}
    return bool(axes & {0, axis}) or all(a.dim() == 0 for a, _ in pairs)


def axes_of_outputs(outputs: list[Any]) -> list[int]:
    """Where the samples lie in every tensor of the output, from outputs of 2 and of 3 rows."""
    pairs = zip(by_row(outputs[0]), by_row(outputs[1]), strict=False)
    return [changed_axis(tuple(a.shape), tuple(b.shape)) for a, b in pairs]


def by_row(output: Any) -> Iterator[Tensor]:
    """The tensors of an output; a PackedSequence padded, for its data has no axis of samples."""
    for leaf in flatten(output)[0]:
        leaf = pad_packed_sequence(leaf)[0] if isinstance(leaf, PackedSequence) else leaf
        if isinstance(leaf, Tensor):
            yield leaf


def same(first: Any, second: Any) -> bool:
    """Whether two outputs of a model agree within rounding."""
    pairs = zip(by_row(first), by_row(second), strict=True)
    return all(a.shape == b.shape and _close(a, b, _OTHER_SIZE) for a, b in pairs)


def check_values(
    first: Probe, second: Probe, outputs: tuple[Any, Any], kept: list[int], axes: dict[str, int],
    of_outputs: list[int], *, other_size: bool = False,
) -> None:  # fmt: skip
    """These rows of every layer's input and of the output are the same in both runs.

    Raises:
        BatchSizeError: naming the first layer where they are not.
    """
    allowed = _OTHER_SIZE if other_size else _VALUES
    for path, values in first.seen.items():
        axis = axes.get(path, UNCLEAR)
        for one, other in zip(values, second.seen.get(path, []), strict=False):
            if not _rows_agree(
                one, other, kept, max(axis, 0) if axis != UNCLEAR else axis, allowed
            ):
                raise coupled(f"the input of {path or 'the model'}", other_size)
    pairs = zip(by_row(outputs[0]), by_row(outputs[1]), of_outputs, strict=False)
    for one, other, axis in pairs:
        if not _rows_agree(one, other, kept, axis, allowed):
            raise coupled("the output", other_size)


def _rows_agree(
    one: Tensor, other: Tensor, kept: list[int], axis: int, allowed: dict[torch.dtype, float]
) -> bool:
    if axis < 0 or one.dim() != other.dim() or one.dim() <= axis:
        return True
    # Another row may be longer and pad this one: what both have must agree.
    sizes = [slice(min(n, m)) for n, m in zip(one.shape, other.shape, strict=True)]
    sizes[axis] = slice(None)
    index = torch.tensor(kept, dtype=torch.int64, device=one.device)
    first, second = (x[tuple(sizes)].index_select(axis, index) for x in (one, other))
    return _close(first, second, allowed)


def _close(first: Tensor, second: Tensor, allowed: dict[torch.dtype, float]) -> bool:
    if not first.is_floating_point():
        return torch.equal(first, second)
    # 16-bit roundings of sums that differ in their last bit: influence sees what is smaller
    tolerance = allowed.get(first.dtype, 4 * torch.finfo(first.dtype).eps)
    known = torch.isfinite(first)
    if not torch.equal(known, torch.isfinite(second)):
        return False
    one, other = first[known], second[known]
    return not one.numel() or bool(
        (one - other).abs().max() <= tolerance * torch.maximum(one.abs().max(), other.abs().max())
    )


def rows_agree(one: Tensor, other: Tensor, kept: list[int], axis: int) -> bool:
    """Whether these rows are the same in both, as far as both are long."""
    return _rows_agree(one, other, kept, axis, _VALUES)


def extreme_rows(probe: Probe, axes: dict[str, int]) -> list[int]:
    """The rows that are smallest, first behind the first layer, then in most layers' inputs.

    What the sizes of other rows change, changes them.
    """
    placed = [] if probe.first is None else [probe.first]
    for path, values in probe.seen.items():
        axis = max(axes.get(path, UNCLEAR), UNBATCHED)
        placed += [(axis, x) for x in values if axis >= 0]
    found = []
    for axis, x in placed:
        if x.is_floating_point() and x.numel() and x.dim() > axis and x.shape[axis] == probe.rows:
            sizes = x.detach().abs().movedim(axis, 0).flatten(1).amax(1)
            found.append(int(sizes.nan_to_num(torch.inf).argmin()))
    return list(dict.fromkeys(found[:1] + [row for row, _ in Counter(found).most_common()]))


def check_influence(
    sources: list[tuple[str, int, Tensor]], output: Any, of_outputs: list[int],
    groups: Iterable[frozenset[int]], count: int,
) -> None:  # fmt: skip
    """Gradients of some rows' outputs reach these rows alone, for each of the groups of rows.

    Args:
        sources: name, axis of the samples, and what was computed there, of `count` rows.

    Raises:
        BatchSizeError: naming where they reach another one.
    """
    pairs = [
        (x, axis) for x, axis in zip(by_row(output), of_outputs, strict=False)
        if axis >= 0 and x.dim() > axis and x.shape[axis] == count and x.requires_grad
    ]  # fmt: skip
    if not pairs or not sources:
        return
    generator = torch.Generator().manual_seed(1)
    for group in groups:
        weights = []
        for x, axis in pairs:
            drawn = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
            others = _others(group, count, drawn.device)
            weights.append(drawn.index_fill_(axis, others, 0.0).to(x.device, x.dtype))
        found = torch.autograd.grad(
            [x for x, _ in pairs], [x for _, _, x in sources], weights, retain_graph=True,
            allow_unused=True,
        )  # fmt: skip
        for (name, axis, _), gradient in zip(sources, found, strict=True):
            if gradient is not None and _reaches_others(gradient, axis, group, count):
                raise coupled(name)


def _reaches_others(gradient: Tensor, axis: int, group: frozenset[int], count: int) -> bool:
    if gradient.dim() <= axis or gradient.shape[axis] != count or not gradient.numel():
        return False
    others = _others(group, count, gradient.device)
    size = gradient.detach().nan_to_num(0.0, 0.0, 0.0).abs()
    allowed = _GRADIENTS.get(size.dtype, 1e-4)
    return bool(size.index_select(axis, others).max() > allowed * size.max())


def _others(group: frozenset[int], count: int, device: torch.device) -> Tensor:
    rows = [i for i in range(count) if i not in group]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def coupled(where: str, other_size: bool = False) -> BatchSizeError:
    """The refusal of a model whose rows are not apart."""
    cause = "the number of rows" if other_size else "another sample's row"
    return BatchSizeError(
        f"{where}: what one sample has there depends on {cause}, so no per-sample gradient exists; let "
        "every row of the batch be computed from itself alone, and stay in its place"
    )
