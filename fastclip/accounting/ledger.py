"""Ledgers: Opacus' accountants to which loading, copying and joining only ever add steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Queries of a ledger in addition to its steps: the epsilon that the engine states, and its noise.


class Asked(IAccountant):
    """Base class of `Ledger` for its epsilon and its noise."""

    kept_from: type[IAccountant]
    """The accountant's class before it became a ledger."""

    @property
    def drawn(self) -> DrawnStates:
        """States of generators from which this process drew the noise of the recorded steps."""
        found: DrawnStates = self.__dict__.setdefault("_drawn", DrawnStates())
        return found


def asks_of(kind: type[IAccountant]) -> dict[str, Any]:
    """Return `get_epsilon` for a class of accountants, with the checks of `engine.get_epsilon`."""

    @wraps(kind.get_epsilon)
    def get_epsilon(self: IAccountant, delta: float, *args: Any, **options: Any) -> float:
        names = list(inspect.signature(kind.get_epsilon).parameters)[2:]
        return spent_epsilon(self, delta, **dict(zip(names, args, strict=False)), **options)

    return {"get_epsilon": get_epsilon, "kept_from": kind, "__doc__": kind.__doc__}


# -------------------------------------------------------------------------------------------------
# A history that threads and signal handlers may read while steps are recorded.


class OwnLock:
    """A lock of one process. A fork has its own, even if a thread of its parent held the other."""

    def __init__(self) -> None:
        self._of = this_process(), RLock()

    def now(self) -> Any:
        """Return the lock of this process, for a `with` statement."""
        if self._of[0] != this_process():
            self._of = this_process(), RLock()
        return self._of[1]


_Method = TypeVar("_Method", bound=Callable[..., Any])


