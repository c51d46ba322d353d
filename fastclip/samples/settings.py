"""The settings of a model: what its forward may branch on, and when it must be traced again.

Settings are numbers, strings, flags and functions that its modules hold, in objects and containers too
(a config); their hooks and parts; the attributes of their classes; and the versions of buffers and
frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import compress
from operator import attrgetter, getitem, methodcaller
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip.core.snapshot import Facts, Snapshot
from fastclip.core.torch_names import hooks_of_all_modules
from fastclip.samples.inputs import Reading, Way, is_dense
from fastclip.samples.state import TORCHS, is_object

# -------------------------------------------------------------------------------------------------
# The containers of settings: mappings, lists, objects with slots, classes.


Key = tuple[Hashable, ...]


class Setting(NamedTuple):
    """A name in a table.

    Args:
        key: identifies it later. read: reads a name of the table.
    """

    key: Key
    read: Callable[[Any, Any], Any]
    table: Any
    name: Any

    @property
    def held(self) -> Any:
        """Its value now; None in a list that has become shorter."""
        try:
            return self.read(self.table, self.name)
        except LookupError:
            return None


def places_of(table: Any, names: Iterable[Any], owner: Any = None) -> Iterator[Setting]:
    """The settings of these names in a list, a mapping, or an object.

    Args:
        owner: the class of the table, if the table is made anew each time.
    """
    read, number = _reader(table), id(table if owner is None else owner)
    return (Setting((number, name), read, table, name) for name in [*names])


def _reader(table: Any) -> Callable[[Any, Any], Any]:
    if isinstance(table, (list, tuple)):
        return getitem
    if not isinstance(table, Mapping):
        return _attribute
    return next((get for get in _GETS if getattr(type(table), "get", None) is get), _get)


def _attribute(held: Any, name: str) -> Any:
    return getattr(held, name, None)


def _get(table: Any, name: Any) -> Any:
    return table.get(name)


_GETS = (dict.get, MappingProxyType.get)


def slots_of(held: Any) -> list[str]:
    """Names of an object's slots, except internal ones."""
    slots = [vars(base).get("__slots__", ()) for base in type(held).__mro__]
    names = [n for own in slots for n in ((own,) if isinstance(own, str) else own)]
    return [] if isinstance(held, Tensor) else [n for n in names if n[:1] != "_"]


def settings_of(kind: type) -> list[str]:
    """Names of a class's settings, and of its forward."""
    own = vars(kind).items()
    return [n for n, v in own if n == "forward" or not (callable(v) or n.startswith("__"))]


# -------------------------------------------------------------------------------------------------


_PLAIN = (
    bool, int, float, str, type(None), Enum, type, torch.dtype,
    FunctionType, BuiltinFunctionType, MethodType, partial,
)  # fmt: skip
_MOST = frozenset({bool, int, float, str, type(None)})
_DEEPEST = 3
_LONGEST = 64
"""Maximum depth and length of containers of settings; a longer one holds data."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_BATCHES = "max_batch_len"
"""An attribute that Opacus' recurrent cells write for every batch."""


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
    """Whether it is a number of NumPy's."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def is_counter(value: Any) -> bool:
    """Whether it is a number, which may differ in every step."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Whether it is a tensor with one whole number or boolean."""
    one = isinstance(value, Tensor) and value.numel() == 1
    return one and not (value.is_floating_point() or value.is_complex())


class Settings:
    """The settings of a model, and their containers.

    Objects are compared by identity. Only objects that may change internally are read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()
        self._snapshot = Snapshot(self._facts())

    def changed(self) -> list[Key]:
        """The settings that have changed since they were last read."""
        if self._snapshot.stands():
            return []
        found: list[Any] = self._snapshot.changed()
        if self._outline.isdisjoint(found):
            self._snapshot = Snapshot(self._facts())
            return found
        before = self._snapshot.values()
        self._find()
        self._snapshot = Snapshot(self._facts())
        # a new setting is in a container that has grown, or has replaced another one
        now: Any = self._snapshot.values().items()
        came = [key for key in found if key not in before]
        return came + [key for key, value in now if key in before and before[key] != value]

    def state(self) -> tuple[Any, ...]:
        """The values that may recur: no numbers, no identities and versions of tensors, but which
        tensors are trained."""
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
        """Containers of settings, which would hold more of them if they grew."""
        self._held: list[Setting] = []
        """The settings that hold these containers."""
        self._plain: list[Setting] = []
        self._tensors: list[Setting] = []
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

    def _of_value(self, place: Setting, value: Any, depth: int) -> None:
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
        """Whether its attributes are no settings: it is private or callable, and from another package
        than the module (a trainer)."""
        apart = callable(value) or str(name).startswith("_")
        return apart and type(value).__module__ != self._home


def _standing(places: Iterable[Setting], of: Callable[[Any], Any]) -> Iterator[Facts]:
    """The values of these settings, in a column for each kind of table."""
    columns: dict[Any, list[Setting]] = {}
    for place in places:
        columns.setdefault(place.read, []).append(place)
    for read, found in columns.items():
        keys, _, tables, names = zip(*found, strict=True)
        yield Facts(keys, partial(map, read, tables, names), of)


def _inside(objects: list[tuple[Key, Any]], read: Callable[[Any], Any]) -> Facts:
    """The content of objects, which may change while the objects stay the same."""
    return Facts([key for key, _ in objects], partial(map, read, [x for _, x in objects]))


_REQUIRES_GRAD = attrgetter("requires_grad")
_VALUES = methodcaller("values")


def _changes(value: Any) -> bool:
    """Whether a setting's content may change while it is the same object, and it is no set."""
    return type(value) not in _MOST and not _is_set(value) and kind(value) is not value


