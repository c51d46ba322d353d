"""What the segments of a ledger are called (fastclip.accounting.segments)."""

from __future__ import annotations

from fastclip.accounting.segments import new_name
from fastclip.forks import this_process


class Names:
    """Those of one ledger, in one process.

    Ranks that take every step together record it under one name, so that it counts once: the first
    one's, and a number. Steps that one of them takes alone are under a name that nobody else gives, and
    add up. So are those of a fork.
    """

    def __init__(self) -> None:
        self._shared, self._given, self._alone = "", 0, False
        self.process = this_process()

    def share(self, name: str) -> None:
        """All ranks have been given this one, and nobody else."""
        self._shared, self._given, self._alone = name, 0, False
        self.process = this_process()

    def alone(self, alone: bool) -> bool:
        """Whether the next steps need another name: they are this process' own, or again all ranks'."""
        changed = bool(self._shared) and alone != self._alone
        self._alone = alone
        return changed

    def new(self) -> str:
        """That of the segment that begins."""
        process = this_process()
        if process != self.process:
            self._shared, self.process = "", process
        if not self._shared or self._alone:
            return new_name()
        self._given += 1
        return f"{self._shared}.{self._given}"
