"""Whether a module still computes what its rule was written for.

torch's layers can be customised without a `forward` of one's own: by overriding a method that it
goes through (`_conv_forward`), by a property in the place of a weight, or for one module alone, by
an attribute. A rule does not see any of it.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter, is_
from types import MethodType
from typing import Any

from torch import nn

_HARMLESS = {
    "_fill_padding_idx_with_zero",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "extra_repr",
    "from_pretrained",
    "reset_parameters",
    "reset_running_stats",
}
"""Methods of torch's layers that no forward pass goes through."""
_ACCESS = ("__getattr__", "__getattribute__")

_PARAMETERS = frozenset({"weight", "bias"})
"""What else has such a name is found before a module's parameter."""
_FORWARD = {"forward"}
"""Every private layer has one of its own, from fastclip."""

MARKS = frozenset({"_fastclip", "_fastclip_part"})
"""A module that has one of these has a forward from fastclip."""
OWN = "_fastclip_own"
"""What such a module had as `forward` of its own before that, if it had one."""


def own_forward(module: Any) -> Any:
    """The forward that was set on the object itself (`model.forward = ...`), and computes what the
    class's does not; else None."""
    held = module.__dict__
    found = held.get("forward")
    if not MARKS.isdisjoint(held):
        found = held[OWN].forward if OWN in held else None
    if isinstance(found, MethodType) and found.__self__ is module:
        return None if found.__func__ is getattr(type(module), "forward", None) else found
    return found


class Originals:
    """What the forward pass of a class may go through: its methods, and how attributes are found.

    No Snapshot, for other classes are held against it: subclasses, which may do something else.
    """

    def __init__(self, code: dict[str, Any]) -> None:
        self.code = code
        self.read = attrgetter(*code)
        """All of it, as a class has it."""
        self.names = frozenset(code) - _FORWARD
        """None of which a module has of its own."""


def originals(cls: type) -> Originals:
    """What a class does when it is first met."""
    names = {
        name
        for base in _own_bases(cls)
        for name, value in vars(base).items()
        if not name.startswith("__") and name not in _HARMLESS and _is_code(value)
    }
    names = names | _FORWARD
    return Originals({name: getattr(cls, name) for name in (*sorted(names), *_ACCESS)})


def customised(module: Any, cls: type, known: Originals) -> list[str]:
    """Names of what `module` does otherwise than `cls` did when its rule was registered.

    Args:
        module: of the class `cls`, or of a subclass. known: `originals(cls)` at that time.
    """
    own = type(module)
    if own is cls and unchanged(module, own, known):
        return []
    found = [name for name, value in known.code.items() if getattr(own, name, None) is not value]
    found += [name for name in known.code if name in module.__dict__ and name != "forward"]
    return found if own is cls else [*found, *_shadows(own, cls)]


def unchanged(module: Any, own: type, known: Originals) -> bool:
    """The class has what it had, and the module nothing of its own; every layer asks in every step."""
    try:
        return known.names.isdisjoint(module.__dict__) and all(
            map(is_, known.read(own), known.code.values())
        )
    except AttributeError:
        return False


def are_unchanged(modules: Collection[Any], own: type, known: Originals) -> bool:
    """`unchanged` of many modules of one class, without a line of Python for each."""
    try:
        code = all(map(is_, known.read(own), known.code.values()))
    except AttributeError:
        return False
    kinds = code and {*map(type, modules)} == {own}
    plain = kinds and all(map((known.names | _PARAMETERS).isdisjoint, map(vars, modules)))
    return plain and all(map(_PARAMETERS.isdisjoint, map(vars, own.__mro__)))


def _shadows(own: type, cls: type) -> tuple[str, ...]:
    """Attributes of the layer, its weights among them, that a subclass has defined as its own."""
    data = {name for base in _own_bases(cls) for name in vars(base).get("__annotations__", ())}
    data.update({"weight", "bias"}, getattr(cls, "__constants__", ()))
    subclasses = own.__mro__[: own.__mro__.index(cls)]
    return tuple(sorted(data & {name for base in subclasses for name in vars(base)}))


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base not in nn.Module.__mro__]


def _is_code(value: Any) -> bool:
    """A method or a property; a class method is made anew whenever it is looked up."""
    return not isinstance(value, classmethod) and (callable(value) or hasattr(value, "__get__"))
