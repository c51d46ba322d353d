"""Sample attribution of what a step gets: the loader's batch, and the model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastclip.samples.inputs import flatten, inside, is_batched, is_list, tensors_of
from fastclip.trace import attribution as at
from fastclip.trace.findings import Read
from fastclip.trace.memory import ORDER
from fastclip.trace.tracer import Tracer


def _samples_axis(x: Tensor, batch: int | None, axis: int) -> int | None:
    """The given axis, or else the first, if it is as long as the batch."""
    return next((a for a in (axis, 0) if batch and x.dim() > a and x.shape[a] == batch), None)


def samples_of_input(tracer: Tracer, leaf: Any, axis: int | None) -> Tensor | None:
    """The sample of each row of an input; None if row i is sample i, or if it is unknown."""
    if isinstance(leaf, PackedSequence):
        rows = torch.arange(int(leaf.batch_sizes[0]), dtype=at.KIND, device="cpu")
        each = tracer.memory.each_at(len(rows))
        return None if each == 1 else rows.div(each, rounding_mode="floor")
    if not isinstance(leaf, Tensor) or axis is None or leaf.dim() <= axis:
        return None
    found = tracer.shadow_of(leaf).sample
    if found is None or found.dim() <= axis or found.numel() != found.shape[axis]:
        return None
    rows = found.reshape(-1).expand(leaf.shape[axis])
    plain = bool((rows >= at.SEVERAL).any()) or torch.equal(
        rows, torch.arange(len(rows), dtype=rows.dtype, device="cpu")
    )
    return None if plain and len(rows) == tracer.memory.samples else rows


def note_samples(tracer: Tracer, rows: Tensor) -> None:
    """Note the samples that the model is called with, and report those that occur too often.

    Args:
        rows: as of `samples_of_input`.
    """
    tracer.memory.present = present = rows.unique().long().cpu()
    if present.numel() * tracer.memory.views < len(rows):
        tracer.report.add("repeated", None, "the model's input")


def as_given(found: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Row numbers of the model's input, translated to samples."""
    return found if found is None or rows is None else rows[found.long()]


