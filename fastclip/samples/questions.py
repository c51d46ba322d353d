"""What Python asks of a batch, yes or no (`if mask.all():`) or for a fraction of several samples
(`if x.mean().item() > 0:`), and whether the answers matter.

A call is run again with the other answer to each; instead of a fraction it is told far larger and far
smaller ones. If that is the same operations on the same operands, the answer, which follows from all
samples, has no effect (a warning). If the question is whether all of a mask is true, the call is run as
if nothing were hidden: both ways, with and without the mask, must then give the same outputs and
gradients. So they must if the question is whether some sample is special as it was given (a text of
several parts) and none is: whoever is goes the same way in every batch. That way must be proven, too.
A fraction (no whole number: that may count positions) that has an effect couples the samples,
whatever its value is in this batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fastclip.memory import no_memory
from fastclip.samples.gradients import gradients, normal
from fastclip.samples.probing import Shown
from fastclip.samples.rounding import VALUES, close

_MOST = 16
"""Runs, at most."""
_FAR = 100.0
"""How much larger a fraction is that Python is told instead."""


class Asked(Protocol):
    """A run that has asked."""

    @property
    def answers(self) -> list[bool | float]:
        """What Python got, in the order of its questions."""

    def is_again(self, other: Any) -> bool:
        """The other run has done the same."""

    def gives_the_same(self, other: Any, question: int) -> bool:
        """Another answer to this question than in the other run changes nothing."""


class Matters(Exception):
    """A fraction of several samples that Python has read has an effect."""


def have_no_effect(first: Asked, run: Callable[[Mapping[int, bool | float]], Asked]) -> bool:
    """Whether no question of a run has an effect.

    Args:
        run: runs again, with given answers to the questions of these numbers; others are answered as
            they are. Raises an error where that is not proven.

    Raises:
        Matters: a fraction has one.
    """
    ahead, runs = _others(first, 0), 0
    while ahead:
        (before, k, other), runs = ahead.pop(), runs + 1
        if runs > _MOST:
            return False
        wanted = [*before.answers[:k], other]
        try:
            found = run(dict(enumerate(wanted)))
        except (AssertionError, ValueError):  # it only checks what it was given
            continue
        except Exception as error:  # the model does not go that way
            if no_memory(error):
                raise
            return False
        if found.answers[: k + 1] != wanted:
            return False
        if not found.gives_the_same(before, k):
            if isinstance(other, bool):
                return False
            raise Matters
        if not run({}).is_again(first):  # an answer was kept
            return False
        ahead += _others(found, len(wanted))
    return True


def _others(run: Asked, first: int) -> list[tuple[Asked, int, bool | float]]:
    """The other answers to the questions of a run from the `first` on."""
    found: list[tuple[Asked, int, bool | float]] = []
    for k, answer in enumerate(run.answers[first:], first):
        if isinstance(answer, bool):
            found.append((run, k, not answer))
        else:
            size = _FAR * (1 + abs(answer))
            found += [(run, k, size), (run, k, -size)]
    return found


def unmasked(x: Any, axis: int) -> Any:
    """An input's rows as they are; instead of a mask, one that hides nothing."""
    del axis
    if not isinstance(x, Tensor) or x.dim() < 2 or x.is_floating_point() or x.is_complex():
        return x
    masks = (
        not x.numel() or 0 <= int(x.min()) <= int(x.max()) == 1
    )  # zeros alone may be numbers of a table
    return torch.ones_like(x) if masks else x


class Given:
    """What a run has given: outputs, and the gradients of layers and uses.

    Args:
        shown: by layers and uses. outputs: the tensors that it returned.
    """

    def __init__(self, shown: list[Shown], outputs: list[Tensor]) -> None:
        self.outputs = [x.detach() for x in outputs]
        roots = [x for x in outputs if x.requires_grad and x.grad_fn is not None]
        seeds = [normal(x, k).to(x.dtype) for k, x in enumerate(roots)]
        edges = [x.edge for x in shown if x.edge is not None]
        self._names = [x.name for x in shown if x.edge is not None]
        self._gradients = gradients(roots, edges, seeds) if roots and edges else ()

    def is_like(self, other: Given) -> bool:
        """The other run has given the same, but for rounding."""
        if self._names != other._names or len(self.outputs) != len(other.outputs):
            return False
        found = zip(
            (*self.outputs, *self._gradients), (*other.outputs, *other._gradients), strict=True
        )
        return all(_same(one, two) for one, two in found)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and close(one, other, VALUES)
