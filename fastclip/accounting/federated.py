"""Privacy accounting of federated runs: clients' steps over rounds, per client and in total."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastclip.accounting.epsilon import epsilon, open_accountant
from fastclip.accounting.ledger import Ledger, lines_of
from fastclip.accounting.ledger_file import TRAINING, WriteAheadLog
from fastclip.accounting.steps import SEGMENTS_KEY as NAMED
from fastclip.accounting.steps import (
    Entry,
    Protected,
    Segments,
    joined,
    protected_by,
    read_segments,
    remainder,
    runs,
    union,
)
from fastclip.errors import ArgumentError, ArgumentTypeError

_PEOPLE = ("disjoint", "shared")
_SPLIT = "/"
"""Separates client and engine in a file's names. No engine's name contains it."""
_RUN = "run "
"""Prefix of a name that the caller gives to steps without names."""
_KNOWN = ("prv", "pld", "rdp", "gdp")
"""Accountants that keep a history of Gaussian mechanisms."""


class FederatedLedger:
    """Composes the training steps of clients over rounds, per client and in total.

    Each client trains with its own engine, either one for all rounds or a new one each round, in any
    process. Record its accountant's state when a round ends, before the update leaves the client.
    Alternatively, `watch` records every step before it is released.

    Steps are distinguished by the names that the engine's accountant gives them. The same state counts
    once, however often it is recorded. The longer state of one engine replaces the shorter one. A round
    that another engine repeats adds up, because both have trained on the data.

    Formal guarantee: `get_epsilon(delta, client)` covers all recorded steps of this client, even if
    every local model of every round is released. Neighbors differ by one added or removed sample (or
    unit) of its data. `get_epsilon(delta)` covers the whole run. With people="disjoint" it is the
    largest epsilon of the clients (parallel composition). One sample is then in the data of one client,
    and the other clients' data are equal in both neighbors. With people="shared" it covers all clients'
    steps together (sequential composition), for neighbors that differ by one sample in the data of each
    client. Sampling of clients and secure aggregation are not counted, and could only lower epsilon.
    Noisy counts of a client's other data sets (`engine.count`) count as steps on its data. Steps that
    were not recorded are not covered.

    Args:
        people: "disjoint" if no two clients hold data of one person, "shared" if they may. There is no
            default, because only you know.
        path: path of a file, begun or resumed. Its folder must exist. None keeps the ledger in memory.
            Each line is on the disk before `record` returns, and chained to those before it
            (`WriteAheadLog`).
        accountant: accountant of the epsilons, "prv", "pld", "rdp" or "gdp".

    Raises:
        ArgumentError: for another value, a damaged file, or a file that another ledger writes to.

    Examples:
        >>> ledger = FederatedLedger(people="disjoint", path="rounds.ledger")
        >>> ledger.record("hospital A", engine.accountant.state_dict())
        >>> ledger.get_epsilon(1e-5, "hospital A"), ledger.get_epsilon(1e-5)
    """

    def __init__(
        self, *, people: str | None = None, path: Any = None, accountant: str = "prv"
    ) -> None:
        if people not in _PEOPLE:
            raise ArgumentError(
                f"people expects 'disjoint' or 'shared', got {people!r}, and the total depends on it. "
                "Pass people='shared' if several clients may hold the data of one person.",
                doc="privacy-budget",
            )
        open_accountant(accountant)  # raises an error for an unknown name
        self.people, self.accountant = people, accountant
        self._steps: dict[str, Segments] = {}
        """Segments by client."""
        self._whom = Protected()
        self._log: WriteAheadLog | None = None
        if path is not None:
            self._log = WriteAheadLog(path)
            self._log.begin()
            found, self._whom = self._log.found()
            for name, entries in found.items():
                client, _, own = name.rpartition(_SPLIT)
                self._steps.setdefault(client, {})[own] = entries

    def record(self, client: str | int, state: Any, *, run: str | None = None) -> None:
        """Record the steps of a client's accountant. Steps that are already known count once.

        Args:
            client: name of the client.
            state: `engine.accountant.state_dict()` of this engine or Opacus', or its JSON. Or a
                history, [(noise multiplier, sampling rate, steps), ...].
            run: name of the steps of an accountant without names (Opacus', or a history), one name for
                each engine. If it is recorded again, the longer history counts.

        Raises:
            ArgumentError: for a damaged state, steps without names and no `run`, steps of another
                client, or another privacy unit (samples, patients). Nothing is counted.
            StepError: the file cannot be written.
        """
        if isinstance(state, (str, bytes)):
            state = _from_json(state)
        if not isinstance(state, Mapping):
            state = {"mechanism": "prv", "history": _history(state)}
        mechanism = state.get("mechanism")
        if mechanism not in _KNOWN:
            raise ArgumentError(
                f"The state of a client expects one of the accountants {', '.join(_KNOWN)}, got "
                f"{mechanism!r}, for which no composition is known. Record its history instead.",
                doc="privacy-budget",
            )
        found = read_segments(state, mechanism, f"The accountant's state of client {client!r}")
        if not state.get(NAMED) and joined(found):
            if run is None:
                raise ArgumentError(
                    f"The steps of client {client!r} have no names (Opacus' accountant, or a history), "
                    "so a state that is recorded twice would count twice. Pass run= with a name for "
                    "each engine.",
                    doc="privacy-budget",
                )
            found = {f"{_RUN}{run}": joined(found)}
        whom = protected_by(state, joined(found))
        for line, spent in lines_of(state).items():
            found |= {_named(name, line): entries for name, entries in spent.segments.items()}
            whom = whom.beside(spent.protected)
        self.add(_name_of(client), found, whom)

    def watch(self, client: str | int, engine: Any) -> None:
        """Record every later step of an engine, also in the file, before it is released.

        Use it for clients that train in this process. A killed round then counts the steps that it
        released.

        Args:
            client: name of the client.
            engine: FastPrivacyEngine that trains on this client's data only.

        Raises:
            ArgumentError: the engine has its own ledger file, or as `record`.
            ArgumentTypeError: another kind of engine.
            StepError: the file cannot be written.
        """
        book: Any = getattr(engine, "accountant", None)
        if not isinstance(book, Ledger):
            raise ArgumentTypeError(
                f"engine expects a FastPrivacyEngine, got {type(engine).__name__}. Record the state of "
                "its accountant after each round instead."
            )
        log = _ClientLog(self, _name_of(client))
        if book.log == log:
            return
        book.check_no_file()
        log.catch_up(book.segments(), book.protected)
        book.keep_in(log)

    @property
    def clients(self) -> list[str]:
        """Clients with recorded steps, in the order of their first steps."""
        return list(self._steps)

    def history(self, client: str | int | None = None) -> list[Entry]:
        """Return (noise multiplier, sampling rate, steps) of one client, or of all together.

        Raises:
            ArgumentError: the client has no recorded steps.
        """
        if client is None:
            return runs(entry for part in self._steps.values() for entry in joined(part))
        name = _name_of(client)
        if name not in self._steps:
            raise ArgumentError(
                f"Client {name!r} has no recorded steps (recorded clients are {self.clients}). Record "
                "the state of its accountant first.",
                doc="privacy-budget",
            )
        return joined(self._steps[name])

    def get_epsilon(self, delta: float, client: str | int | None = None, **options: Any) -> float:
        """Return epsilon of one client's steps, or of the whole run.

        Args:
            delta: in (0, 1), smaller than 1 / (samples of the client).
            client: name of the client. None for the whole run, composed according to `people`.
            options: options of the accountant, as in `fastclip.accounting.epsilon`.

        Raises:
            ArgumentError: for a client without recorded steps, a delta out of range, or steps that this
                accountant cannot compose.
        """
        if client is None and self.people == "disjoint":
            each = {
                tuple(self.history(name)) for name in self.clients
            }  # equal ones are computed once
        else:
            each = {tuple(self.history(client))}
        return max(epsilon(h, delta, self.accountant, **options) for h in each or [()])

    def close(self) -> None:
        """Close the file for other ledgers. Nothing more can be recorded."""
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> FederatedLedger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def add(self, client: str, segments: Segments, whom: Protected) -> None:
        """Write and count the new steps among these.

        Raises:
            ArgumentError: the steps belong to another client, do not continue the recorded ones, or
                protect another unit. Nothing is counted.
            StepError: the file cannot be written. Nothing is counted.
        """
        own = self._steps.get(client, {})
        for name, entries in segments.items():
            holder = next(
                (c for c, part in self._steps.items() if c != client and name in part), None
            )
            if holder is not None and not name.startswith(_RUN):
                raise ArgumentError(
                    f"Steps of client {client!r} are already recorded for client {holder!r}, so one "
                    "engine or a copied private model trained on the data of both. Give each client an "
                    "engine, and exchange state_dicts.",
                    doc="privacy-budget",
                )
            known = own.get(name, [])
            if remainder(entries, known) is None and remainder(known, entries) is None:
                raise ArgumentError(
                    f"The state of client {client!r} does not continue the recorded steps of its engine "
                    f"({name}). Record its history under another run= name to count both.",
                    doc="privacy-budget",
                )
        both = self._whom.beside(whom)
        if self._log is not None:
            self._log.catch_up({client + _SPLIT + n: part for n, part in segments.items()}, whom)
        self._whom = both
        if segments:
            self._steps[client] = union(own, segments)

    def add_steps(self, client: str, name: str, entries: Iterable[Entry], whom: Protected) -> None:
        """Write and count steps that are about to be released, as `add`."""
        known = self._steps.get(client, {}).get(name, [])
        self.add(client, {name: runs([*known, *entries])}, whom)

    @property
    def held(self) -> bool:
        """Whether steps can be recorded."""
        return self._log is None or self._log.held


class _ClientLog(WriteAheadLog):
    """The log to which the engine of one client writes its steps before their release."""

    def __init__(self, ledger: FederatedLedger, client: str) -> None:
        self._ledger, self._client, self.ranks = ledger, client, None
        self.path = Path("a FederatedLedger")

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _ClientLog) and other._ledger is self._ledger
        return same and other._client == self._client  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    @property
    def held(self) -> bool:
        return self._ledger.held

    def record(
        self, name: str, entries: Iterable[Entry], whom: Protected, line: str = TRAINING
    ) -> None:
        self._ledger.add_steps(self._client, _named(name, line), entries, whom)

    def catch_up(self, segments: Segments, whom: Protected, line: str = TRAINING) -> None:
        named = {_named(name, line): entries for name, entries in segments.items()}
        self._ledger.add(self._client, named, whom)

    def close(self) -> None:
        """Do nothing, because the ledger's file stays open for the other clients."""


def _named(name: str, line: str) -> str:
    """Return the name of steps on one of a client's data sets, which all count for the client."""
    return name if line == TRAINING else f"{name} ({line})".replace(_SPLIT, "|")


def _name_of(client: str | int) -> str:
    if isinstance(client, bool) or not isinstance(client, (str, int)) or client == "":
        raise ArgumentTypeError(f"client expects a nonempty string or a number, got {client!r}.")
    return str(client)


def _from_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentError(
            f"The state of a client is not valid JSON ({error}). Pass "
            "json.dumps(engine.accountant.state_dict())."
        ) from None


def _history(entries: Any) -> list[Any]:
    try:
        return [(sigma, rate, steps) for sigma, rate, steps in entries]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"The state of a client expects an accountant's state or a history, got {entries!r}. Pass "
            "engine.accountant.state_dict()."
        ) from None
