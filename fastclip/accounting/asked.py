"""What a ledger is asked beside its steps: its epsilon, as the engine states it, and its noise."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from opacus.accountants import IAccountant

from fastclip.accounting.history import spent
from fastclip.noise.drawn import DrawnStates


class Asked(IAccountant):
    """A part of `Ledger`."""

    kept_from: type[IAccountant]
    """The accountant's class before it became a ledger."""

    @property
    def drawn(self) -> DrawnStates:
        """From which states of generators the noise of its steps came, as far as this process knows."""
        found: DrawnStates = self.__dict__.setdefault("_drawn", DrawnStates())
        return found


def asks_of(kind: type[IAccountant]) -> dict[str, Any]:
    """`get_epsilon` of a class of accountants, with the guards of `engine.get_epsilon`."""

    @wraps(kind.get_epsilon)
    def get_epsilon(self: IAccountant, delta: float, *args: Any, **options: Any) -> float:
        names = list(inspect.signature(kind.get_epsilon).parameters)[2:]
        return spent(self, delta, **dict(zip(names, args, strict=False)), **options)

    return {"get_epsilon": get_epsilon, "kept_from": kind, "__doc__": kind.__doc__}
