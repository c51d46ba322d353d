"""Whoever reads a ledger while steps are recorded: other threads, and handlers of signals."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from opacus.accountants import RDPAccountant, create_accountant

from fastclip.accounting.epsilon import spent
from fastclip.accounting.ledger import keep_ledger

STEP = {"noise_multiplier": 1.0, "sample_rate": 0.1}
OTHER = {"noise_multiplier": 2.0, "sample_rate": 0.1}


class Own(RDPAccountant):
    """An accountant of the user's own, which counts beside Opacus."""

    taken = 0

    def step(self, **values: float) -> None:
        self.taken += 1
        super().step(**values)


def taken(state: Any) -> int:
    return sum(steps for *_, steps in state["history"])


@pytest.mark.parametrize("name", ["rdp", "prv"])
def test_a_step_while_epsilon_is_computed_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread takes one between any two lines of it."""
    run = keep_ledger(create_accountant(name))
    run.step(**STEP)
    alone = spent(run, 1e-5)
    history = sys.modules[spent.__module__]
    look = history.check_not_truncated  # type: ignore[attr-defined]

    def meanwhile(*given: Any) -> None:
        look(*given)
        run.step(**STEP)

    monkeypatch.setattr(history, "check_not_truncated", meanwhile)
    assert spent(run, 1e-5) == alone
    assert taken(run.state_dict()) == 2


@pytest.mark.parametrize("kind", [RDPAccountant, Own])
@pytest.mark.parametrize("given", [STEP, OTHER])
def test_no_reader_misses_a_step(kind: type, given: dict[str, float]) -> None:
    """A handler that saves a checkpoint at any line finds all that was released."""
    run = keep_ledger(kind())
    for _ in range(3):
        run.step(**STEP)
    seen: list[int] = []

    def line(frame: Any, event: str, _: Any) -> Any:
        sys.settrace(None)
        seen.append(taken(run.state_dict()))
        assert sum(steps for part in run.segments().values() for *_, steps in part) == seen[-1]
        sys.settrace(called)
        return line

    def called(frame: Any, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename
        return line if "accountants" in place or "accounting" in place else None

    try:
        sys.settrace(called)
        run.step(**given)
    finally:
        sys.settrace(None)
    assert len(seen) > 10
    assert set(seen) <= {3, 4}
    assert seen == sorted(seen)
    assert getattr(run, "taken", 4) == 4
    assert len(run.segments()) == 1


def test_threads_that_step_lose_nothing() -> None:
    run = keep_ledger(RDPAccountant())

    def walk(values: dict[str, float]) -> None:
        for _ in range(300):
            run.step(**values)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=walk, args=(values,)) for values in (STEP, OTHER)]
        for thread in threads:
            thread.start()
        states = []
        while any(thread.is_alive() for thread in threads):
            spent(run, 1e-5)
            states.append(taken(run.state_dict()))
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert states == sorted(states)
    assert taken(run.state_dict()) == 600
