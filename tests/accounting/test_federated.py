"""A federated run costs what all steps of each client cost, however often they are recorded."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.accounting import FederatedLedger, epsilon
from fastclip.accounting.transforms import gaussian_epsilon
from fastclip.counts import CountQuery, PrivateData
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.refusal import refused

DELTA = 1e-5
CLIENTS = ("A", "B", "C")
ROUNDS, STEPS = 3, 4
NOISE = {"A": 1.0, "B": 0.8, "C": 2.0}


class Client:
    """A hospital: 32 rows, noise of its own, and a model that is averaged with the others'."""

    def __init__(self, name: str, *, keeps_engine: bool = False) -> None:
        torch.manual_seed(ord(name))
        self.name, self.data = name, TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        self.engine = FastPrivacyEngine(accountant="rdp") if keeps_engine else None

    def fit(self, weights: dict[str, Any], ledger: FederatedLedger | None = None) -> tuple:
        """A round as Flower's clients make it: (weights, JSON of the accountant's state)."""
        net = nn.Linear(3, 1)
        net.load_state_dict(weights)
        engine = self.engine or FastPrivacyEngine(accountant="rdp")
        if ledger is not None:
            ledger.watch(self.name, engine)
        for part in self.steps(engine, net):
            part.step()
        return net.state_dict(), json.dumps(engine.accountant.state_dict())

    def steps(self, engine: FastPrivacyEngine, net: nn.Module) -> Iterator[Any]:
        """Up to each of its steps."""
        model, optimizer, loader = engine.make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(self.data, batch_size=8), noise_multiplier=NOISE[self.name],
            max_grad_norm=1.0,
        )  # fmt: skip
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            yield optimizer
        model.cleanup()


def averaged(all_weights: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: torch.stack([w[k] for w in all_weights]).mean(0) for k in all_weights[0]}


def federate(ledger: FederatedLedger, *, keeps_engine: bool = False, again: int = 1) -> None:
    """FedAvg; each client's state arrives `again` times."""
    clients = [Client(name, keeps_engine=keeps_engine) for name in CLIENTS]
    weights = nn.Linear(3, 1).state_dict()
    for _ in range(ROUNDS):
        updates = []
        for client in clients:
            update, state = client.fit(weights)
            for _ in range(again):
                ledger.record(client.name, state)
            updates.append(update)
        weights = averaged(updates)


@pytest.mark.parametrize("again", [1, 2])
@pytest.mark.parametrize("keeps_engine", [False, True])
@pytest.mark.parametrize("people", ["disjoint", "shared"])
def test_federated_averaging(people: str, keeps_engine: bool, again: int, tmp_path: Path) -> None:
    """Three clients, three rounds: what Opacus' accountant says of all steps; read from the file."""
    path = tmp_path / "ledger"
    with FederatedLedger(people=people, path=path, accountant="rdp") as ledger:
        federate(ledger, keeps_engine=keeps_engine, again=again)
    with FederatedLedger(people=people, path=path, accountant="rdp") as ledger:
        assert ledger.clients == [*CLIENTS]
        each = {}
        for name in CLIENTS:
            assert ledger.history(name) == [(NOISE[name], 0.25, ROUNDS * STEPS)]
            theirs = RDPAccountant()
            theirs.history = ledger.history(name)
            each[name] = ledger.get_epsilon(DELTA, name)
            assert each[name] == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)
        together = RDPAccountant()
        together.history = [(NOISE[name], 0.25, ROUNDS * STEPS) for name in CLIENTS]
        total = {"disjoint": max(each.values()), "shared": together.get_epsilon(DELTA)}[people]
        assert ledger.get_epsilon(DELTA) == pytest.approx(total, rel=1e-9)
        assert total >= max(each.values())


@pytest.mark.parametrize("accountant", ["prv", "pld"])
def test_the_gaussian_mechanism(accountant: str) -> None:
    """Without sampling: mu of a client is sqrt(steps) / sigma, and mu^2 adds up over clients."""
    rounds = {"A": [(2.0, 1.0, 5)] * 3, "B": [(3.0, 1.0, 10)] * 2}
    mu = {"A": math.sqrt(15) / 2.0, "B": math.sqrt(20) / 3.0}
    for people, expected in (("disjoint", max(mu.values())), ("shared", math.hypot(*mu.values()))):
        ledger = FederatedLedger(people=people, accountant=accountant)
        for name, histories in rounds.items():
            for number, history in enumerate(histories):
                ledger.record(name, [history], run=f"round {number}")
        for name, value in [*mu.items(), (None, expected)]:
            exact = gaussian_epsilon(value, DELTA)
            assert exact <= ledger.get_epsilon(DELTA, name) <= 1.02 * exact


