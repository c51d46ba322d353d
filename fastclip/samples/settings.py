"""The settings of a model: what its forward may branch on, beside tensors that are trained.

Numbers, strings, flags and functions that its modules hold, in objects and containers too (a config);
their hooks and parts; the attributes of their classes; which version a buffer or a frozen parameter has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from enum import Enum
from functools import partial
from itertools import compress
from operator import attrgetter, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastclip._torch import hooks_of_all_modules
from fastclip.samples.held import Key, Place, places_of, settings_of, slots_of
from fastclip.samples.probe_state import TORCHS, is_object
from fastclip.snapshot import Facts, Snapshot

_PLAIN = (
    bool, int, float, str, type(None), Enum, type, torch.dtype,
    FunctionType, BuiltinFunctionType, MethodType, partial,
)  # fmt: skip
_MOST = frozenset({bool, int, float, str, type(None)})
_DEEPEST = 3
_LONGEST = 64
"""Containers of settings are no deeper and no longer: what is longer holds data."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_BATCHES = "max_batch_len"
"""What Opacus' recurrent cells note of every batch, first in a first one."""


def kind(value: Any) -> Any:
    """A setting's value; of anything else its type."""
    if type(value) in _MOST or isinstance(value, (*_PLAIN, nn.Module)):
        return value
    if _is_set(value):
        return frozenset(value)
    return value.item() if _is_number(value) else type(value)


