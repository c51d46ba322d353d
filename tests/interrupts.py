"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class CtrlC:
    """Inside the block KeyboardInterrupt is raised at the n-th line of these files, from 1.

    The entry of a function counts as one, too: Python looks for signals there.

    Args:
        line: n. place: parts of the names of the files.
    """

    def __init__(self, line: int, *place: str) -> None:
        self._left, self._place = line, place
        self.raised = False

    def __enter__(self) -> CtrlC:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        if not any(part in frame.f_code.co_filename for part in self._place):
            return None
        self._count()
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable:
        if event == "line":
            self._count()
        return self._line

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            sys.settrace(None)
            self.raised = True
            raise KeyboardInterrupt


def at_every_line(*place: str) -> Iterator[CtrlC]:
    """Of one call each, until there is no further line."""
    line = 0
    while True:
        line += 1
        block = CtrlC(line, *place)
        yield block
        if not block.raised:
            assert line > 1, "nothing of these files was run"
            return
