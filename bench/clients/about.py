"""What a program of this folder says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """One line of the table.

    Args:
        title: the program, as its users call it.
        version: the commit that a script follows; of a package the name of its distribution.
        kind: "tabular", "text" or "vision".
        runs: what runs: model, rows, batch, epochs.
        note: what was left out or changed here, and why.
    """

    title: str
    version: str
    kind: str
    runs: str
    note: str = ""
