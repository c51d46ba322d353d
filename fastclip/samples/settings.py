"""The settings of a model: what its forward may branch on, beside tensors that are trained.

Numbers, strings, flags and functions that its modules hold, in objects and containers too (a config);
their hooks and parts; the attributes of their classes; which version a buffer or a frozen parameter has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sized
from enum import Enum
from functools import partial
from itertools import compress
from operator import attrgetter, is_, not_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.samples.held import Attributes, Items, Scripted, Slots, native, reader
from fastclip.samples.hooks import StandingHooks, numbers_of, tables_of_hooks
from fastclip.samples.probe_state import TORCHS, is_object

Key = tuple[Hashable, ...]

_PLAIN = (
    bool, int, float, str, type(None), Enum, type, torch.dtype,
    FunctionType, BuiltinFunctionType, MethodType, partial,
)  # fmt: skip
_MOST = frozenset({bool, int, float, str, type(None)})
_DEEPEST = 3
_LONGEST = 64
"""Containers of settings are no deeper and no longer: what is longer holds data."""
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
    """The settings of a model, and where they stand."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()
        self.values: list[Any] = self._read()
        """What they were when they were last read, in one order."""
        self._standing = _Standing(self)

    def changed(self) -> list[Key]:
        """Which have changed since they were last read."""
        if self._standing.holds():
            return []
        values, before = self._read(), self.values
        found: list[Key] = []
        if values != before:
            known = dict(zip(self._keys, before, strict=True))
            outline = len(self._sized) + len(self._held)
            if values[:outline] != before[:outline]:
                self._find()
                values = self._read()
            self.values = values
            # what is new stands in what has grown, or in the place of another, which has changed
            now = zip(self._keys, values, strict=True)
            found = [key for key, value in now if key in known and known[key] != value]
        self._standing = _Standing(self)
        return found

    def state(self) -> tuple[Any, ...]:
        """What of the last values may come again: no numbers, nor which tensors there are, and their
        versions; of these, which are trained."""
        start = len(self._sized) + len(self._held)
        end = start + len(self._plain)
        plain = (v for v in self.values[start:end] if not is_counter(v))
        return (*plain, *map(type, self.values[end : end + len(self._tensors)]))

    def _read(self) -> list[Any]:
        return [
            *map(len, self._sized),
            *[id(table.get(name)) for table, name in self._held],
            *[
                value if type(value := table.get(name)) in _MOST else kind(value)
                for table, name in self._plain
            ],
            *[_version(table.get(name)) for table, name in self._tensors],
            *numbers_of(self._hooks),
        ]

    def _find(self) -> None:
        self._sized: list[Sized] = []
        """What holds settings, and would hold more of them if it grew."""
        self._held: list[tuple[Any, Any]] = []
        """Where it stands, itself."""
        self._plain: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Any, Any]] = []
        self._known: set[int] = set()
        for module in self._model.modules():
            self._of_module(module)
        places = (*self._held, *self._plain, *self._tensors)
        self._keys: list[Key] = [("size", self._owner(held)) for held in self._sized]
        self._keys += [(self._owner(table), name) for table, name in places]
        self._hooks = tables_of_hooks(self._model)
        self._keys += [("hooks", id(table)) for table in self._hooks]

    def _of_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            own = Scripted(module)
            self._plain.append((own, "training"))
            self._tensors += [(own, name) for name in own.names]
            return
        self._sized.append(module._modules)
        self._held += [(module._modules, name) for name in module._modules]
        for table in (module._buffers, module._parameters):
            self._tensors += [(table, name) for name in table]
        self._plain.append((vars(module), "training"))
        self._home = type(module).__module__
        if self._home.startswith("torch.nn."):
            dims = [name for name in ("dim",) if name in vars(module)]
            self._plain += [(vars(module), name) for name in ("forward", *dims)]
            return
        self._of_table(vars(module), vars(module), 0)
        for base in type(module).__mro__:
            if base.__module__.split(".")[0] not in ("torch", "builtins"):
                self._of_table(Attributes(base), Attributes(base).names(), _DEEPEST)

    def _of_table(self, table: Any, names: Iterable[Any], depth: int) -> None:
        if self._owner(table) in self._known:
            return
        self._known.add(self._owner(table))
        of_opacus = self._home.startswith("opacus.")
        if not of_opacus:
            self._sized.append(table)
        for name in list(names):
            value = table.get(name)
            if isinstance(value, _PLAIN) or _is_set(value) or _is_number(value):
                if name != "training" and not (of_opacus and name == _OF_BATCHES):
                    self._plain.append((table, name))
            elif is_flag(value):
                self._tensors.append((table, name))
            elif depth < _DEEPEST and name not in TORCHS:
                self._of_value(table, name, value, depth + 1)

    def _of_value(self, table: Any, name: Any, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple)) and len(value) <= _LONGEST:
            self._held.append((table, name))
            self._of_table(Items(value), range(len(value)), depth)
        elif isinstance(value, Mapping) and len(value) <= _LONGEST:
            self._held.append((table, name))
            self._of_table(value, value, depth)
        elif is_object(value) and not self._is_strange(name, value):
            self._held.append((table, name))
            self._of_table(vars(value), vars(value), depth)
        elif (slots := Slots(value)).names and not self._is_strange(name, value):
            self._held.append((table, name))
            self._of_table(slots, slots.names, depth)

    def _is_strange(self, name: Any, value: Any) -> bool:
        """Whether its attributes are no settings: it is private, or is called, and is not of the
        module's own kin (a trainer)."""
        apart = callable(value) or str(name).startswith("_")
        return apart and type(value).__module__ != self._home

    @staticmethod
    def _owner(table: Any) -> int:
        return id(table.held if isinstance(table, (Items, Attributes, Slots)) else table)


