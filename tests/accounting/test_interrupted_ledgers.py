"""Ctrl-C anywhere in the writing of a ledger: it can be gone on with, and opened, and lacks no step."""

from __future__ import annotations

from pathlib import Path

from tests.accounting.files import logged
from tests.accounting.test_engine_ledger import start, walk
from tests.interrupts import at_every_line


def test_a_file_that_was_interrupted_goes_on_and_opens(tmp_path: Path) -> None:
    run = start()
    path = tmp_path / "ledger"
    run[0].write_ahead(path)
    taken = interrupted = 0
    for ctrl_c in at_every_line("accounting/ledger_file.py"):
        try:
            with ctrl_c:
                walk(run, 1)
            taken += 1
        except KeyboardInterrupt:
            interrupted += 1
        walk(run, 1)
        taken += 1
        recorded = sum(steps for *_, steps in run[0].accountant.history)
        assert taken <= recorded <= logged(path) <= taken + interrupted
    assert interrupted > 20
    run[0].accountant.log.close()
    again = start()
    again[0].write_ahead(path)
    assert sum(steps for *_, steps in again[0].accountant.history) >= taken