def _is_trained(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _which(x: Any) -> int | None:
    """The identity of a tensor; None for a trained one that is no parameter, as it is made anew."""
    return None if _is_trained(x) and not isinstance(x, nn.Parameter) else id(x)


def _version(x: Tensor) -> int:
    """A number that changes when a buffer or a frozen parameter does, except through `.data`."""
    return 0 if x.is_inference() else x._version


def _tables_of_hooks(model: nn.Module) -> list[dict[int, Any]]:
    """The tables of torch's hooks of a model's modules, and of all modules: any may couple samples."""
    own = [vars(m)[kind] for m in model.modules() for kind in _HOOKS if kind in vars(m)]
    return [*own, *hooks_of_all_modules()]


# -------------------------------------------------------------------------------------------------
# When a model must be traced again: a step reads only settings.
#
# What a probe found holds for the state of the model, and for the kind of call. A flag that is set
# later, or passed as an argument, may turn on a branch that couples samples. So a call's arguments and
# the model's settings are compared with those of the last dry run.


_PATIENCE = 16
"""Number of changes of one setting that are traced. After that, only calls 16, 32, 64 and so on are,
because counters always change."""
_MOST_STATES = 64
"""Number of different states that are traced, however often their settings change."""


@dataclass(frozen=True)
class Look:
    """A call with a dry run: its name, the forward passes of a few samples, and their seconds."""

    name: str
    passes: int
    seconds: float

    def __str__(self) -> str:
        return f"traced {self.name}: {self.passes} forward passes of a few samples, {self.seconds:.2f} s"


class Watch:
    """The state of a model in the last dry run, and the kind of call.

    Settings show what has changed since the last call. This class decides whether a dry run follows.

    Args:
        model: the model to watch. args, kwargs: of the call with the dry run. read: flattens them.
        axis: of the samples in them.
    """

    def __init__(
        self, model: nn.Module, args: tuple, kwargs: dict,
        read: Callable[[tuple, dict], Reading], axis: int,
    ) -> None:  # fmt: skip
        self._settings, self._read, self._axis = Settings(model), read, axis
        self._ways: list[Way] = []
        """The kinds of calls so far."""
        self._given: list[list[Any]] = []
        """The arguments of the last call of each kind."""
        self._waiting: list[dict[Key, None]] = []
        """The settings that have changed since then, in calls of other kinds."""
        given = self._read(args, kwargs)
        way, _ = self._way(given)
        self._seen = [self._flags(way)]
        self._moves: dict[Key, int] = {}
        self._lengths = {self._long(way, given.leaves)}
        self._calls = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy makes its own dry runs."""
        return type(None), ()

    def changed(self, args: tuple, kwargs: dict) -> bool:
        """Whether this call has a state without a dry run; to be asked once per call."""
        self._calls += 1
        given = self._read(args, kwargs)
        way, moved = self._way(given)
        settings = dict.fromkeys(self._settings.changed())
        for key in (*moved, *settings):
            self._moves[key] = self._moves.get(key, 0) + 1
        for waiting in self._waiting if settings else ():
            waiting |= settings
        moved += self._waiting[way]
        self._waiting[way] = {}
        long = self._long(way, given.leaves)
        if long not in self._lengths and len(self._lengths) < _MOST_STATES:
            self._lengths.add(long)
            return True
        if not moved:
            return False
        flags = self._flags(way)
        if flags not in self._seen and len(self._seen) < _MOST_STATES:
            self._seen.append(flags)
            return True
        return self.rarely() or any(self._moves[key] <= _PATIENCE for key in moved)

    def rarely(self) -> bool:
        """Whether the number of calls is a power of two."""
        return not self._calls & (self._calls - 1)

    def _way(self, call: Reading) -> tuple[int, list[Key]]:
        """The number of this kind of call, and the arguments that have changed."""
        given, arguments = [_shown(leaf) for leaf in call.leaves], call.way
        if arguments not in self._ways:
            self._ways.append(arguments)
            self._given.append(given)
            self._waiting.append({})
            return len(self._ways) - 1, [("way", len(self._ways) - 1)]
        way = self._ways.index(arguments)
        before, self._given[way] = self._given[way], given
        if before == given:
            return way, []
        pairs = enumerate(zip(before, given, strict=True))
        return way, [("way", way, number) for number, (old, new) in pairs if old != new]

    def _long(self, way: int, leaves: list[Any]) -> tuple[int, ...]:
        """The lengths of samples, to a factor of two, because a longer one may take another path."""
        sizes = (size for x in leaves for size in _sizes(x, self._axis))
        return way, *((size - 1).bit_length() for size in sizes)

    def _flags(self, way: int) -> tuple[Any, ...]:
        given = (value for value in self._given[way] if not is_counter(value))
        return way, *self._settings.state(), *given


def _sizes(leaf: Any, axis: int) -> tuple[int, ...]:
    """The sizes of one sample, if samples lie along this axis, or else along the first."""
    if isinstance(leaf, PackedSequence):
        return (len(leaf.batch_sizes),)
    if not is_dense(leaf):
        return ()
    return tuple(
        leaf.shape[:axis] + leaf.shape[axis + 1 :] if leaf.dim() > axis else leaf.shape[1:]
    )


def _shown(leaf: Any) -> Any:
    """The part of an argument that code may branch on without reading the numbers of a batch."""
    if isinstance(leaf, Tensor):
        one = type(leaf) is Tensor and not leaf.dim() and leaf.device.type == "cpu"
        flag = leaf.item() if one and is_flag(leaf) else None
        return (leaf.dim(), leaf.dtype, is_dense(leaf), flag)
    return kind(leaf)
