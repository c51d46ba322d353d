"""What a federated run costs: every client's steps, composed over rounds, per client and in total."""

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
"""Between client and engine in a file's names; no engine's has one."""
_RUN = "run "
"""Before the name that a caller gives to steps that have none."""
_KNOWN = ("prv", "pld", "rdp", "gdp")
"""Accountants that keep a history of Gaussian mechanisms."""


class FederatedLedger:
    """Composes what clients have trained, over rounds: per client, and in total.

    Each client trains with an engine of its own: one for all rounds, or a new one each round, in any
    process. Its accountant's state is recorded when a round ends, before the update leaves the client;
    or `watch` writes every step down before it is released.

    Steps are told apart by the names that the engine's accountant gives them. The same state counts
    once, however often it is recorded. The longer state of one engine replaces the shorter one. A round
    that is run again by another engine adds up, since both have trained on the data.

    Formal guarantee: `get_epsilon(delta, client)` is that of all recorded steps of this client, for
    neighbors that differ by one added or removed sample (or unit) of its data, if every local model, in
    every round, is released. `get_epsilon(delta)` is that of the whole run. With people="disjoint" it
    is the largest of the clients' (parallel composition: one sample is in the data of one client, and
    all others are the same in both worlds). With people="shared" it is that of all clients' steps
    together (sequential composition), for neighbors that differ by one sample in the data of each
    client. Sampling of clients, and secure aggregation, are not counted: they could only lower it.
    Noisy counts of a client's other data sets (`engine.count`) count as steps on its data. Nothing is
    known of steps that nobody has recorded.

    Args:
        people: "disjoint" if no person's data are held by two clients, "shared" if they may be. Only
            you know; there is no default.
        path: of a file, begun or resumed; its folder must exist. None: in memory alone. Each line is on
            the disk before `record` returns, and sealed with those before it (`WriteAheadLog`).
        accountant: of the epsilons: "prv", "pld", "rdp" or "gdp".

    Raises:
        ArgumentError: for another value; the file is damaged, or held by another ledger.

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
        open_accountant(accountant)  # names the choices, where it is none
        self.people, self.accountant = people, accountant
        self._steps: dict[str, Segments] = {}
        """By client."""
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
        """Count what a client's accountant holds; what is known of it already counts once.

        Args:
            client: its name.
            state: `engine.accountant.state_dict()`, of this engine or Opacus', or its JSON; or a
                history, [(noise multiplier, sampling rate, steps), ...].
            run: what to call the steps of an accountant that has no names (Opacus', a history): one
                name for each engine. Recorded again under it, the longer history counts.

        Raises:
            ArgumentError: a damaged state; steps without names and no `run`, or of another client; or
                they protect another unit (rows, patients). Nothing is counted.
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
        """From now on every step of an engine is counted, and in the file, before it is released.

        For clients that train in this process. A killed round then counts what it has released.

        Args:
            client: its name. engine: FastPrivacyEngine that trains on this client's data alone.

        Raises:
            ArgumentError: the engine keeps a file of its own; or as `record`.
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
        """Those of which steps are recorded, in the order of their first ones."""
        return list(self._steps)

    def history(self, client: str | int | None = None) -> list[Entry]:
        """(noise multiplier, sampling rate, steps) of one client, or of all together.

        Raises:
            ArgumentError: nothing is recorded of this client.
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
        """Epsilon of one client's steps, or of the whole run.

        Args:
            delta: in (0, 1), smaller than 1 / (samples of the client).
            client: its name. None: in total, as `people` says.
            options: of the accountant, as of `fastclip.accounting.epsilon`.

        Raises:
            ArgumentError: nothing is recorded of this client; a delta out of range; steps that this
                accountant cannot compose.
        """
        if client is None and self.people == "disjoint":
            each = {tuple(self.history(name)) for name in self.clients}  # equal ones are asked once
        else:
            each = {tuple(self.history(client))}
        return max(epsilon(h, delta, self.accountant, **options) for h in each or [()])

    def close(self) -> None:
        """Let another ledger have the file. Nothing can be recorded any more."""
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> FederatedLedger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def add(self, client: str, segments: Segments, whom: Protected) -> None:
        """Write down and count what is new in these.

        Raises:
            ArgumentError: another client has them, or they do not continue what is recorded, or protect
                another unit. StepError: the file cannot be written. Nothing is counted.
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
        """Write down and count steps that are about to be released, as `add`."""
        known = self._steps.get(client, {}).get(name, [])
        self.add(client, {name: runs([*known, *entries])}, whom)

    @property
    def held(self) -> bool:
        """Steps can be recorded."""
        return self._log is None or self._log.held


class _ClientLog(WriteAheadLog):
    """Where the engine of one client writes its steps ahead."""

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
        """The ledger's file stays open for the other clients."""


def _named(name: str, line: str) -> str:
    """The name of steps on one of a client's data sets, which all count as its own."""
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
