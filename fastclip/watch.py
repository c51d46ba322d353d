"""When a model must be looked at again: nothing is read at a step but a few attributes.

What a probe found holds for the state in which the model was: a flag that is raised later may switch on
a branch that couples rows. So the plain values (numbers, strings, None) that its modules hold are
compared with those of the last look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_PATIENCE = 16
"""Looks at changed numbers before only every doubling of the calls is one: counters never rest."""


class Watch:
    """The state in which a model was looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._places = list(_places(model))
        self._seen = {self._flags()}
        self._numbers = self._state()
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy looks for itself."""

    def changed(self) -> bool:
        """Whether this call finds a state that was not looked at; to be asked once a call."""
        self._calls += 1
        state = self._state()
        if state == self._numbers:
            return False
        flags = self._flags()
        if flags not in self._seen:
            self._seen.add(flags)
            self._numbers = state
            return True
        if self._calls > _PATIENCE and not self.rarely():
            return False
        self._numbers = state
        return True

    def rarely(self) -> bool:
        """True at every doubling of the calls."""
        return not self._calls & (self._calls - 1)

    def _state(self) -> list[Any]:
        return [table.get(name) for table, name in self._places]

    def _flags(self) -> tuple[Any, ...]:
        values = (table.get(name) for table, name in self._places)
        return tuple(v for v in values if isinstance(v, (bool, str)) or v is None)


def _places(model: nn.Module) -> Any:
    """Where plain values stand: in every module `training`, in users' own everything."""
    known: set[int] = set()
    for module in model.modules():
        yield vars(module), "training"
        if type(module).__module__.startswith("torch.nn."):
            continue
        yield from _plain(vars(module), known)
        for name, value in list(vars(module).items()):
            if name.startswith("_") or isinstance(value, (nn.Module, torch.Tensor, type)):
                continue
            if hasattr(value, "__dict__") and not callable(value):  # such as a config
                yield from _plain(vars(value), known)


def _plain(table: dict[str, Any], known: set[int]) -> Any:
    if id(table) in known:
        return
    known.add(id(table))
    for name, value in table.items():
        if isinstance(value, _PLAIN) and name != "training":
            yield table, name
