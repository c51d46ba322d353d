"""The time that is left for a run and for its parts."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """A moment `seconds` from now.

    Args:
        seconds: until then. clock: the present in seconds; tests give one that they turn.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds left, 0 after the deadline."""
        return max(self._end - self.clock(), 0.0)

    def part(self, share: float) -> Deadline:
        """The deadline after `share` of the time that is left now."""
        return Deadline(self.left() * share, self.clock)

    def within(self, seconds: float) -> Deadline:
        """The deadline in `seconds`, or this one if it is earlier."""
        return Deadline(min(self.left(), seconds), self.clock)
