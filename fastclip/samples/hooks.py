"""The hooks of a model's modules, and of all modules: any may couple rows, so they are watched."""

from __future__ import annotations

from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import nn

from fastclip._torch import hooks_of_all_modules

Table = dict[int, Any]
_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_VALUES = methodcaller("values")


def tables_of_hooks(model: nn.Module) -> list[Table]:
    """Where torch keeps them."""
    own = [vars(m)[kind] for m in model.modules() for kind in _KINDS if kind in vars(m)]
    return [*own, *hooks_of_all_modules()]


def numbers_of(tables: list[Table]) -> list[int]:
    """Of each table, what changes when a hook comes, goes or takes another one's place.

    Only as long as the hooks that were there live: another may get the number of one that is gone.
    """
    return [hash(tuple(map(id, table.values()))) if table else 0 for table in tables]


class StandingHooks:
    """The hooks that stand in these tables, most of which are empty: these take no line of Python."""

    def __init__(self, tables: list[Table]) -> None:
        self._empty = [table for table in tables if not table]
        self._full = [table for table in tables if table]
        self._hooks = self._look()

    def _look(self) -> list[Any]:
        return [*chain.from_iterable(map(_VALUES, self._full))]

    def hold(self) -> bool:
        """Whether they are the same."""
        if any(self._empty):
            return False
        now = self._look()
        return len(now) == len(self._hooks) and all(map(is_, now, self._hooks))