def test_an_empty_run_costs_nothing() -> None:
    for people in ("disjoint", "shared"):
        assert FederatedLedger(people=people).get_epsilon(DELTA) == 0


def test_whose_people_they_are_must_be_said() -> None:
    for told in ({}, {"people": "all"}):
        with refused("people expects 'disjoint' or 'shared'", ArgumentError):
            FederatedLedger(**told)


def test_a_killed_round_counts_what_it_has_released(tmp_path: Path) -> None:
    """Two of four steps, and the whole round again; nothing twice when its state comes as well."""
    path, client, weights = tmp_path / "ledger", Client("A"), nn.Linear(3, 1).state_dict()
    ledger = FederatedLedger(people="disjoint", path=path)
    net, engine = nn.Linear(3, 1), FastPrivacyEngine()
    ledger.watch("A", engine)
    for number, optimizer in enumerate(client.steps(engine, net)):
        if number == 2:
            break  # the process ends here
        optimizer.step()
    ledger.close()
    with path.open("ab") as file:
        file.write(b"half a li")
    with FederatedLedger(people="disjoint", path=path) as ledger:
        assert ledger.history("A") == [(1.0, 0.25, 2)]
        _, state = client.fit(weights, ledger)
        assert ledger.history("A") == [(1.0, 0.25, 2 + STEPS)]
        ledger.record("A", state)
        ledger.record("A", engine.accountant.state_dict())
        assert ledger.history("A") == [(1.0, 0.25, 2 + STEPS)]
    with FederatedLedger(people="disjoint", path=path) as ledger:
        assert ledger.history() == [(1.0, 0.25, 2 + STEPS)]


def test_engines_that_are_watched(tmp_path: Path) -> None:
    """One engine for all rounds, and its deep copies. Where the file is closed no step is released."""
    ledger = FederatedLedger(people="disjoint", path=tmp_path / "ledger")
    client, weights = Client("A", keeps_engine=True), nn.Linear(3, 1).state_dict()
    for number in range(ROUNDS):
        client.fit(weights, ledger)
        assert ledger.history("A") == [(1.0, 0.25, (number + 1) * STEPS)]
        client.engine = copy.deepcopy(client.engine)
    assert client.engine.accountant.history == ledger.history("A")
    other = FederatedLedger(people="disjoint")
    with refused("already writes to", ArgumentError):
        other.watch("A", client.engine)
    ledger.close()
    with refused("cannot be written", StepError):
        client.fit(weights)
    assert ledger.history("A") == [(1.0, 0.25, ROUNDS * STEPS)]
    client.engine.write_ahead(None)
    client.fit(weights)  # of its own accord
    with pytest.raises(ArgumentTypeError, match="FastPrivacyEngine"):
        other.watch("A", nn.Linear(2, 2))


def test_longer_and_shorter_states_of_one_engine() -> None:
    ledger, engine = FederatedLedger(people="disjoint"), FastPrivacyEngine()
    states = []
    for _ in range(3):
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        states.append(copy.deepcopy(engine.accountant.state_dict()))
    for state in (states[1], states[0], states[2], states[1]):
        ledger.record("A", state)
    assert ledger.history("A") == [(1.0, 0.1, 3)]
    ledger.record("B", [(1.0, 0.1, 2)], run="all")
    ledger.record("B", [(1.0, 0.1, 2), (0.5, 0.1, 1)], run="all")
    assert ledger.history("B") == [(1.0, 0.1, 2), (0.5, 0.1, 1)]
    ledger.record("C", [(1.0, 0.1, 2)], run="all")  # another client's run of this name
    assert ledger.history("C") == [(1.0, 0.1, 2)]
    assert ledger.history() == [(1.0, 0.1, 5), (0.5, 0.1, 1), (1.0, 0.1, 2)]


