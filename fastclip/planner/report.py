"""What the planner decided, as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastclip.planner import Choice


@dataclass(frozen=True)
class PlanRow:
    """One trainable layer: its path, rule, the shape last seen, and how its norm is computed."""

    path: str
    rule: str
    shape: str = "not seen yet"
    method: str = ""
    nbytes: int = 0


class PlanLog:
    """The planner's last decision for every layer."""

    def __init__(self) -> None:
        self._rows: dict[str, PlanRow] = {}

    def register(self, path: str, rule: str) -> None:
        """A layer that is intercepted, before any data has been seen."""
        self._rows[path] = PlanRow(path, rule)

    def note(self, path: str, rule: str, shape: tuple[int, ...], choice: Choice) -> None:
        """A decision of the planner for an input of this shape."""
        self._rows[path] = PlanRow(path, rule, str(list(shape)), choice.method, choice.nbytes)

    def seen(self, path: str, rule: str, shape: tuple[int, ...], nbytes: int) -> None:
        """A layer that has only one way, after it ran."""
        known = self._rows.get(path)
        if known is None or not known.method or known.method == "direct":
            self._rows[path] = PlanRow(path, rule, str(list(shape)), "direct", nbytes)

    def met(self, path: str, rule: str) -> None:
        """Something that runs in a way which is known only now."""
        if path not in self._rows:
            self.register(path, rule)

    def plan(self, looks: Iterable[object] = ()) -> Plan:
        """The table as it stands.

        Args:
            looks: what it cost to find the samples, a line each.
        """
        return Plan(tuple(self._rows.values()), tuple(map(str, looks)))


@dataclass(frozen=True)
class Plan:
    """The trainable layers and how each one's norm is computed; `print` it."""

    rows: tuple[PlanRow, ...]
    looks: tuple[str, ...] = ()
    """What it cost to find where the samples are: calls that were looked at, passes, seconds."""

    def __str__(self) -> str:
        header = ("layer", "rule", "input", "norm", "held")
        table = [header] + [
            (r.path or "(root)", r.rule, r.shape, r.method, _bytes(r.nbytes)) for r in self.rows
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = sum(r.nbytes for r in self.rows)
        lines.append(f"held until the end of backward: {_bytes(total)}")
        return "\n".join([*lines, *self.looks])


def _bytes(count: int) -> str:
    if not count:
        return ""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
