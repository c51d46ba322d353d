"""Outputs that belong to no one row: a loss computed inside the model, scores of rows against rows.

A mean of the rows' own losses gives every row the same gradient whatever the others hold. A mean over
tokens, a contrastive loss, a statistic of the batch do not; they may be returned, but not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastclip.errors import BatchSizeError, FastclipError
from fastclip.graph import Node, reached_without
from fastclip.memory import no_memory
from fastclip.samples.gradients import gradients, normal
from fastclip.samples.groups import others_changed
from fastclip.samples.ignored import holds
from fastclip.samples.independence import UNBATCHED, UNPLACED, by_row, rows_agree
from fastclip.samples.inputs import flatten, rebuild, tensors_of
from fastclip.samples.place import Place
from fastclip.samples.probing import Opened, Probe, Runs
from fastclip.samples.stopped import stop_gradients
from fastclip.samples.taint import Taint
from fastclip.samples.undrawn import BY_ROW, HIGH, LOW, MIDDLE, Undrawn

if TYPE_CHECKING:
    from fastclip.samples.layout import BatchLayout, Guards

Gradients = list[tuple[Hashable, Place | None, Tensor]]
"""Of one output by what it follows from: name, place of the samples if that is known, gradient."""
Found = dict[int, tuple[torch.Size, Gradients]]
"""Outputs without an axis of samples, by their number: shape, gradients."""


def find_mixed(
    run: Runs, rows: list[int], groups: list[frozenset[int]], places: Mapping[Hashable, Place],
    axes: list[int], drawn: Collection[int],
) -> None:  # fmt: skip
    """Note outputs without an axis of samples that couple rows: by other rows, or by what these draw.

    Args:
        groups: which rows are kept while others change. axes: of samples, of all outputs.
        drawn: the draws that have numbers of each row: undrawn.Undrawn.
    """

    def gradients_of(some: list[int], undrawn: Undrawn | None = None) -> Found:
        found: Found = {}
        taint = None if undrawn is None else Taint((), undrawn)
        probe = Probe(run.layout, len(some), differentiable=True, taint=taint)
        run.once(probe, some, 1, partial(note_gradients, probe, places, axes, found))
        return found

    def note(given: Found, others: Found, kept: list[int]) -> None:
        run.layout.guards.mixed |= mixed_outputs(given, others, kept, axes, len(rows))

    given = gradients_of(rows)
    for group in groups if given else ():
        note(given, gradients_of(others_changed(rows, group)), sorted(group))
    if not given or not drawn:
        return
    try:
        given = gradients_of(rows, Undrawn(BY_ROW, drawn))
        for level in (MIDDLE, LOW, HIGH):
            kept = [i for i in range(len(rows)) if min(i, HIGH) == level]
            note(given, gradients_of(rows, Undrawn(BY_ROW, drawn, alike=level)), kept)
    except (FastclipError, Opened):
        raise
    except Exception as error:  # the model cannot take such numbers
        if no_memory(error):
            raise


def mixed_outputs(
    given: Found, others: Found, kept: list[int], of_outputs: list[int], rows: int
) -> dict[int, int]:
    """Outputs that couple rows: the number of dimensions of each, by its number.

    Args:
        given, others: of two runs whose rows are the same where they are `kept`.
        of_outputs: the axis of samples of every output. rows: of both runs.
    """
    return {
        number: len(shape)
        for number, (shape, own) in given.items()
        if _is_statistic(own, of_outputs[number], shape)
        or _differ(own, others[number][1] if number in others else [], kept, rows)
    }


def note_gradients(
    probe: Probe, places: Mapping[Hashable, Place], of_outputs: list[int], found: Found, output: Any
) -> None:
    """Note in `found` the gradients of every output without an axis of samples."""
    sources = [(source.name, places.get(source.name)) for source in probe.sources]
    edges = [source.edge for source in probe.sources]
    tensors = [*by_row(output)]
    below: set[Node] | None = None  # the nodes of which outputs are made
    for number, (x, axis) in enumerate(zip(tensors, of_outputs, strict=False)):
        if axis >= 0 or not x.requires_grad or x.grad_fn is None:  # of parameters alone
            continue
        if below is None:
            roots = [n for y in tensors if y.grad_fn for n, _ in y.grad_fn.next_functions if n]
            below, _ = reached_without(roots, lambda node: False)
        if x.grad_fn in below:
            probe.layout.guards.inner.add(number)
        seed = _by_value(x.detach(), number) if axis == UNPLACED else normal(x, number).to(x.dtype)
        given = gradients([x], edges, [seed], keep_graph=True) if edges else ()
        found[number] = (
            x.shape,
            [
                (name, place if place and place.fits(gradient, probe.rows) else None, gradient)
                for (name, place), gradient in zip(sources, given, strict=True)
                if gradient is not None
            ],
        )


def _by_value(x: Tensor, seed: int) -> Tensor:
    """A gradient of `x` that follows from each row's own values, wherever the row stands.

    Rows before it may be more or fewer in another run. It is no constant, which leaves nothing of rows
    whose mean was taken off.
    """
    columns = normal(x.new_empty(x.shape[-1] if x.dim() > 1 else 1), seed).to(x.dtype)
    return columns * (1 + x / (1 + x.abs()))


def _is_statistic(given: Gradients, axis: int, shape: torch.Size) -> bool:
    """Several numbers that are made of rows, and do not grow with them."""
    if axis != UNBATCHED or shape.numel() < 2:
        return False
    return any(bool(gradient.any()) for _, _, gradient in given)


def _differ(given: Gradients, others: Gradients, kept: list[int], rows: int) -> bool:
    """The gradients in these rows, which both runs hold, are not the same, or nothing says so."""
    if [name for name, _, _ in given] != [name for name, _, _ in others]:
        return True
    pairs = zip(given, others, strict=True)
    held = [(place, one, other) for (_, place, one), (_, _, other) in pairs if place]
    if given and not held:
        return True
    return not all(rows_agree(one, other, kept, place, rows) for place, one, other in held)


def refuse_gradients(layout: BatchLayout, guards: Guards, inputs: Any, output: Any) -> Any:
    """Let no gradient come in through outputs that couple rows.

    Where labels lie on a device, asking for them would hold up the step; gradients are NaN there if one
    counts, so that nobody contributes.

    Args:
        layout: what is known of the call. guards: of its inputs. inputs, output: of the call.

    Returns:
        The output, in which views take the place of those of which other outputs are made: through
        these a gradient may come.
    """
    stop_gradients(guards.spreading, output)
    mixed, counted = guards.mixed, guards.counted
    if inner := guards.inner & {*mixed, *(n for found in counted.values() for n in found)}:
        output = _apart(inner, output)
    for label, outputs in counted.items():
        x = layout.read(*inputs)[0][label.alone or 0]
        if not isinstance(x, Tensor):
            continue
        held = holds(x, label.value or 0)
        if x.device.type != "cpu":
            _hook(outputs, output, lambda *_, held=held: partial(_void, held))
        elif held:
            mixed = mixed | outputs
    _hook(mixed, output, lambda number, shape: partial(_refuse, number, shape))
    return output


def _apart(numbers: Collection[int], output: Any) -> Any:
    leaves, structure = flatten(output)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, PackedSequence))]
    for number in numbers:
        x = leaves[places[number]] if number < len(places) else None
        if isinstance(x, Tensor):
            leaves[places[number]] = x.view_as(x)
    return rebuild(leaves, structure)


def _hook(mixed: dict[int, int], output: Any, hook: Callable[..., Any]) -> None:
    for number, tensor in enumerate(tensors_of(output) if mixed else ()):
        if mixed.get(number) == tensor.dim() and tensor.requires_grad:
            tensor.register_hook(hook(number, tuple(tensor.shape)))


def _void(held: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(held.to(gradient.device), torch.nan)


def _refuse(number: int, shape: tuple[int, ...], gradient: Tensor) -> None:
    raise BatchSizeError(
        f"output {number} of the model, of shape {list(shape)}, is part of the loss, but what it gives "
        "one sample's gradient depends on the other samples (a mean over tokens or weights, scores of "
        "rows against rows, a statistic of the batch); return one loss a row, of shape [b], each a "
        "mean inside its row (fastclip.losses.per_sample_cross_entropy), and average them outside"
    )
