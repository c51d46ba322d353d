"""Disturbance: where the inputs of some rows change, nothing may change in another row.

That holds for every layer's input and for the output; it shows statistics of the batch, detached or not,
rows in other places, and routing. The other view of the same law is fastclip.samples.influence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from fastclip.errors import BatchSizeError
from fastclip.samples.inputs import flatten, tensors_of
from fastclip.samples.place import Place, called
from fastclip.samples.probing import Probe, Shapes
from fastclip.samples.rounding import OTHER_BATCH, VALUES, agree, tolerances

UNBATCHED, UNCLEAR, UNPLACED = -1, -2, -3
SIZES = (2, 3)


def changed_axis(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """The one axis that follows the number of rows, from 2 to 3, or folded with others from 2 n to 3 n;
    UNBATCHED if none changes; else UNCLEAR."""
    if len(first) != len(second):
        return UNCLEAR
    changed = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not changed:
        return UNBATCHED
    one, other = first[changed[0]], second[changed[0]]
    if len(changed) == 1 and one * SIZES[1] == other * SIZES[0]:
        return changed[0]
    return UNCLEAR


def followed(first: Shapes, second: Shapes) -> dict[Hashable, int]:
    """The axis that followed the number of rows, by name; UNBATCHED if none did, or UNCLEAR."""
    axes = {}
    for name, shapes in first.items():
        others = second.get(name, [])
        found = {changed_axis(a, b) for a, b in zip(shapes, others, strict=False)}
        clear = len(found) == 1 and len(shapes) == len(others)
        axes[name] = found.pop() if clear else UNCLEAR
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


def check_values(
    first: Probe, second: Probe, outputs: tuple[Any, Any], kept: list[int],
    of_outputs: list[int], *, other_size: bool = False,
) -> None:  # fmt: skip
    """These rows of the output are the same in both runs.

    Raises:
        BatchSizeError: they are not.
    """
    allowed = _between(first, second) if other_size else VALUES
    pairs = zip(by_row(outputs[0]), by_row(outputs[1]), of_outputs, strict=False)
    for one, other, axis in pairs:
        sizes = (first.rows, second.rows)
        if axis >= 0 and not agree(one, other, kept, Place(axis), sizes, allowed):
            raise coupled("the output", other_size)


def check_layers(
    first: Probe, second: Probe, kept: list[int], places: Mapping[Hashable, Place]
) -> None:
    """These rows of what every layer and use shows are the same in batches of two sizes.

    Raises:
        BatchSizeError: naming the first layer where they are not.
    """
    for name in moved_between(first, second, kept, places, _between(first, second)):
        raise coupled(f"the input of {called(name)}", other_size=True)


def _between(first: Probe, second: Probe) -> dict[torch.dtype, float]:
    return tolerances(max(first.rounding, second.rounding), OTHER_BATCH)


def moved_between(
    first: Probe, second: Probe, kept: list[int], places: Mapping[Hashable, Place],
    allowed: dict[torch.dtype, float] | None = None,
) -> list[Hashable]:  # fmt: skip
    """Layers and uses that show other values in these rows in the second run, in their order.

    Of as many rows, a value that holds the samples in one run and cannot in the other has lost or won
    some: as many rows as samples are there by chance alone.
    """
    found = []
    sizes = (first.rows, second.rows)
    same_size = first.rows == second.rows
    for name, values in first.seen.items():
        place = places.get(name)
        others = second.seen.get(name, [])
        if place is None:
            continue
        told = None if second.beside is None else second.beside.agrees(name)
        alike = told if told is not None else len(values) == len(others) and all(
            agree(one, other, kept, place, sizes, allowed or VALUES)
            and not (same_size and place.fits(one, sizes[0]) != place.fits(other, sizes[1]))
            for one, other in zip(values, others, strict=False)
        )  # fmt: skip
        if not alike:
            found.append(name)
    return found


def check_somewhere(
    names: Iterable[Hashable], first: Probe, second: Probe,
    owned: Mapping[Hashable, list[Tensor | None]], kept: Iterable[int],
) -> None:  # fmt: skip
    """Rows that the model has moved are the same in both runs, wherever they are.

    Args:
        owned: the sample of every entry, call by call. kept: the samples that both runs hold.

    Raises:
        BatchSizeError: one is not.
    """
    for name in names:
        known = zip(owned.get(name, []), _again(name, first, second), strict=False)
        for owner, (shape, found) in known:
            if found is None or owner is None or owner.shape != shape:
                continue
            of_kept = torch.tensor([*kept], dtype=torch.int64, device=owner.device)
            mine = torch.isin(owner.reshape(len(found), -1).amax(1).to(torch.int64), of_kept)
            if not bool(found[mine].all()):
                raise coupled(called(name))


def check_in_either(names: Iterable[Hashable], first: Probe, others: list[Probe]) -> None:
    """Every row, whosever it is, stands in a run that has kept its sample.

    Args:
        others: runs of which each has kept some samples, and all together every one.

    Raises:
        BatchSizeError: a row is in none of them, so that it follows from samples of several.
    """
    for name in names:
        for found in zip(*(_again(name, first, other) for other in others), strict=False):
            told = [x for _, x in found if x is not None]
            if len(told) == len(found) and not bool(torch.stack(told).any(0).all()):
                raise coupled(called(name))


def _again(
    name: Hashable, first: Probe, second: Probe
) -> Iterator[tuple[torch.Size, Tensor | None]]:
    """Which rows of what was seen, [..., d] as [n, d], stand somewhere in the second run: bool [n].

    With the shape; None where nothing can be compared.
    """
    others = [x.flatten(0, -2) for x in second.seen.get(name, []) if x.dim() > 1]
    for x in first.seen.get(name, []):
        alike = [y for y in others if x.dim() > 1 and y.shape[1] == x.shape[-1]]
        found = None
        if alike and x.numel() and x.is_floating_point():
            known = [any(_close_to_one(row, y) for y in alike) for row in x.flatten(0, -2)]
            found = torch.tensor(known, dtype=torch.bool, device=x.device)
        yield x.shape, found


def _close_to_one(row: Tensor, rows: Tensor) -> bool:
    size = rows.abs().amax() if rows.numel() else row.new_zeros(())
    tolerance = VALUES.get(row.dtype, 4 * torch.finfo(row.dtype).eps)
    apart = (rows - row).abs().amax(1)
    return bool((apart <= tolerance * torch.maximum(size, row.abs().amax())).any())


def rows_agree(one: Tensor, other: Tensor, kept: list[int], place: Place, rows: int) -> bool:
    """Whether these rows are the same in both, as far as both are long."""
    return agree(one, other, kept, place, (rows, rows), VALUES)


def extreme_rows(probe: Probe, places: Mapping[Hashable, Place]) -> list[int]:
    """All rows: first those that are smallest, behind the first layer, then in most layers' inputs.

    What the sizes of other rows change, changes them. Of rows that are as large as each other in most
    layers, copies among them, all but one come last: they may be what the others follow from.
    """
    placed = [] if probe.first is None else [probe.first]
    for name, values in probe.seen.items():
        place = places.get(name)
        placed += [(place, x) for x in values if place is not None]
    sizes = []
    for place, x in placed:
        if x.is_floating_point() and x.numel() and place.fits(x, probe.rows):
            rows = place.rows(x.detach().abs(), probe.rows).reshape(probe.rows, -1)
            sizes.append(rows.amax(1).nan_to_num(torch.inf).tolist())
    found = [of_rows.index(min(of_rows)) for of_rows in sizes]
    common = [row for row, _ in Counter(found).most_common()]
    order = list(dict.fromkeys([*found[:1], *common, *range(probe.rows)]))
    apart: list[int] = []
    for row in order:
        equal = (sum(one[row] == one[other] for one in sizes) for other in apart)
        if all(2 * number <= len(sizes) for number in equal):
            apart.append(row)
    return list(dict.fromkeys([*apart, *order]))


class Coupled(BatchSizeError):
    """What one sample has somewhere follows from other rows."""


def coupled(where: str, other_size: bool = False) -> Coupled:
    """The refusal of a model whose rows are not apart."""
    cause = "the number of rows" if other_size else "another sample's row"
    looked_up = where.endswith(" in embedding")  # E(ids.unique())[inverse]
    hint = "; look the ids up directly, not those of the batch made unique" if looked_up else ""
    return Coupled(
        f"{where}: what one sample has there depends on {cause}, so no per-sample gradient exists; let "
        f"every row of the batch be computed from itself alone{hint}"
    )
