"""Opacus' accountants that never forget: loading, copying and joining only ever add steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar, cast

from opacus.accountants import IAccountant

from fastclip.accounting.epsilon import check_constant_noise, holding, open_accountant
from fastclip.accounting.epsilon import spent as spent_epsilon
from fastclip.accounting.ledger_file import LineLog, NotWritten, WriteAheadLog
from fastclip.accounting.steps import (
    BY_OPACUS,
    DIGEST,
    LINES,
    SEGMENTS_KEY,
    Entry,
    Names,
    Protected,
    Segments,
    Spent,
    check_entries,
    check_not_truncated,
    digest,
    joined,
    protected_by,
    read_segments,
    remainder,
    runs,
    saved_entries,
    union,
)
from fastclip.accounting.steps import PROTECTED_KEY as PROTECTED
from fastclip.core.opacus_names import to_load
from fastclip.core.system import this_process
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.ops.noise import DrawnStates

# -------------------------------------------------------------------------------------------------
# What a ledger is asked beside its steps: its epsilon, as the engine states it, and its noise.


class Asked(IAccountant):
    """A part of `Ledger`."""

    kept_from: type[IAccountant]
    """The accountant's class before it became a ledger."""

    @property
    def drawn(self) -> DrawnStates:
        """From which states of generators the noise of its steps came, as far as this process knows."""
        found: DrawnStates = self.__dict__.setdefault("_drawn", DrawnStates())
        return found


def asks_of(kind: type[IAccountant]) -> dict[str, Any]:
    """`get_epsilon` of a class of accountants, with the guards of `engine.get_epsilon`."""

    @wraps(kind.get_epsilon)
    def get_epsilon(self: IAccountant, delta: float, *args: Any, **options: Any) -> float:
        names = list(inspect.signature(kind.get_epsilon).parameters)[2:]
        return spent_epsilon(self, delta, **dict(zip(names, args, strict=False)), **options)

    return {"get_epsilon": get_epsilon, "kept_from": kind, "__doc__": kind.__doc__}


# -------------------------------------------------------------------------------------------------
# A history that others read while steps are recorded: threads, and handlers of signals.


class OwnLock:
    """Of one process: a fork has one of its own, whichever thread of its parent held the other."""

    def __init__(self) -> None:
        self._of = this_process(), RLock()

    def now(self) -> Any:
        """The lock of this process, to be held in a `with`."""
        if self._of[0] != this_process():
            self._of = this_process(), RLock()
        return self._of[1]


_Method = TypeVar("_Method", bound=Callable[..., Any])


