"""What a run leaves of its operations: two runs that leave the same have computed the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip._torch import tree_leaves
from fastclip.samples.steps import COMPARING, RECURRENT, Step, identity
from fastclip.samples.turns import TAKES, Uneven, in_turns, take_turns
from fastclip.trace.attribution import fitted
from fastclip.trace.memory import Shadow, key_of
from fastclip.trace.numbers import number_arguments
from fastclip.trace.operation import Kind


class Trail:
    """The operations of a run in their order, with all that tells one run from another: two runs that
    leave equal ones have computed the same of their inputs.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._running: Step | None = None
        self._leaves: dict[int, object] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trail) and self._steps == other._steps

    def begins_with(self, x: Tensor, name: object) -> None:
        """What lies in this memory was there before the run, and is the same there in another run."""
        self._leaves[key_of(x)] = name

    def note(
        self, tracer: Any, kind: Kind, args: tuple, kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor], shadows: Sequence[Shadow],
    ) -> None:  # fmt: skip
        """An operation runs."""
        aside = Tensor, torch.Generator  # what that draws is an operand of other operations
        named = [(name, x) for name, x in kwargs.items() if not isinstance(x, aside)]
        sizes = [x for x in tree_leaves(args) if not isinstance(x, Tensor)]
        of_one = kind.name in COMPARING and not any(x.dim() for x in tensors)
        of_sizes = kind.name == "arange" or of_one
        numbers = [] if of_sizes else list(number_arguments(kind, args))
        pairs = [p for p in zip(tensors, shadows, strict=True) if p[0].layout is torch.strided]
        held = [identity(tracer, x, s, self._leaves) for x, s in pairs]
        self._running = Step(kind, named, numbers, sizes, held)
        if kind.name in TAKES and shadows[0].held:
            self._running.source = fitted(shadows[0].sample, tensors[0].dim())
        self._steps.append(self._running)

    def gave(self, tracer: Any, outs: Sequence[Tensor]) -> None:
        """An operation has returned these."""
        if self._running is None:
            return
        self._running.outs.extend(
            identity(tracer, x, tracer.shadow_of(x), self._leaves)
            for x in outs[: 1 if self._running.kind.name in RECURRENT else None]
            if x.layout is torch.strided
        )
        self._running = None

    def agrees(self, other: Trail, samples: int, others: int, *, constants: bool = True) -> bool:
        """The runs differ in sizes alone, which follow the number of samples: no number does, nor the
        size of an axis along which no samples lie.

        Args:
            samples, others: of this run, and of the other. constants: these are the same, too.
        """
        mine, theirs = self._steps, other._steps
        if in_turns(mine) or in_turns(theirs):
            try:
                (mine, own), (theirs, their_own) = (
                    take_turns(mine, samples), take_turns(theirs, others)
                )  # fmt: skip
            except Uneven:
                return False
            if own != their_own:
                return False
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(
            a.agrees(b, samples, others, constants=constants) for a, b in pairs
        )
