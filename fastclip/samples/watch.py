"""When a model must be looked at again: nothing is read at a step but settings.

What a probe found holds for the state in which the model was, and for the way in which it was called:
a flag that is raised later, or passed as an argument, may switch on a branch that couples rows. So a
call's arguments and the model's settings (samples.settings) are compared with those of the last look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastclip.samples.inputs import Reading, Way, is_dense
from fastclip.samples.settings import Key, Settings, is_counter, is_flag, kind

_PATIENCE = 16
"""Changes of one setting that are looked at; then only every doubling of the calls is one: counters
never rest."""
_MOST_STATES = 64
"""Different states that are looked at however often their settings change."""


@dataclass(frozen=True)
class Look:
    """A call that was looked at: what it was, forward passes of a few rows, seconds they took."""

    name: str
    passes: int
    seconds: float

    def __str__(self) -> str:
        return f"looked at {self.name}: {self.passes} forward passes of a few rows, {self.seconds:.2f} s"


class Watch:
    """The state in which a model was looked at, and how it was called.

    Settings say what has changed since the last call; here it is decided whether that is looked at.

    Args:
        model: what is watched. args, kwargs: of the call that was looked at. read: flattens them.
        axis: of the samples in them.
    """

    def __init__(
        self, model: nn.Module, args: tuple, kwargs: dict,
        read: Callable[[tuple, dict], Reading], axis: int,
    ) -> None:  # fmt: skip
        self._settings, self._read, self._axis = Settings(model), read, axis
        self._ways: list[Way] = []
        """The ways of calling it that were met."""
        self._given: list[list[Any]] = []
        """What stood in them at the last call of each."""
        self._waiting: list[dict[Key, None]] = []
        """The settings that have changed since then, in calls of other ways."""
        given = self._read(args, kwargs)
        way, _ = self._way(given)
        self._seen = [self._flags(way)]
        self._moves: dict[Key, int] = {}
        self._lengths = {self._long(way, given.leaves)}
        self._calls = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy looks for itself."""
        return type(None), ()

    def changed(self, args: tuple, kwargs: dict) -> bool:
        """Whether this call finds a state that was not looked at; to be asked once a call."""
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
        """True at every doubling of the calls."""
        return not self._calls & (self._calls - 1)

    def _way(self, call: Reading) -> tuple[int, list[Key]]:
        """The number of this way of calling it, and which of the arguments have changed."""
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
        """How long rows are, to a factor of two: a longer one may take another way."""
        sizes = (size for x in leaves for size in _sizes(x, self._axis))
        return way, *((size - 1).bit_length() for size in sizes)

    def _flags(self, way: int) -> tuple[Any, ...]:
        given = (value for value in self._given[way] if not is_counter(value))
        return way, *self._settings.state(), *given


def _sizes(leaf: Any, axis: int) -> tuple[int, ...]:
    """Of one row, as far as its samples lie along this axis, or the first where there is none."""
    if isinstance(leaf, PackedSequence):
        return (len(leaf.batch_sizes),)
    if not is_dense(leaf):
        return ()
    return tuple(
        leaf.shape[:axis] + leaf.shape[axis + 1 :] if leaf.dim() > axis else leaf.shape[1:]
    )


def _shown(leaf: Any) -> Any:
    """An argument, as far as code may branch on it without reading the numbers of a batch."""
    if isinstance(leaf, Tensor):
        one = type(leaf) is Tensor and not leaf.dim() and leaf.device.type == "cpu"
        flag = leaf.item() if one and is_flag(leaf) else None
        return (leaf.dim(), leaf.dtype, is_dense(leaf), flag)
    return kind(leaf)
