"""Engines that are broken on purpose, so that the faults have something to find.

A defect is planted for the rest of the process.
"""

from __future__ import annotations

from typing import Any

from fastclip.accounting import checkpoint
from fastclip.backward.logical_batch import State
from fastclip.backward.state import GradientState
from fastclip.engine.optimizer import FastDPOptimizer


def ledger_after_the_step() -> None:
    """The ledger is written when the weights have moved, as if its order did not matter."""
    step = FastDPOptimizer.step

    def late(self: Any, closure: Any = None) -> Any:
        account, self.batch.account = self.batch.account, None
        try:
            done = step(self, closure)
        finally:
            self.batch.account = account
        if not self._is_last_step_skipped:
            account(self)
        return done

    FastDPOptimizer.step = late  # type: ignore[method-assign]


def sums_are_kept() -> None:
    """What a backward pass has summed before it failed stays for the next one."""
    clear = GradientState._clear

    def forgetful(self: Any) -> None:
        if self.batch._state is not State.EMPTY:
            clear(self)

    GradientState._clear = forgetful  # type: ignore[method-assign]


def no_checksum() -> None:
    """Checkpoints are loaded as torch.load loads them."""
    checkpoint._check_whole = lambda path, name: None


PLANTED = {
    "ledger-after-the-step": ledger_after_the_step,
    "sums-are-kept": sums_are_kept,
    "no-checksum": no_checksum,
}