class _Standing:
    """What stands where settings were read: while all of it does, they are what they were.

    A model has thousands of settings, which every step asks for, and which hardly ever change. So it is
    looked whether the same objects are there; only what may change in itself is read.
    """

    def __init__(self, settings: Settings) -> None:
        self._sized = [*map(native, settings._sized)]
        self._sizes = [*map(len, self._sized)]
        self._hooks = StandingHooks(settings._hooks)
        places = (*settings._held, *settings._plain, *settings._tensors)
        self._places: dict[Any, tuple[list[Any], list[Any]]] = {}
        """Tables and names, by what reads them, without a line of Python for each."""
        for table, name in places:
            tables, names = self._places.setdefault(reader(native(table)), ([], []))
            tables.append(native(table))
            names.append(name)
        self._objects = self._look()
        values = [table.get(name) for table, name in settings._plain]
        self._sets = [value for value in values if _is_set(value)]
        self._members = [*map(frozenset, self._sets)]
        self._changeable = [value for value in values if _changes(value)]
        self._kinds = [*map(kind, self._changeable)]
        read = [table.get(name) for table, name in settings._tensors]
        self._tensors = [tensor for tensor in read if tensor is not None]
        self._trained = [*map(_REQUIRES_GRAD, self._tensors)]
        self._fixed = [*compress(self._tensors, map(not_, self._trained))]
        self._versions = [*map(_version, self._fixed)]

    def _look(self) -> list[Any]:
        return [x for read, places in self._places.items() for x in map(read, *places)]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            [*map(len, self._sized)] == self._sizes
            and self._hooks.hold()
            and all(map(is_, self._look(), self._objects))
            and self._sets == self._members
            and [*map(kind, self._changeable)] == self._kinds
            and [*map(_REQUIRES_GRAD, self._tensors)] == self._trained
            and [*map(_version, self._fixed)] == self._versions
        )


_REQUIRES_GRAD = attrgetter("requires_grad")


def _changes(value: Any) -> bool:
    """Whether a setting may become another while it is the same object, and is no set."""
    return type(value) not in _MOST and not _is_set(value) and kind(value) is not value


def _version(tensor: Tensor | None) -> Any:
    """What changes when a buffer or a frozen parameter does, unless it is through `.data`.

    Of a parameter that is trained: which one it is.
    """
    if tensor is None or tensor.requires_grad:
        return id(tensor) if isinstance(tensor, nn.Parameter) else None
    return id(tensor), 0 if tensor.is_inference() else tensor._version