def test_accountants_of_opacus() -> None:
    """Their states have no names."""
    theirs = RDPAccountant()
    theirs.step(noise_multiplier=1.5, sample_rate=0.2)
    ledger = FederatedLedger(people="disjoint", accountant="rdp")
    with refused("Pass run=", ArgumentError):
        ledger.record(0, theirs.state_dict())
    for _ in range(2):
        ledger.record(0, theirs.state_dict(), run="round 1")
    assert ledger.get_epsilon(DELTA, 0) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)
    with refused("another run= name", ArgumentError):
        ledger.record(0, [(9.0, 0.2, 1)], run="round 1")
    assert ledger.history("0") == [(1.5, 0.2, 1)]


def engine_state() -> dict[str, Any]:
    engine = FastPrivacyEngine()
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    return engine.accountant.state_dict()


def test_what_is_refused(tmp_path: Path) -> None:
    """Nothing of it is counted, in memory or in the file."""
    path, state = tmp_path / "ledger", engine_state()
    ledger = FederatedLedger(people="disjoint", path=path)
    ledger.record("A", state)
    before = path.read_bytes()
    with refused("Give each client an engine", ArgumentError):
        ledger.record("B", state)
    with refused("damaged", ArgumentError):
        ledger.record("B", {**engine_state(), "history": [(5.0, 0.1, 1)]})
    with refused("not valid JSON", ArgumentError):
        ledger.record("B", "{")
    with refused("expects one of the accountants", ArgumentError):
        ledger.record("B", {**engine_state(), "mechanism": "mine"})
    with pytest.raises(ArgumentTypeError, match="a history"):
        ledger.record("B", 3)
    for wrong in (None, "", True):
        with pytest.raises(ArgumentTypeError, match="client expects"):
            ledger.record(wrong, state)
    with refused("Client 'B' has no recorded steps", ArgumentError):
        ledger.get_epsilon(DELTA, "B")
    with refused("delta", ArgumentError):
        ledger.get_epsilon(1.0)
    with refused("Another engine or process writes to", ArgumentError):
        FederatedLedger(people="disjoint", path=path)
    assert path.read_bytes() == before
    assert ledger.history() == [(1.0, 0.1, 1)]
    ledger.close()
    with refused("closed", StepError):
        ledger.record("B", engine_state())
    path.write_bytes(before.replace(b"1.0", b"9.0"))
    with refused("damaged", ArgumentError):
        FederatedLedger(people="disjoint", path=path)


def test_rows_and_patients_are_not_composed() -> None:
    ledger = FederatedLedger(people="shared")
    ledger.record("A", [(1.0, 0.5, 2)], run="round 1")  # of rows, as Opacus' accountants are
    net, engine = nn.Linear(2, 1), FastPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4), max_grad_norm=1.0,
        unit_ids=torch.arange(8) // 2,
    )  # fmt: skip
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with refused("Steps that protect samples and steps that protect units", ArgumentError):
        ledger.record("B", engine.accountant.state_dict())
    assert ledger.clients == ["A"]


@pytest.mark.parametrize("name", ["St. Mary's/ward 3", "Zürich", "run 1"])
def test_names_of_clients(name: str, tmp_path: Path) -> None:
    with FederatedLedger(people="disjoint", path=tmp_path / "ledger") as ledger:
        ledger.record(name, engine_state())
        ledger.record(name, [(2.0, 0.5, 3)], run="a")
    with FederatedLedger(people="disjoint", path=tmp_path / "ledger") as ledger:
        assert ledger.clients == [name]
        assert ledger.history(name) == [(1.0, 0.1, 1), (2.0, 0.5, 3)]
        assert ledger.get_epsilon(DELTA) == epsilon(ledger.history(name), DELTA)


@pytest.mark.parametrize("watched", [True, False])
def test_counts_of_a_client_s_other_data_count_as_its_own(watched: bool, tmp_path: Path) -> None:
    """A file that is read again holds them, too."""
    engine, path = FastPrivacyEngine(accountant="rdp"), tmp_path / "rounds.ledger"
    query = CountQuery(PrivateData("validation", overlap=()), ("all",), 3.0, "row")
    with FederatedLedger(people="disjoint", path=path, accountant="rdp") as ledger:
        if watched:
            ledger.watch("A", engine)
        engine.count(query, groups=torch.zeros(40, dtype=torch.long))
        if not watched:
            ledger.record("A", engine.accountant.state_dict())
        assert ledger.history("A") == [(3.0, 1.0, 1)]
    with FederatedLedger(people="disjoint", path=path, accountant="rdp") as ledger:
        assert ledger.history("A") == [(3.0, 1.0, 1)]
