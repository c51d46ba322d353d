"""What the tests of a ledger's file look at."""

from __future__ import annotations

from pathlib import Path

from fastclip.accounting.ledger_file import WriteAheadLog


def logged(path: Path) -> int:
    """Steps in the file."""
    log = WriteAheadLog(path, writes=False)
    return sum(steps for part in log.found()[0].values() for *_, steps in part)
