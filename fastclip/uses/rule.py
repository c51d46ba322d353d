"""The protocol of a use's rule: what a function that takes a parameter contributes to its gradient.

A layer's rule answers for a module; a use's rule for a function, whoever calls it. It says which of the
other operands are kept for the backward pass, and makes records of them and of the output's gradient.
Input gradients are autograd's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward

Operands = dict[str, Any]
"""The arguments of a call by name; private ones among them as they are."""


class UseRule(ABC):
    """Exact per-sample gradients of what some functions compute from parameters and a batch."""

    name = "use"
    routed = False
    """Also where samples are told entry by entry, not by their place."""
    keeps_output = False
    """The function saves its own output for its backward pass, so that it must not be changed."""
    last = False
    """Asked after all others: it answers for much, at a price."""
    own_memory = False
    """The output is in memory of its own, which nothing has saved, though torch may call it a view."""

    def __deepcopy__(self, memo: dict[int, Any]) -> UseRule:
        return self  # rules hold no state of a model

    @abstractmethod
    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        """The operands of this call; None where the rule does not answer for it."""

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        """Whether the rule can tell the samples of this output apart.

        Args:
            private: names of the operands that are parameters, or derived from such.
            place: of the samples in the output; None where they are told entry by entry.
        """
        return True

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        """Names of the tensors that `records` needs, beside the output's gradient."""
        return []

    @abstractmethod
    def records(self, use: UseBackward) -> None:
        """Record the contributions that `use.wants`."""


@lru_cache(maxsize=4096)
def plain_name(func: Callable) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__iadd__ and Tensor.__radd__."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__  # type: ignore[attr-defined]
    if name.startswith("__"):
        name = name.strip("_")
        for prefix in ("i", "r"):
            if name[:1] == prefix and name[1:] in _REFLECTED:
                return name[1:] if name not in ("rsub", "rtruediv", "rpow", "rmatmul") else name
        return name
    return name[:-1] if name.endswith("_") else name


_REFLECTED = frozenset(
    ["add", "sub", "mul", "truediv", "matmul", "pow", "mod", "floordiv", "and", "or", "xor"]
)


@lru_cache(maxsize=4096)
def in_place(func: Callable) -> bool:
    """The function changes its first argument."""
    name = func.__name__.partition(".")[0]  # aten's add_.Tensor
    if name.startswith("__"):
        bare = name.strip("_")
        return bare == "setitem" or (bare[:1] == "i" and bare[1:] in _REFLECTED)
    return name.endswith("_")


_RULES: dict[str, list[UseRule]] = {}
R = TypeVar("R", bound=type[UseRule])


def register_use(*names: str) -> Callable[[R], R]:
    """Class decorator: use this rule for functions of these names, before those registered so far."""

    def decorate(rule: R) -> R:
        one = rule()
        for name in names:
            known = _RULES.setdefault(name, [])
            known.insert(len(known) if one.last else 0, one)
        return rule

    return decorate


def rules_of(func: Callable) -> list[UseRule]:
    """The rules that may answer for a function, in order."""
    return _RULES.get(plain_name(func), [])
