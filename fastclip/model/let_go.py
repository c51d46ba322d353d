"""What the weights of a model have been trained with: whoever trains it next counts it, too.

`cleanup()` ends one engine's hold on a model, and takes none of its steps out of the weights. What they
have spent is kept in memory for the modules whose own parameters were trained, weakly, so that it goes
with them into another model. A copy that is made of them afterwards has none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

from torch import nn

from fastclip.accounting.segments import Spent, union
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.noise.drawn import DrawnStates


class Trained(NamedTuple):
    """What one ledger says of a model's steps, and where their noise came from."""

    spent: Spent
    drawn: DrawnStates | None
    """None in a copy."""

    def covers(self, other: Trained) -> bool:
        """Whether it counts all that the other does."""
        own = self.spent.segments
        return union(own, other.spent.segments) == own


_TRAINED: WeakKeyDictionary[nn.Module, list[Trained]] = WeakKeyDictionary()
"""Modules that were let go."""


def owners(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that have parameters of their own to be trained."""
    return [
        module
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]


def trained_by(batch: LogicalBatch) -> list[Trained]:
    """What a model was trained with whose steps release this batch; nothing before make_private."""
    spent = batch.spent
    ledger = getattr(batch.account, "ledger", None)
    return [] if spent is None else [Trained(spent, None if ledger is None else ledger.drawn)]


def let_go(modules: Iterable[nn.Module], batch: LogicalBatch) -> None:
    """Who releases `batch` takes no more steps on these modules."""
    now = trained_by(batch)
    for module in modules if now else ():
        before = [each for each in _TRAINED.get(module, []) if not now[0].covers(each)]
        _TRAINED[module] = before + now


def let_go_with(wrapper: object, modules: Iterable[nn.Module], batch: LogicalBatch) -> None:
    """The same once `wrapper` is gone; its `cleanup()` is Opacus', which tells nobody."""
    held = [ref(module) for module in modules]

    def end() -> None:
        let_go([module for each in held if (module := each()) is not None], batch)

    finalize(wrapper, end).atexit = False


def found_in(model: nn.Module) -> list[Trained]:
    """What modules of `model` were trained with when they were let go."""
    return list(
        {id(each): each for module in model.modules() for each in _TRAINED.get(module, [])}.values()
    )
