"""Rows of constants to which trained weights are applied, and of which samples choose by their numbers.

So graph networks are called with numbers of nodes, whose features lie in a buffer: these follow from
nobody's row of the batch, and may be the private data. A table of frozen weights of which samples choose
before anything is trained on them is none such, nor are weights that are multiplied entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from fastclip._torch import memory_of
from fastclip.errors import say
from fastclip.samples.parts import parts_of
from fastclip.samples.probe_state import tables_of


class Rows(NamedTuple):
    """Constants of which each row has been multiplied by trained weights: where, and how many rows."""

    memory: int
    shape: tuple[int, ...]
    number: int

    @staticmethod
    def of(x: Tensor, axis: int) -> Rows:
        return Rows(memory_of(parts_of(x)[-1]), tuple(x.shape), x.shape[axis])


def say_chosen(model: nn.Module, chosen: Mapping[Rows, str], told: set[str]) -> None:
    """Warn once of rows that the model holds, or has computed of what it holds: that has their shape.

    Args:
        chosen: the rows, and the use in which samples choose among them. told: their names, if they
            have been told.
    """
    held = [(name, Rows.of(x, 0)) for name, x in (_held(model) if chosen else ())]
    names: dict[str, None] = {}
    for rows in chosen:
        same = [name for name, own in held if own.memory == rows.memory]
        names |= dict.fromkeys(same or [name for name, own in held if own.shape == rows.shape])
    if not names.keys() <= told:
        told.update(names)
        say(
            f"{' and '.join(names)}: trained weights meet all rows, and samples choose among them by "
            f"number ({next(iter(chosen.values()))}), so what they hold is neither clipped nor noised. "
            "If it is private, pass each sample its own rows; else make it a frozen parameter."
        )


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, table in tables_of(model):
        for kind, tensors in (("buffer", table.get("_buffers", {})), ("attribute", table)):
            for name, x in tensors.items():
                if type(x) is Tensor and x.dim():
                    yield f"{kind} {f'{path}.{name}'.lstrip('.')!r}", x