def undisturbed(method: _Method) -> _Method:
    """Other threads wait; a signal's handler in this one finds what was recorded so far."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock.now():
            return method(self, *args, **kwargs)

    return cast("_Method", alone)


def step_beside(book: IAccountant, above: type, *args: Any, **kwargs: Any) -> Callable[[], None]:
    """Take a step of the class after `above` beside the history; nothing of `book` changes.

    Opacus' accountants take the last entry away and put it back; a reader in between would miss it.

    Returns:
        What writes the step down, in one assignment.
    """
    kind: Any = type(book)
    opacus = _is_opacus(kind, above)
    last = max(len(book.history) - 1, 0) if opacus else 0  # theirs see the last entry only
    twin = holding(book, book.history[last:])
    recorded: Any = super(above, twin)  # type: ignore[arg-type]
    recorded.step(*args, **kwargs)

    def write_down() -> None:
        if not opacus:  # whatever else it keeps
            vars(book).update({**vars(twin), "history": book.history})
        book.history[last:] = twin.history

    return write_down


@cache
def _is_opacus(kind: type, above: type) -> bool:
    own = (base for base in kind.__mro__ if not issubclass(base, above) and "step" in vars(base))
    return next(own).__module__.startswith(("opacus.", "fastclip."))


# -------------------------------------------------------------------------------------------------


class Ledger(Asked):
    """What `keep_ledger` adds to an accountant: names of its steps (fastclip.accounting.steps).

    `history` stays Opacus' list and is what epsilon is computed from. It begins with the steps of
    other segments (loaded, joined, from before a copy); what follows them was recorded here. Who
    assigns `history` speaks for it: names that do not fit it any more are dropped, and what follows a
    history that was cleared or cut has a new one.
    """

    history: list[Entry]
    protected: Protected
    """Whom all these steps protect."""
    _others: Segments
    _name: str
    _log: WriteAheadLog | LineLog | NotWritten | None = None
    _recorded: list[Entry]
    """The history as it was left here: whoever has changed it since speaks for it."""
    _names: Names
    _lock: OwnLock
    cuts = 0
    """How often its history was found cleared, cut or assigned by hand; see `check_cuts`."""

    @undisturbed
    def step(self, *args: Any, **kwargs: Any) -> None:
        """As Opacus, but whole or not at all, for whoever reads it at any moment: it is taken beside.

        Raises:
            ArgumentError: for a truncated draw that this accountant does not know.
            StepError: its file (`write_ahead`) cannot be written; the step is not recorded.
        """
        check_not_truncated([(0.0, kwargs.get("sample_rate"), 1)], self.mechanism())
        if self._names.process != this_process():  # a fork: its parent goes on under the same name
            self._begin(self.segments())
        self.check_cuts()
        write_down = step_beside(self, Ledger, *args, **kwargs)
        if self._log is not None:
            taken = (kwargs["noise_multiplier"], kwargs["sample_rate"], 1)
            self._log.record(self._name, [taken], self.protected)
        write_down()
        last = max(len(self._recorded) - 1, 0)  # a step counts up the last entry, or adds one
        self._recorded[last:] = self.history[last:]

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Steps of one release are taken inside: on all ranks, and in the file of the first; or not.

        Raises:
            StepError: another rank could not record them.
        """
        if self._log is None or self._log.ranks is None:
            yield
            return
        before = list(self.history)
        try:
            with self._log.ranks.all_or_none():
                yield
        except BaseException:
            self.history, self._recorded = before, list(before)
            raise

    @undisturbed
    def segments(self) -> Segments:
        """Every step under the name of the segment that recorded it."""
        history, others = runs(self.history), joined(self._others)
        own = remainder(history, others)
        if own is None:  # assigned by hand
            self._begin({})
            self.cuts += 1
            own = history
        elif remainder(history, recorded := runs(self._recorded)) is None:  # cut, or another story
            kept = own if remainder(recorded, history) is not None else []
            self._begin({**self._others, self._name: kept} if kept else self._others)
            self.cuts += 1
            own = [] if kept else own
        return {**self._others, self._name: own} if own else dict(self._others)

    @undisturbed
    def check_cuts(self) -> int:
        """`cuts`, once what somebody has put into the history is written to the file, too.

        Raises: StepError: it cannot be written.
        """
        if self.history != self._recorded:
            self._catch_up(self.segments(), self.protected)
            self._recorded = list(self.history)
        return self.cuts

    @undisturbed
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

    @undisturbed
    def count(self, log: WriteAheadLog) -> None:
        """Count what the file holds, and write what it lacks.

        Raises:
            ArgumentError: as `join`. StepError: it cannot be written.
        """
        self.join(*log.found())
        for name in log.lines:
            self.line(name).join(*log.found(name))
        log.begin()
        log.catch_up(self.segments(), self.protected)
        for name, line in self.lines.items():
            log.catch_up(line.segments(), line.protected, name)

    def keep_in(self, log: WriteAheadLog | LineLog | NotWritten | None) -> None:
        """Write every step to this file before it is released; the one before is closed."""
        if self._log is not None and self._log is not log:
            self._log.close()
        self._log = log
        for name, line in self.lines.items():
            line.keep_in(self._log_of(name))

    @property
    def lines(self) -> dict[str, Ledger]:
        """Ledgers of people who are not in the training set, each named after a data set.

        Nobody is in two of them, nor in one and the training set.
        """
        found: dict[str, Ledger] = self.__dict__.setdefault("_lines", {})
        return found

    @undisturbed
    def line(self, name: str) -> Ledger:
        """That of a data set; it is begun if it is not there.

        Its steps are Gaussian mechanisms on all of the data (q = 1), of which epsilon has a closed form.
        """
        if name not in self.lines:
            made = keep_ledger(open_accountant("prv"))
            made.keep_in(self._log_of(name))
            self.lines[name] = made
        return self.lines[name]

    def _log_of(self, line: str) -> LineLog | NotWritten | None:
        return (
            None if self._log is None or isinstance(self._log, LineLog) else self._log.of_line(line)
        )

    def check_no_file(self) -> None:
        """Raises: ArgumentError: this ledger is kept in a file."""
        if isinstance(self._log, WriteAheadLog) and self._log.held:
            raise ArgumentError(
                f"This ledger already writes to {self._log.path}, and that file would miss the steps of "
                "another one. Call engine.write_ahead(None) first.",
                doc="checkpoints",
            )

    def take_over(self, other: Ledger) -> None:
        """Count what another has recorded, and go on in its file.

        Raises:
            ArgumentError: as `join`; or both are kept in files. StepError: it cannot be written.
        """
        if other.log is not None and other.log is not self._log:
            self.check_no_file()
        self.join(other.segments(), other.protected)
        self.cuts = max(self.cuts, other.cuts)
        for name, theirs in other.lines.items():
            self.line(name).join(theirs.segments(), theirs.protected)
        if other.log is not None and other.log is not self._log:
            other._catch_up(self.segments(), self.protected)
            self.keep_in(other.log)
            for line in self.lines.values():
                line._catch_up(line.segments(), line.protected)

    @property
    def log(self) -> WriteAheadLog | LineLog | NotWritten | None:
        """The file that every step is written to first."""
        return self._log

    @undisturbed
    def state_dict(self, destination: Any = None) -> Any:
        """As Opacus, in plain values, with the names of the steps and a digest of all of it.

        Raises:
            ArgumentError: the history holds steps that no run has, which could not be loaded.
        """
        try:
            check_entries(self.history)
        except ValueError as error:
            raise ArgumentError(
                f"The accountant's history cannot be saved ({error}). Correct the history that was "
                "assigned to it.",
                doc="checkpoints",
            ) from None
        state = super().state_dict(destination)
        state.update(history=saved_entries(self.history), mechanism=self.mechanism())
        state[SEGMENTS_KEY] = {name: saved_entries(part) for name, part in self.segments().items()}
        state[PROTECTED] = self.protected.saved()
        if self.lines:
            state[LINES] = {name: line.state_dict() for name, line in self.lines.items()}
        state[DIGEST] = digest(state)
        return state

    @undisturbed
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, without forgetting what was recorded here.

        A checkpoint of the same run adds what is not known yet; steps of another run, of a fork of
        this one, or without names (plain Opacus) are added whole.

        Raises:
            ArgumentError: for a damaged state, that of another mechanism, a union that this accountant
                cannot compose, or steps that protect another unit; it is then as it was.
        """
        loaded = read_segments(state_dict, self.mechanism(), "The accountant's state")
        merged = self._with(loaded)
        whom = self.protected.beside(protected_by(state_dict, joined(loaded)))
        lines = lines_of(state_dict)
        for name in lines.keys() & self.lines.keys():  # all that may be refused is refused first
            self.lines[name].protected.beside(lines[name].protected)
        self._catch_up(merged, whom)
        before = self.history
        try:  # whatever else an accountant of the user's own keeps
            super().load_state_dict(to_load(self, {**state_dict, "history": joined(merged)}))
        except BaseException:
            self.history = before
            raise
        self.protected = whom
        self._begin(merged)
        for name, spent in lines.items():
            self.line(name).join(*spent)

    def _catch_up(self, segments: Segments, whom: Protected) -> None:
        if self._log is not None and self._log.held:
            self._log.catch_up(segments, whom)

    def _with(self, others: Segments) -> Segments:
        merged = union(self.segments(), others)
        check_not_truncated(joined(merged), self.mechanism())
        if self.mechanism() == "gdp":
            check_constant_noise(joined(merged))
        return merged

    def _begin(self, others: Segments) -> None:
        """What is recorded from now on has a name of its own."""
        self._others, self._name = others, self._names.new()
        self._recorded = list(self.history)

    @undisturbed
    def share_names(self, name: str) -> None:
        """Ranks that take every step together record it under one name: it counts once.

        Args:
            name: that all of them have been given, and nobody else.
        """
        self._names.share(name)
        self._begin(self.segments())

    @undisturbed
    def taken_by(self, *, ranks: bool) -> None:
        """Who takes the next step: all ranks, or this process on a model of its own."""
        if self._names.alone(not ranks):
            self._begin(self.segments())

    @undisturbed
    def __reduce__(self) -> Any:
        """A copy, in this process or another, is a fork: its steps are not those of the original."""
        state = {
            **self.__dict__,
            "history": list(self.history),
            "_others": self.segments(),
            "_names": Names(),
            "_lines": dict(self.lines),
            "_log": None if self._log is None else self._log.copied(),
        }
        del state["_lock"]
        return _restored, (self.kept_from, state)


def keep_ledger(accountant: IAccountant) -> Ledger:
    """The accountant itself, which from now on keeps the names of its steps."""
    if isinstance(accountant, Ledger):
        return accountant
    of: Any = accountant  # mypy knows no class that changes at run time
    of.__class__ = _kept(of.__class__)
    ledger = cast("Ledger", accountant)
    ledger._lock = OwnLock()
    ledger.protected = BY_OPACUS if ledger.history else Protected()
    ledger._names = Names()
    ledger._begin({})
    return ledger


def succeeding(accountant: object, before: Ledger | None) -> Ledger:
    """A ledger of this accountant, if it is one, that goes on from another one (`Ledger.take_over`)."""
    if not isinstance(accountant, IAccountant):
        raise ArgumentTypeError(
            f"accountant expects an accountant of Opacus, got {type(accountant).__name__}. Create one "
            "with opacus.accountants.create_accountant."
        )
    ledger = keep_ledger(accountant)
    if before is not None and before is not ledger:
        ledger.take_over(before)
        ledger.drawn.join(before.drawn)
    return ledger


def lines_of(state: Mapping[str, Any]) -> dict[str, Spent]:
    """What a saved state says of other data sets.

    Raises:
        ArgumentError: it is damaged.
    """
    found = {}
    for name, line in (state.get(LINES) or {}).items():
        segments = read_segments(line, "prv", f"The accountant's state of the data set {name!r}")
        found[name] = Spent(segments, protected_by(line, joined(segments)))
    return found


@cache
def _kept(kind: type[IAccountant]) -> type[IAccountant]:
    return type(kind.__name__, (Ledger, kind), asks_of(kind))


def _restored(kind: type[IAccountant], state: dict[str, Any]) -> IAccountant:
    copy = object.__new__(_kept(kind))  # type: ignore[arg-type]
    copy.__dict__.update(state, _lock=OwnLock())
    copy._begin(state["_others"])  # type: ignore[attr-defined]
    return copy
