"""Whether a loop uses the batches that it is handed out one for one, or may use some of them again."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from fastclip.errors import say


class Pace:
    """That of one private model without Poisson sampling, where a pass over the data costs one step.

    Which of the batches that are out a step has used cannot be told. A plain loop and a prefetcher use
    each once: they are handed out another for every step, until a prefetcher uses what it is ahead by.
    A step beyond that may be on a batch that another step of the pass was on.
    """

    def __init__(self) -> None:
        self.ahead = inf
        """Fewest batches of this pass that were out beyond those being used."""
        self._steady = 0
        """Steps of this pass that went with a batch of their own, while more were to come."""
        self._behind = 0
        """Steps without one, less the batches that came later."""
        self._new: int | None = None
        """Batches handed out since the last step; None: none that was out has been used since."""
        self._newest: Any = None
        """Batch that was out when one was used last."""
        self._more = False
        """More were to come then."""
        self._said = False

    def begin(self) -> None:
        """Another pass begins."""
        self.ahead, self._steady = inf, 0

    def see(self, ahead: int) -> None:
        """So many are out beyond those that are being used."""
        self.ahead = min(self.ahead, max(ahead, 0))

    def use(self, out: Sequence[Any], *, more: bool) -> None:
        """One of the batches that are out, in order, is used; `more` of this pass are to come."""
        known = out.index(self._newest) + 1 if self._newest in out else 0
        self._new = (self._new or 0) + len(out) - known
        self._newest, self._more = out[-1], more
        if more:
            self.see(len(out) - 1)

    def step(self) -> bool:
        """A step is released; whether it is on batches that no other step of the pass was on."""
        new, self._new = self._new, None
        if new is None:
            return True  # whoever knows no batch counts for itself
        self._behind = max(0, self._behind + 1 - new)
        if new:
            self._steady += self._more
            return True
        if not self._more and self._behind <= min(self.ahead, self._steady):
            return True
        self._behind -= 1
        if not self._said:
            self._said = True
            say(
                "steps are taken on batches that were kept, and it cannot be told on which: each "
                "of these is accounted at a sampling rate of 1, as if the others had its rows, too; "
                "iterate over the data loader that make_private returned in every pass, and use each "
                "batch as it comes"
            )
        return False