def seed_input(tracer: Tracer, leaf: Any, axis: int | None, batch: int | None) -> bool:
    """Attribute an input of the model to its samples, if it was not seen before.

    Returns:
        Whether the trace can follow it.
    """
    if isinstance(leaf, PackedSequence):
        if tracer.memory.record(leaf.data) is None:
            rows = int(leaf.batch_sizes[0])
            each, own = tracer.memory.each_at(rows), _of_packed(leaf)
            tracer.memory.samples = max(tracer.memory.samples, rows // each)
            tracer.memory.lengths_read = True
            for order in (leaf.sorted_indices, leaf.unsorted_indices):
                if order is not None:
                    tracer.memory.know(order)
            tracer.memory.give(leaf.data, tracer.made(own.div(each, rounding_mode="floor")))
        return True
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            return False
        if axis is None or leaf.dim() <= axis or leaf.shape[axis] != batch:
            return True
        if tracer.memory.record(leaf) is None:
            tracer.seed(leaf, axis)
        elif tracer.memory.is_given(leaf) and not tracer.shadow_of(leaf).held:
            others = at.along(batch, axis, leaf.dim()) + tracer.memory.samples  # another part of it
            tracer.memory.write(leaf, tracer.made(others), whole=False)
    elif axis is not None and is_batched(leaf) and len(leaf) == batch:
        seed_entries(tracer, leaf)
    return True


def seed_entries(tracer: Tracer, rows: Any) -> None:
    """Attribute a list or an array with one entry per sample, which Python may branch on.

    Args:
        tracer: of the step. rows: one of the model's inputs.
    """
    entries = [
        [x for x in inside(entry) if isinstance(x, Tensor) and x.layout is torch.strided]
        for entry in (rows if is_list(rows) else ())
    ]
    given = [  # made by no operation of this step; entries may be views of one memory
        (x, i, hash(("entries", id(rows), k)))
        for i, held in enumerate(entries)
        for k, x in enumerate(held)
        if tracer.memory.record(x) is None or _is_guessed(tracer, x)
    ]
    each = tracer.memory.each_at(len(rows))
    tracer.memory.samples = max(tracer.memory.samples, len(rows) // each)
    for x, i, part in given:
        tracer.seed_all(x, i // each, part=part)
    if len({tuple(x.shape for x in held) for held in entries} - {()}) != 1:
        tracer.memory.lengths_read = True
        tracer.report.reads.append(Read("numbers in a list", "one sample", "the model's inputs"))


def _is_guessed(tracer: Tracer, x: Tensor) -> bool:
    """Whether it came with the batch and has as many rows, so each was assumed to be one sample's."""
    return tracer.memory.is_as_given(x) and len(tracer.shadow_of(x).samples) > 1


def check_input(tracer: Tracer, leaf: Any) -> None:
    """Report an input that mixes samples before the model, which dry runs do not see."""
    if not isinstance(leaf, Tensor):
        return
    shadow = tracer.shadow_of(leaf)
    if shadow.mixed or shadow.flags & ORDER or shadow.factor is not None:
        tracer.report.add("input", tracer.memory.cause(leaf), "the model's input")


def seed_output(
    tracer: Tracer, leaf: Tensor | PackedSequence, axis: int, batch: int | None, degree: int
) -> None:
    """Attribute an output of the model as dry runs have found, if the trace does not know its samples.

    Args:
        axis: of the samples, if it has them. degree: of a number of all of them.
    """
    if isinstance(leaf, PackedSequence):
        own, each = _of_packed(leaf), tracer.memory.each_at(int(leaf.batch_sizes[0]))
        tracer.memory.write(leaf.data, tracer.made(own.div(each, rounding_mode="floor")))
        return
    found = _samples_axis(leaf, batch, axis)
    if found is not None:
        tracer.seed(leaf, found)
    else:
        of_all = at.everywhere(at.SEVERAL, leaf.dim())
        tracer.memory.write(leaf, tracer.made(of_all, degree=degree))


def seed_gradient(tracer: Tracer, loss: Tensor, gradient: Tensor | None) -> None:
    """Attribute a gradient that the user passes for a loss, if no operation of the step has made it: its
    entries belong to the samples of the loss's entries. A gradient that other samples have met before is
    a constant.
    """
    own = tracer.shadow_of(loss)
    if (
        gradient is None
        or own.sample is None
        or own.mixed
        or tracer.memory.record(gradient) is not None
    ):
        return
    if tracer.same_samples or not tracer.memory.was_given(gradient):
        tracer.memory.give(gradient, tracer.made(own.sample))


def _of_packed(packed: PackedSequence) -> Tensor:
    """The sample of every row of a packed sequence."""
    order = packed.sorted_indices
    if order is None:
        order = torch.arange(int(packed.batch_sizes[0]), device="cpu")
    rows = [order.cpu()[:n] for n in packed.batch_sizes.tolist()]
    return torch.cat(rows).to(at.KIND).view([-1] + [1] * (packed.data.dim() - 1))


def check_views(tracer: Tracer, rows: Tensor | None, batch: int) -> None:
    """Report adjacent rows of the model's input that are clipped as views of one sample but belong to
    several, and samples with such rows at several positions.

    Args:
        rows: as of `samples_of_input`. batch: their number.
    """
    samples, views = tracer.memory.samples, tracer.memory.views
    if views == 1:
        return
    if samples == batch:  # the loader's batch holds the views: its row i is of sample i // views
        own = torch.arange(batch, device="cpu") if rows is None else rows
        own = own.div(views, rounding_mode="floor")
    elif rows is None or samples * views != batch or len(rows) != batch:
        return
    else:
        own = rows
    runs = own.reshape(-1, views)
    if bool((runs != runs[:, :1]).any()) or runs[:, 0].unique().numel() < len(runs):
        tracer.report.add("views", None, "the model's input")


def seed_batch(tracer: Tracer, batch: Any, axis: int, drawn: Collection[int]) -> bool:
    """Attribute a loader's batch: sample i is entry i of each tensor and list that is as long as the
    batch. A tensor that is longer by the number of views holds the views of each sample.
    """
    leaves = [x for x in tensors_of(batch) if x.layout is torch.strided and x.dim()]
    sizes = [x.shape[axis if x.dim() > axis else 0] for x in leaves]
    lists = [held for held in _lists_in(batch, drawn) if held is not batch]
    if not sizes:
        return False
    likely = [n for n in sizes if n in drawn] or [len(held) for held in lists] or sizes
    samples = max(set(likely), key=likely.count)
    views = tracer.memory.views
    if samples not in drawn and samples // views in sizes and not samples % views:
        samples //= views
    tracer.memory.samples = max(tracer.memory.samples, samples)
    for held in lists:
        if len(held) == samples and not any(x.shape[:1] == (samples,) for x in tensors_of(held)):
            seed_entries(tracer, held)
    for x in leaves:
        found = _samples_axis(x, samples, axis)
        found = _samples_axis(x, samples * views, axis) if found is None else found
        if found is not None and not tracer.memory.is_given(x):
            tracer.seed(x, found)
    return True


def _lists_in(held: Any, drawn: Collection[int]) -> Iterator[Sequence[Any]]:
    """Lists and tuples of a nested structure with entries that may be samples: alike, and as many as the
    sampled batch has. Everything inside one entry belongs to one sample.
    """
    if isinstance(held, Mapping):
        held = list(held.values())
    elif not isinstance(held, (list, tuple)):
        return
    elif len(held) in drawn and all(_kinds(entry) == _kinds(held[0]) for entry in held):
        yield held
        return
    for entry in held:
        yield from _lists_in(entry, drawn)


def _kinds(entry: Any) -> Any:
    """The types in an entry of a list."""
    leaves, structure = flatten(entry)
    kinds = [(x.dtype, x.dim()) if isinstance(x, Tensor) else type(x) for x in leaves]
    return structure, kinds
