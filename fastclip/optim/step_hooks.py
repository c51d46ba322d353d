"""Hooks of a real step: the accountant's comes first, before any noise is drawn, and stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opacus.optimizers import DPOptimizer

from fastclip.accounting.segments import saved_entries
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.parallel.digest import number_of
from fastclip.parallel.ranks import Ranks

Hook = Callable[[DPOptimizer], None]

_LEDGER = (
    "a digest of the ledger (load the same checkpoint on every rank, and begin each pass over the "
    "loader on all of them)"
)


class StepHooks:
    """The hooks of one optimizer, of which no real step goes unrecorded.

    Opacus keeps one hook, the accountant's, which `attach_step_hook` and `step_hook = fn` replace.

    Args:
        batch: whose sums are released; its `account` records that.
    """

    def __init__(self, batch: LogicalBatch) -> None:
        self._batch = batch
        self.listed: list[Hook] = []
        """After the accountant's."""
        self.releasing = self._running = False

    @property
    def ledger(self) -> Any:
        """Of the accountant's hook."""
        return getattr(self._batch.account, "ledger", None)

    @property
    def in_one(self) -> Hook | None:
        """All hooks of now."""
        hooks = tuple(self.listed)
        return partial(self._call, hooks) if hooks or self._batch.account else None

    def record(self, optimizer: DPOptimizer) -> None:
        """One release, before its noise is drawn: there is nothing to take back where this fails."""
        try:
            if self._batch.account is not None:
                self._batch.account(optimizer)
        finally:
            self.releasing = False

    def run(self, optimizer: DPOptimizer) -> None:
        """Of one real step, which is recorded: by several ranks here, when all have exchanged."""
        if self.releasing:
            self.record(optimizer)
        self._running = True
        try:
            for hook in tuple(self.listed):
                hook(optimizer)
        finally:
            self._running = False

    def _call(self, hooks: tuple[Hook, ...], optimizer: DPOptimizer) -> None:
        outermost, self._running = not self._running, True
        try:
            if outermost and self._batch.account is not None:
                self._batch.account(optimizer)
            for hook in hooks:
                hook(optimizer)
        finally:
            self._running = not outermost


def account_with(optimizer: Any, record: Any, ranks: Ranks | None) -> None:
    """Record every real step, in the place of earlier hooks; `ranks` take each step together."""
    optimizer.step_hook = None
    optimizer.noise_source.account = optimizer.batch.account = record
    if ranks is not None:
        ranks.followed[_LEDGER] = partial(_told, record)


def _told(account: Any) -> float:
    """Of what records the steps: a number that is the same where as much is recorded."""
    ledger = getattr(account, "ledger", None)
    return 0.0 if ledger is None else number_of(saved_entries(ledger.history))
