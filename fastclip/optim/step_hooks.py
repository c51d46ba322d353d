"""Hooks of a real step: the accountant's comes first, before any noise is drawn, and stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opacus.optimizers import DPOptimizer

from fastclip.accounting.segments import saved_entries
from fastclip.parallel.digest import number_of
from fastclip.parallel.ranks import Ranks

Hook = Callable[[DPOptimizer], None]

_LEDGER = (
    "a digest of the ledger (load the same checkpoint on every rank, and begin each pass over the "
    "loader on all of them)"
)


class KeepsAccount:
    """An optimizer of which no real step goes unrecorded.

    Opacus keeps one hook, the accountant's, which `attach_step_hook` and `step_hook = fn` replace.
    """

    _account: Hook | None = None
    _ranks: Ranks | None = None
    """Of Opacus' modes; see `trained_by`."""
    _in_hooks = False
    releasing = False
    """step() is about to record what it releases; False where `add_noise` is called by hand."""
    _step_hooks: list[Hook]
    noise_source: Any

    def account_with(self, fn: Hook) -> None:
        """Record every real step with `fn`; make_private calls this, in the place of earlier hooks."""
        self._account, self._step_hooks = fn, []
        self.noise_source.account = self._gathered.account = fn
        if self.trained_by is not None:
            self.trained_by.followed[_LEDGER] = partial(_told, fn)

    @property
    def trained_by(self) -> Ranks | None:
        """The ranks that take each step together; None in one process."""
        keeper = getattr(self, "keeper", None)
        return self._ranks if keeper is None else keeper.clipping.ranks

    @property
    def _gathered(self) -> Any:
        """The logical batch whose sums are released."""
        holder: Any = getattr(self, "keeper", self)
        return holder.batch

    @property
    def last_step_was_real(self) -> bool:
        """The last `step()` released a noisy step.

        False if it only accumulated (physical batches, `signal_skip_step`) or raised an error before
        its release, and before the first one.
        """
        return bool(self._gathered.last_was_real)

    @property
    def real_steps(self) -> int:
        """Noisy steps that were released since make_private; an accumulation is none."""
        return int(self._gathered.real_steps)

    @property
    def account(self) -> Any:
        """What records the steps, and how their rows are drawn; None before make_private."""
        return self._account

    @property
    def ledger(self) -> Any:
        """The accountant that records the steps; None before make_private."""
        return getattr(self._account, "ledger", None)

    def attach_step_hook(self, fn: Hook) -> None:
        """Call `fn(self)` in every real step, before the inner step, after the hooks attached before.

        Unlike Opacus' this never replaces the accountant's hook.
        """
        self._step_hooks.append(fn)

    @property
    def step_hook(self) -> Hook | None:
        """All hooks of now in one call, as Opacus keeps its only one; None if there is none.

        Setting it replaces all but the accountant's, which also comes first where the new hook calls
        what was read here; it records a step once.
        """
        hooks = tuple(self._step_hooks)
        return partial(self._call_hooks, hooks) if hooks or self._account else None

    @step_hook.setter
    def step_hook(self, fn: Hook | None) -> None:
        self._step_hooks = [] if fn is None else [fn]

    def _record(self) -> None:
        """One release, before its noise is drawn: there is nothing to take back where this fails."""
        try:
            if self._account is not None:
                self._account(self)  # type: ignore[arg-type]
        finally:
            self.releasing = False

    def _run_hooks(self) -> None:
        """Of one real step, which is recorded: by several ranks here, when all have exchanged."""
        if self.releasing:
            self._record()
        self._in_hooks = True
        try:
            for hook in tuple(self._step_hooks):
                hook(self)  # type: ignore[arg-type]
        finally:
            self._in_hooks = False

    def _call_hooks(self, hooks: tuple[Hook, ...], optimizer: DPOptimizer) -> None:
        outermost, self._in_hooks = not self._in_hooks, True
        try:
            if outermost and self._account is not None:
                self._account(optimizer)
            for hook in hooks:
                hook(optimizer)
        finally:
            self._in_hooks = not outermost


def _told(account: Any) -> float:
    """Of what records the steps: a number that is the same where as much is recorded."""
    ledger = getattr(account, "ledger", None)
    return 0.0 if ledger is None else number_of(saved_entries(ledger.history))
