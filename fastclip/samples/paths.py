"""Ways through torch's operators: a call that goes one that was never looked at is noticed as it ends.

What is known of a call holds for what it computed then. A counter, a closure or a number may let a later
call compute something else, of which neither its inputs nor the model's settings say anything. So each
call is followed: which operators it calls, which earlier results each of them is given, and with which
axes, sizes and small integer constants (csrc/path). Other numbers leave samples where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastclip._torch import current_task, in_compiled_call, is_profiled, transformed
from fastclip.compiled import of_this_torch
from fastclip.trace.tracer import ASIDE

_path: Any
try:
    _path = of_this_torch("_path", "path")
except ImportError as error:  # inputs and settings decide alone
    FOLLOWS, WHY_NOT = False, str(error)
else:
    FOLLOWS, WHY_NOT = True, ""
    ASIDE.append(_path.pause)

_EVERY, _FEW = 8, 2
"""So many ways of one method are looked at as they come, and so many that may follow from sizes; after
that, each whose number is a power of 2."""
_KEPT = 1024
"""Of a program that changes in every call no more are kept: each holds its sizes."""


def can_follow(*, eager: bool = False) -> bool:
    """Whether operators can be followed here: not in compiled and captured code, in transforms, in
    backward passes and under torch's profiler.

    Args:
        eager: what is called runs as it is, though inside compiled code.
    """
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    elsewhere = captured or current_task() != -1 or transformed() or is_profiled()
    return FOLLOWS and not elsewhere and (eager or not in_compiled_call())


def begin(inputs: list[Tensor], *, eager: bool = False) -> Any:
    """Follow the operators that this thread calls from now on, in a call with these inputs.

    Args:
        eager: it runs as it is, though inside compiled code.

    Returns:
        What has a method `stop`, which returns the path; None where operators cannot be followed.
    """
    if not can_follow(eager=eager):
        return None
    recording = _path.Recording()
    recording.start(inputs)
    return recording


class Paths:
    """Those that calls of one method have gone."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Any, list[int]]]] = {}
        self._sizes: set[tuple[int, ...]] = set()
        """Of the inputs of all calls that have gone them."""
        self._of_all_sizes = False
        """One way was gone by calls of unlike sizes, so another size is no reason for another way."""
        self.unseen = 0
        """Calls that went another way than any before."""
        self._by_size = 0
        """Those of them that may have done so for their sizes, as a loop over samples does."""

    def knows(self, path: Any, sizes: list[int]) -> bool:
        """Whether a call has gone this way: the same operators on the same results.

        Sizes among their arguments may be others if they follow from those of the inputs.

        Args:
            sizes: of all inputs of the call.
        """
        known = self._known.get(path.hash, [])
        if any(path.follows(other, [], []) for other, _ in known):
            return True
        found = any(path.follows(other, sizes, others) for other, others in known)
        self._of_all_sizes |= found
        return found

    def note(self, path: Any, sizes: list[int], *, known: bool) -> None:
        """A call has gone this way, of which `knows` has said whether it is known."""
        self._sizes.add(tuple(sizes))
        if not known and len(self._known) < _KEPT:
            self._known.setdefault(path.hash, []).append((path, sizes))

    def next_due(self, sizes: list[int], *, turns: bool) -> bool:
        """Count a way that is not known; whether it is to be looked at. Of a program that changes in
        every call not all are.

        Args:
            turns: samples were proven to take turns, as in a loop, which is longer for more of them.
        """
        self.unseen += 1
        number, most = self.unseen, _EVERY
        if not self._of_all_sizes and tuple(sizes) not in self._sizes:
            if turns:
                return False
            self._by_size += 1
            number, most = self._by_size, _FEW
        return number <= most or not number & (number - 1)