def undisturbed(method: _Method) -> _Method:
    """Make other threads wait. A signal handler in this thread reads the steps recorded so far."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock.now():
            return method(self, *args, **kwargs)

    return cast("_Method", alone)


def step_in_copy(book: IAccountant, above: type, *args: Any, **kwargs: Any) -> Callable[[], None]:
    """Take a step of the class after `above` in a copy of the history, without changing `book`.

    Opacus' accountants remove the last entry and put it back, so a reader in between would miss it.

    Returns:
        A function that records the step, in one assignment.
    """
    kind: Any = type(book)
    opacus = _is_opacus(kind, above)
    last = max(len(book.history) - 1, 0) if opacus else 0  # Opacus' step reads the last entry only
    twin = holding(book, book.history[last:])
    recorded: Any = super(above, twin)  # type: ignore[arg-type]
    recorded.step(*args, **kwargs)

    def write_down() -> None:
        if not opacus:  # any other attributes that it keeps
            vars(book).update({**vars(twin), "history": book.history})
        book.history[last:] = twin.history

    return write_down


@cache
def _is_opacus(kind: type, above: type) -> bool:
    own = (base for base in kind.__mro__ if not issubclass(base, above) and "step" in vars(base))
    return next(own).__module__.startswith(("opacus.", "fastclip."))


# -------------------------------------------------------------------------------------------------


def number_of_steps(history: Sequence[Entry]) -> int:
    """Return the number of steps in a history."""
    return sum(steps for *_, steps in history)


class Ledger(Asked):
    """An accountant whose steps have names (fastclip.accounting.steps), made by `keep_ledger`.

    `history` is Opacus' list, from which epsilon is computed. It begins with the steps of other segments
    (loaded, joined, or from before a copy), and the steps recorded here follow. An assigned `history` is
    trusted. Names that no longer fit it are dropped, and steps after a history that was cleared or cut
    get a new name.
    """

    history: list[Entry]
    protected: Protected
    """The unit that all these steps protect."""
    _others: Segments
    _name: str
    _log: WriteAheadLog | LineLog | NotWritten | None = None
    _recorded: list[Entry]
    """The history after the last change made here. A later difference was assigned by hand."""
    _names: Names
    _lock: OwnLock
    total = 0
    """Number of steps in the history after the last change made here."""
    cuts = 0
    """How often the history was cleared, cut or assigned by hand (see `check_cuts`)."""

    @undisturbed
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Record a step, as in Opacus but atomically for concurrent readers.

        Raises:
            ArgumentError: for a truncated batch that this accountant does not support.
            StepError: its file (`write_ahead`) cannot be written. The step is not recorded.
        """
        check_not_truncated([(0.0, kwargs.get("sample_rate"), 1)], self.mechanism())
        if (
            self._names.process != this_process()
        ):  # a fork, whose parent continues under the same name
            self._begin(self.segments())
        self.check_cuts()
        write_down = step_in_copy(self, Ledger, *args, **kwargs)
        if self._log is not None:
            taken = (kwargs["noise_multiplier"], kwargs["sample_rate"], 1)
            self._log.record(self._name, [taken], self.protected)
        write_down()
        last = max(len(self._recorded) - 1, 0)  # a step increments the last entry, or adds one
        self.total += number_of_steps(self.history[last:]) - number_of_steps(self._recorded[last:])
        self._recorded[last:] = self.history[last:]

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Record the steps of one release on all ranks and in the first one's file, or nowhere.

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
            self.history = before
            self._take_note()
            raise

    @undisturbed
    def segments(self) -> Segments:
        """Return every step under the name of the segment that recorded it."""
        history, others = runs(self.history), joined(self._others)
        own = remainder(history, others)
        if own is None:  # assigned by hand
            self._begin({})
            self.cuts += 1
            own = history
        elif (
            remainder(history, recorded := runs(self._recorded)) is None
        ):  # cut, or another history
            kept = own if remainder(recorded, history) is not None else []
            self._begin({**self._others, self._name: kept} if kept else self._others)
            self.cuts += 1
            own = [] if kept else own
        return {**self._others, self._name: own} if own else dict(self._others)

    @undisturbed
    def check_cuts(self) -> int:
        """Return `cuts`, after steps that were assigned by hand are written to the file.

        Raises:
            StepError: the file cannot be written.
        """
        if self.history != self._recorded:
            self._catch_up(self.segments(), self.protected)
            self._take_note()
        return self.cuts

    @undisturbed
    def join(self, others: Segments, protected: Protected) -> None:
        """Add these steps. Steps that are already known count once.

        Args:
            others: the segments to add.
            protected: the unit that they protect.

        Raises:
            ArgumentError: if this accountant cannot compose them, or if they protect another unit. The
                ledger is then unchanged.
        """
        merged, whom = self._with(others), self.protected.beside(protected)
        self._catch_up(merged, whom)
        self.history, self.protected = joined(merged), whom
        self._begin(merged)

    @undisturbed
    def count(self, log: WriteAheadLog) -> None:
        """Add the steps of the file, and write the steps that it lacks.

        Raises:
            ArgumentError: as `join`.
            StepError: the file cannot be written.
        """
        self.join(*log.found())
        for name in log.lines:
            self.line(name).join(*log.found(name))
        log.begin()
        log.catch_up(self.segments(), self.protected)
        for name, line in self.lines.items():
            log.catch_up(line.segments(), line.protected, name)

    def keep_in(self, log: WriteAheadLog | LineLog | NotWritten | None) -> None:
        """Write every later step to this file before it is released, and close the previous file."""
        if self._log is not None and self._log is not log:
            self._log.close()
        self._log = log
        for name, line in self.lines.items():
            line.keep_in(self._log_of(name))

    @property
    def lines(self) -> dict[str, Ledger]:
        """Ledgers of people who are not in the training set, each named after a data set.

        Nobody is in two of them, or in one of them and the training set.
        """
        found: dict[str, Ledger] = self.__dict__.setdefault("_lines", {})
        return found

    @undisturbed
    def line(self, name: str) -> Ledger:
        """Return the ledger of a data set, and create it if needed.

        Its steps are Gaussian mechanisms on all of the data (q = 1), so epsilon has a closed form.
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
        """Raise an ArgumentError if this ledger writes to a file."""
        if isinstance(self._log, WriteAheadLog) and self._log.held:
            raise ArgumentError(
                f"This ledger already writes to {self._log.path}, and that file would miss the steps of "
                "another one. Call engine.write_ahead(None) first.",
                doc="checkpoints",
            )

    def take_over(self, other: Ledger) -> None:
        """Add the steps of another ledger, and continue in its file.

        Raises:
            ArgumentError: as `join`, or if both write to files.
            StepError: the file cannot be written.
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
        """The file to which every step is written first."""
        return self._log

    @undisturbed
    def state_dict(self, destination: Any = None) -> Any:
        """Return Opacus' state in plain values, with the names of the steps and a digest.

        Raises:
            ArgumentError: the history holds impossible steps, which could not be loaded.
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
        """Continue from `state_dict()`, and keep the steps that were recorded here.

        A checkpoint of the same run adds the steps that are not known yet. Steps of another run, of a
        fork of this one, or without names (plain Opacus) are added completely.

        Raises:
            ArgumentError: for a damaged state, another mechanism, a union that this accountant cannot
                compose, or steps that protect another unit. The ledger is then unchanged.
        """
        loaded = read_segments(state_dict, self.mechanism(), "The accountant's state")
        merged = self._with(loaded)
        whom = self.protected.beside(protected_by(state_dict, joined(loaded)))
        lines = lines_of(state_dict)
        for name in lines.keys() & self.lines.keys():  # everything that can fail comes first
            self.lines[name].protected.beside(lines[name].protected)
        self._catch_up(merged, whom)
        before = self.history
        try:  # other attributes of a user-defined accountant
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
        """Begin a segment with a new name."""
        self._others, self._name = others, self._names.new()
        self._take_note()

    def _take_note(self) -> None:
        """Take the whole history as written here."""
        self._recorded, self.total = list(self.history), number_of_steps(self.history)

    @undisturbed
    def share_names(self, name: str) -> None:
        """Record steps that all ranks take together under one name, so they count once.

        Args:
            name: the name that all these ranks share, and no other process.
        """
        self._names.share(name)
        self._begin(self.segments())

    @undisturbed
    def taken_by(self, *, ranks: bool) -> None:
        """State whether all ranks take the next step, or this process alone on its own model."""
        if self._names.alone(not ranks):
            self._begin(self.segments())

    @undisturbed
    def __reduce__(self) -> Any:
        """Copy or pickle the ledger as a fork, whose steps are not those of the original."""
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
    """Turn an accountant into a ledger in place, so it keeps the names of its steps."""
    if isinstance(accountant, Ledger):
        return accountant
    of: Any = accountant  # mypy does not support a class change
    of.__class__ = _kept(of.__class__)
    ledger = cast("Ledger", accountant)
    ledger._lock = OwnLock()
    ledger.protected = BY_OPACUS if ledger.history else Protected()
    ledger._names = Names()
    ledger._begin({})
    return ledger


def succeeding(accountant: object, before: Ledger | None) -> Ledger:
    """Return this accountant as a ledger that continues another one (`Ledger.take_over`)."""
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
    """Return the lines of other data sets in a saved state.

    Raises:
        ArgumentError: the state is damaged.
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
