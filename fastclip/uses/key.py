"""By which the calls of one function are known again, in the next pass and in the probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastclip._torch import CallingPlace, calling_place, settled
from fastclip.uses.proxy import Derived, parameters_of
from fastclip.uses.rule import plain_name

_NOT_A_CALLER = (
    "torch/overrides.py", "torch/_tensor.py", "fastclip/uses/composite.py",
    "fastclip/uses/interceptor.py", "fastclip/uses/proxy.py", "fastclip/model/model_loss.py",
)  # fmt: skip


class Key(NamedTuple):
    """By which a use is known again: function, parameters, place in the code, dimensions of the rest."""

    label: str
    private: tuple[int, ...]
    place: CallingPlace
    dims: tuple[int, ...]


class Keys:
    """The keys of one model's calls.

    Args:
        names: of its parameters.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._keys: dict[Any, Key] = {}

    def of(self, func: Callable, private: list[Any], plain: list[Tensor]) -> Key:
        """The key of a call that is three frames above the one that asks."""
        names, place = self._names, calling_place(4, _NOT_A_CALLER)
        dims = tuple(dict.fromkeys([x.dim() for x in plain]))
        known = (func, place, dims, *[_identity(x) for x in private])
        key = self._keys.get(known)
        if key is None:
            held = sorted({names.get(p, "?") for value in private for p in parameters_of(value)})
            labels = tuple(  # once each: a list may hold as many as there are rows
                dict.fromkeys(
                    value.source.label if type(value) is Derived else hash(names.get(value, "?"))
                    for value in private
                )
            )
            label = f"{', '.join(held)} in {plain_name(func)}"
            key = self._keys[known] = Key(label, labels, settled(place), dims)
        return key


def _identity(value: Any) -> int:
    """Of a parameter, which the model keeps alive; of a derived value, how it was made."""
    return value.source.label if type(value) is Derived else id(value)
