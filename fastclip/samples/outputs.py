"""Outputs of a call: outputs that appear later, losses of several samples, NaN in gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastclip.errors import PER_SAMPLE, BatchSizeError
from fastclip.samples.inputs import flatten, rebuild, tensors_of
from fastclip.samples.layout import BatchLayout, Guards

# -------------------------------------------------------------------------------------------------
# Non-finite gradients are stopped at the output of a model that would pass them on to other samples.
#
# With weights of exactly 0 (a block-diagonal mask, a one-hot dispatch) samples are independent only if
# all gradients are finite, because 0 * NaN is NaN. The loss of one sample may be NaN for its own label.


def stop_gradients(spreading: Mapping[int, int], output: Any) -> None:
    """Replace a sample's gradient by zeros if it is NaN, infinite or too large to be squared.

    Args:
        spreading: the batch axis of these outputs, by number; -1: each entry is taken by itself.
    """
    if not spreading:
        return
    leaves = [x for x in flatten(output)[0] if isinstance(x, (Tensor, PackedSequence))]
    for number, axis in spreading.items():
        if number >= len(leaves):
            continue
        leaf = leaves[number]
        x, axis = (leaf.data, -1) if isinstance(leaf, PackedSequence) else (leaf, axis)
        if x.requires_grad and x.dim() > axis:
            x.register_hook(partial(_stopped, axis))


def _stopped(axis: int, gradient: Tensor) -> Tensor:
    largest = torch.finfo(gradient.dtype).max
    # a norm beyond the largest number contributes nothing anyway
    known = gradient.abs() <= (largest if gradient.dtype == torch.float16 else largest**0.5)
    others = [d for d in range(gradient.dim()) if d != axis]
    if axis >= 0 and others:
        known = torch.all(known, others, keepdim=True)
    return torch.where(known, gradient, torch.zeros_like(gradient))


# -------------------------------------------------------------------------------------------------
# Outputs that belong to several samples: a loss computed inside the model, scores of samples against
# samples.
#
# In a mean of per-sample losses, each sample's gradient is independent of the others. In a mean over
# tokens, a contrastive loss or a statistic of the batch it is not. These may be returned, but not
# trained on.


def check_gradients(guards: Guards, output: Any, *, replaced: bool = False) -> Any:
    """Let no gradient come in through outputs that couple samples.

    Args:
        guards: of the call's inputs. output: of the call. replaced: the model's own mean cross
            entropies are per sample.

    Returns:
        The output, with views instead of tensors that couple samples, because other outputs may be
        computed from these.
    """
    stop_gradients(guards.spreading, output)
    if not guards.mixed:
        return output
    output = _as_views(guards.mixed, output)
    for number, tensor in enumerate(tensors_of(output)):
        if guards.mixed.get(number) == tensor.dim() and tensor.requires_grad:
            tensor.register_hook(partial(_check_not_mixed, number, tuple(tensor.shape), replaced))
    return output


def _as_views(numbers: Collection[int], output: Any) -> Any:
    leaves, structure = flatten(output)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (Tensor, PackedSequence))]
    for number in numbers:
        x = leaves[places[number]] if number < len(places) else None
        if isinstance(x, Tensor):
            leaves[places[number]] = x.view_as(x)
    return rebuild(leaves, structure)


def _check_not_mixed(number: int, shape: tuple[int, ...], replaced: bool, gradient: Tensor) -> None:
    fix = "model_loss='per_sample' does not know this loss:" if replaced else f"{PER_SAMPLE}, or"
    raise BatchSizeError(
        f"Output {number} of the model, of shape {list(shape)}, is part of the loss, but it mixes "
        f"samples (as a mean over all tokens does). {fix} return one loss per sample, of shape [b].",
        doc="coupled-loss",
    )


# -------------------------------------------------------------------------------------------------


_EACH_SAMPLE = "each row"
Outlet = tuple[tuple[Hashable, ...], int]
"""The position of a tensor in an output, and its number of dimensions."""


def outlets(output: Any, samples: int | None = None) -> Iterator[tuple[Outlet, Tensor]]:
    """The tensors of an output.

    Args:
        samples: lists of as many hold one tensor per sample, all alike; None: no list does.
    """
    return _below((), output, samples)


def _below(
    path: tuple[Hashable, ...], value: Any, samples: int | None
) -> Iterator[tuple[Outlet, Tensor]]:
    if isinstance(value, Tensor):
        yield (path, value.dim()), value
    elif isinstance(value, Mapping):
        for name, held in value.items():
            yield from _below((*path, name), held, samples)
    elif isinstance(value, (list, tuple)):
        alike = len(value) == samples
        for number, held in enumerate(value):
            yield from _below((*path, _EACH_SAMPLE if alike else number), held, samples)
    elif is_dataclass(value) and not isinstance(value, type):
        for name, held in vars(value).items():
            yield from _below((*path, name), held, samples)


def outlets_of(output: Any, samples: int) -> set[Outlet]:
    """The positions of the tensors in an output, whether or not lists of as many hold samples."""
    return {outlet for size in (None, samples) for outlet, _ in outlets(output, size)}


def guarded(
    layout: BatchLayout, called: Any, output: Any, look: Callable[..., None] | None,
    *, replaced: bool = False,
) -> Any:  # fmt: skip
    """The output of a call, which raises an error for a gradient that couples samples.

    Args:
        called: the call (fastclip.samples.calls). look: starts a dry run inside the call, or None.
        replaced: the model's own mean cross entropies are per sample.
    """
    samples = None if called.forward is None else called.forward.batch_size
    guards = layout.guards_of(called.args, called.kwargs)
    if guards.outlets and samples and torch.is_grad_enabled():
        new = _new(guards, samples, output)
        if look is not None and new - guards.rare:
            look(layout, called, called.forward, None, whole=True)
            guards = layout.guards_of(called.args, called.kwargs)
            new = _new(guards, samples, output)
        guards.rare |= new
        if new:
            _check_seen(layout, new, samples, output)
    return check_gradients(guards, output, replaced=replaced)


def _new(guards: Guards, samples: int, output: Any) -> set[Outlet]:
    """The outlets that no dry run has seen, whichever lists hold samples."""
    found = {outlet for outlet, _ in outlets(output)} - guards.outlets
    if found:
        found = {outlet for outlet, _ in outlets(output, samples)} - guards.outlets
    return found


def _check_seen(layout: BatchLayout, new: set[Outlet], samples: int, output: Any) -> None:
    for outlet, x in outlets(output, samples):
        holds = any(x.dim() > axis and x.shape[axis] == samples for axis in {0, layout.axis})
        if outlet in new and x.requires_grad and not holds:
            x.register_hook(partial(_check_not_late, outlet[0], tuple(x.shape)))


def _check_not_late(path: tuple[Hashable, ...], shape: tuple[int, ...], gradient: Tensor) -> None:
    raise BatchSizeError(
        f"Output {'.'.join(map(str, path))} of the model, of shape {list(shape)}, is part of the loss, "
        "but a few samples of the batch do not give it, so it may mix samples. Return it in every call, "
        "or one loss per sample, [b].",
        doc="coupled-loss",
    )