def _is_set(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and len(value) <= _LONGEST


def _is_number(value: Any) -> bool:
    """One of NumPy's own."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def is_counter(value: Any) -> bool:
    """A number, which may be another one in every step."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """A tensor that holds one whole number, or whether something is so."""
    one = isinstance(value, Tensor) and value.numel() == 1
    return one and not (value.is_floating_point() or value.is_complex())


class Settings:
    """The settings of a model, and where they stand.

    It is looked whether the same objects are there; only what may change in itself is read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()
        self._snapshot = Snapshot(self._facts())

    def changed(self) -> list[Key]:
        """Which have changed since they were last read."""
        if self._snapshot.stands():
            return []
        found: list[Any] = self._snapshot.changed()
        if self._outline.isdisjoint(found):
            self._snapshot = Snapshot(self._facts())
            return found
        before = self._snapshot.values()
        self._find()
        self._snapshot = Snapshot(self._facts())
        # what is new stands in what has grown, or in the place of another, which has changed
        now: Any = self._snapshot.values().items()
        came = [key for key in found if key not in before]
        return came + [key for key, value in now if key in before and before[key] != value]

    def state(self) -> tuple[Any, ...]:
        """What of their values may come again: no numbers, nor which tensors there are, and their
        versions; of these, which are trained."""
        plain = (kind(place.held) for place in self._plain)
        tensors = (place.held for place in self._tensors)
        return (
            *(value for value in plain if not is_counter(value)),
            *(None if x is None else _is_trained(x) for x in tensors),
        )

    def _facts(self) -> Iterator[Facts]:
        yield from self._columns
        plain = [(p.key, x) for p in self._plain if type(x := p.held) not in _MOST]
        tensors = [(p.key, x) for p in self._tensors if isinstance(x := p.held, Tensor)]
        yield _inside([(key, x) for key, x in plain if _is_set(x)], frozenset)
        yield _inside([(key, x) for key, x in plain if _changes(x)], kind)
        yield _inside(tensors, _REQUIRES_GRAD)
        yield _inside([(key, x) for key, x in tensors if not x.requires_grad], _version)
        empty = [table for table in self._hooks if not table]
        yield Facts(None, partial(compress, [("hooks", id(table)) for table in empty], empty))
        full = [table for table in self._hooks if table]
        hooks = [("hooks", id(table)) for table in full]
        yield Facts(hooks, lambda: map(tuple, map(_VALUES, full)))

    def _find(self) -> None:
        self._sized: dict[Key, Sized] = {}
        """What holds settings, and would hold more of them if it grew."""
        self._held: list[Place] = []
        """Where it stands, itself."""
        self._plain: list[Place] = []
        self._tensors: list[Place] = []
        self._known: set[int] = set()
        for module in self._model.modules():
            self._of_module(module)
        self._hooks = _tables_of_hooks(self._model)
        self._outline = {*self._sized, *(place.key for place in self._held)}
        self._columns = [
            Facts([*self._sized], partial(map, len, [*self._sized.values()])),
            *_standing(self._held, id),
            *_standing(self._plain, kind),
            *_standing(self._tensors, _which),
        ]

    def _of_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            own = (*module.named_parameters("", False), *module.named_buffers("", False))
            self._plain += places_of(module, ["training"])
            self._tensors += places_of(module, [name for name, _ in own])
            return
        self._sized["size", id(module._modules)] = module._modules
        self._held += places_of(module._modules, module._modules)
        for table in (module._buffers, module._parameters):
            self._tensors += places_of(table, table)
        self._plain += places_of(vars(module), ["training"])
        self._home = type(module).__module__
        if self._home.startswith("torch.nn."):
            dims = [name for name in ("dim",) if name in vars(module)]
            self._plain += places_of(vars(module), ["forward", *dims])
            return
        self._of_table(vars(module), vars(module), 0)
        for base in type(module).__mro__:
            if base.__module__.split(".")[0] not in ("torch", "builtins"):
                self._of_table(vars(base), settings_of(base), _DEEPEST, base)

    def _of_table(self, table: Any, names: Iterable[Any], depth: int, owner: Any = None) -> None:
        number = id(table if owner is None else owner)
        if number in self._known:
            return
        self._known.add(number)
        of_opacus = self._home.startswith("opacus.")
        if not of_opacus and isinstance(table, (list, tuple, Mapping)):
            self._sized["size", number] = table
        for place in places_of(table, names, owner):
            value = place.held
            if isinstance(value, _PLAIN) or _is_set(value) or _is_number(value):
                if place.name != "training" and not (of_opacus and place.name == _OF_BATCHES):
                    self._plain.append(place)
            elif is_flag(value):
                self._tensors.append(place)
            elif depth < _DEEPEST and place.name not in TORCHS:
                self._of_value(place, value, depth + 1)

    def _of_value(self, place: Place, value: Any, depth: int) -> None:
        table: Any = value
        names: Iterable[Any]
        if isinstance(value, (list, tuple)) and len(value) <= _LONGEST:
            names = range(len(value))
        elif isinstance(value, Mapping) and len(value) <= _LONGEST:
            names = value
        elif self._is_strange(place.name, value):
            return
        elif is_object(value):
            table = names = vars(value)
        elif not (names := slots_of(value)):
            return
        self._held.append(place)
        self._of_table(table, names, depth)

    def _is_strange(self, name: Any, value: Any) -> bool:
        """Whether its attributes are no settings: it is private, or is called, and is not of the
        module's own kin (a trainer)."""
        apart = callable(value) or str(name).startswith("_")
        return apart and type(value).__module__ != self._home


def _standing(places: Iterable[Place], of: Callable[[Any], Any]) -> Iterator[Facts]:
    """What stands in these places, in a column for each kind of table."""
    columns: dict[Any, list[Place]] = {}
    for place in places:
        columns.setdefault(place.read, []).append(place)
    for read, found in columns.items():
        keys, _, tables, names = zip(*found, strict=True)
        yield Facts(keys, partial(map, read, tables, names), of)


def _inside(objects: list[tuple[Key, Any]], read: Callable[[Any], Any]) -> Facts:
    """What may change in objects that stay where they are."""
    return Facts([key for key, _ in objects], partial(map, read, [x for _, x in objects]))


_REQUIRES_GRAD = attrgetter("requires_grad")
_VALUES = methodcaller("values")


def _changes(value: Any) -> bool:
    """Whether a setting may become another while it is the same object, and is no set."""
    return type(value) not in _MOST and not _is_set(value) and kind(value) is not value


def _is_trained(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _which(x: Any) -> int | None:
    """Which tensor it is; of one that is trained and no parameter, which is made anew, nothing."""
    return None if _is_trained(x) and not isinstance(x, nn.Parameter) else id(x)


def _version(x: Tensor) -> int:
    """What changes when a buffer or a frozen parameter does, unless it is through `.data`."""
    return 0 if x.is_inference() else x._version


def _tables_of_hooks(model: nn.Module) -> list[dict[int, Any]]:
    """Where torch keeps the hooks of a model's modules, and of all: any may couple rows."""
    own = [vars(m)[kind] for m in model.modules() for kind in _HOOKS if kind in vars(m)]
    return [*own, *hooks_of_all_modules()]
