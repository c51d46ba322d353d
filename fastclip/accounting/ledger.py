"""Opacus' accountants that never forget: loading, copying and joining only ever add steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from opacus.accountants import IAccountant

from fastclip.accounting.history import refuse_changing_noise
from fastclip.accounting.protected import BY_OPACUS, Protected, protected_by
from fastclip.accounting.protected import KEY as PROTECTED
from fastclip.accounting.segments import (
    DIGEST,
    KEY,
    Entry,
    Segments,
    digest,
    joined,
    new_name,
    read_segments,
    remainder,
    runs,
    saved_entries,
    union,
)
from fastclip.accounting.truncation import refuse_truncated
from fastclip.accounting.write_ahead import WriteAheadLog

_forks = 0
"""Of this process since its first ancestor that imported this: a child may get any number as its pid."""


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Ledger(IAccountant):
    """What `keep_ledger` adds to an accountant: names of its steps (fastclip.accounting.segments).

    `history` stays Opacus' list and is what epsilon is computed from. It begins with the steps of
    other segments (loaded, joined, from before a copy); what follows them was recorded here. Who
    assigns `history` speaks for it: names that do not fit it any more are dropped.
    """

    history: list[Entry]
    protected: Protected
    """Whom all these steps protect."""
    _others: Segments
    _name: str
    _process: tuple[int, int] = (0, 0)
    _log: WriteAheadLog | None = None
    _shared: list[str]
    """The names that all ranks of a training give to their segments, the first one of the training."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As Opacus; a history that it leaves half written by an error is put back.

        Raises:
            ArgumentError: for a truncated draw that this accountant does not know.
            StepError: its file (`write_ahead`) cannot be written; the step is not recorded.
        """
        refuse_truncated([(0.0, kwargs.get("sample_rate"), 1)], self.mechanism())
        if self._process != (os.getpid(), _forks):  # a fork: its parent goes on under the same name
            self._begin(self.segments())
        history, size = self.history, len(self.history)
        last = history[-1:]  # a step counts up the last entry, or adds one
        try:
            super().step(*args, **kwargs)  # type: ignore[safe-super]
            if self._log is not None:
                taken = (kwargs["noise_multiplier"], kwargs["sample_rate"], 1)
                self._log.record(self._name, [taken], self.protected)
        except BaseException:
            history[max(size - 1, 0) :] = last
            self.history = history
            raise

    def segments(self) -> Segments:
        """Every step under the name of the segment that recorded it."""
        history = runs(self.history)
        own = remainder(history, joined(self._others))
        if own is None:  # assigned by hand
            self._begin({})
            own = history
        return {**self._others, self._name: own} if own else dict(self._others)

    def join(self, others: Segments, protected: Protected) -> None:
        """Count these, too; what is known already counts once.

        Args:
            protected: whom they protect.

        Raises:
            ArgumentError: if this accountant cannot compose them, or they protect another unit; it is
                then as it was.
        """
        merged, whom = self._with(others), self.protected.beside(protected)
        self._catch_up(merged, whom)
        self.history, self.protected = joined(merged), whom
        self._begin(merged)

    def write_ahead(self, log: WriteAheadLog) -> None:
        """Count what the file holds, and write every step to it before it is released.

        Raises:
            ArgumentError: as `join`. StepError: it cannot be written.
        """
        self.join(*log.found())
        log.catch_up(self.segments(), self.protected)
        self._log = log

    @property
    def log(self) -> WriteAheadLog | None:
        """The file that every step is written to first."""
        return self._log

    def state_dict(self, destination: Any = None) -> Any:
        """As Opacus, in plain values, with the names of the steps and a digest of all of it."""
        state = super().state_dict(destination)
        state["history"] = saved_entries(self.history)
        state[KEY] = {name: saved_entries(part) for name, part in self.segments().items()}
        state[PROTECTED] = self.protected.saved()
        state[DIGEST] = digest(state)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, without forgetting what was recorded here.

        A checkpoint of the same run adds what is not known yet; steps of another run, of a fork of
        this one, or without names (plain Opacus) are added whole.

        Raises:
            ArgumentError: for a damaged state, that of another mechanism, a union that this accountant
                cannot compose, or steps that protect another unit; it is then as it was.
        """
        loaded = read_segments(state_dict, self.mechanism(), "the accountant's state")
        merged = self._with(loaded)
        whom = self.protected.beside(protected_by(state_dict, joined(loaded)))
        self._catch_up(merged, whom)
        before = self.history
        try:  # whatever else an accountant of the user's own keeps
            super().load_state_dict({**state_dict, "history": joined(merged)})
        except BaseException:
            self.history = before
            raise
        self.protected = whom
        self._begin(merged)

    def _catch_up(self, segments: Segments, whom: Protected) -> None:
        if self._log is not None:
            self._log.catch_up(segments, whom)

    def _with(self, others: Segments) -> Segments:
        merged = union(self.segments(), others)
        refuse_truncated(joined(merged), self.mechanism())
        if self.mechanism() == "gdp":
            refuse_changing_noise(joined(merged))
        return merged

    def _begin(self, others: Segments) -> None:
        """What is recorded from now on has a name of its own."""
        process = (os.getpid(), _forks)
        if self._shared and self._process == process:
            self._shared.append(f"{self._shared[0]}.{len(self._shared)}")
            name = self._shared[-1]
        else:
            self._shared, name = [], new_name()
        self._others, self._name, self._process = others, name, process

    def share_names(self, name: str) -> None:
        """Ranks that take every step together record it under one name: it counts once.

        Args:
            name: that all of them have been given, and nobody else.
        """
        self._process, self._shared = (os.getpid(), _forks), [name]
        self._begin(self.segments())

    def __reduce__(self) -> Any:
        """A copy, in this process or another, is a fork: its steps are not those of the original."""
        kind = next(base for base in type(self).__mro__ if not issubclass(base, Ledger))
        state = {
            **self.__dict__,
            "history": list(self.history),
            "_others": self.segments(),
            "_shared": [],
            "_log": None,
        }
        return _restored, (kind, state)


def keep_ledger(accountant: IAccountant) -> Ledger:
    """The accountant itself, which from now on keeps the names of its steps."""
    if isinstance(accountant, Ledger):
        return accountant
    of: Any = accountant  # mypy knows no class that changes at run time
    of.__class__ = _kept(of.__class__)
    ledger = cast("Ledger", accountant)
    ledger.protected = BY_OPACUS if ledger.history else Protected()
    ledger._shared = []
    ledger._begin({})
    return ledger


@cache
def _kept(kind: type[IAccountant]) -> type[IAccountant]:
    return type(kind.__name__, (Ledger, kind), {"__doc__": kind.__doc__})


def _restored(kind: type[IAccountant], state: dict[str, Any]) -> IAccountant:
    copy = object.__new__(_kept(kind))  # type: ignore[arg-type]
    copy.__dict__.update(state)
    copy._begin(state["_others"])  # type: ignore[attr-defined]
    return copy
