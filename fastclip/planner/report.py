"""What the planner decided, as a table for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastclip.planner import Choice

_DIRECT = "direct"
"""The method of layers that have only one way."""


@dataclass(frozen=True)
class PlanRow:
    """One trainable layer: its path, rule, the shape last seen, and how its norm is computed."""

    path: str
    rule: str
    shape: str = "not seen yet"
    method: str = ""
    nbytes: int = 0


class PlanLog:
    """The planner's last decision for every layer.

    Every layer writes to it in every step, so what is written is made rows when they are asked for.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, tuple[int, ...] | None, str, int]] = {}
        """Path -> rule, shape last seen, method, bytes."""

    def register(self, path: str, rule: str) -> None:
        """A layer that is intercepted, before any data has been seen."""
        self._known[path] = (rule, None, "", 0)

    def note(self, path: str, rule: str, shape: tuple[int, ...], choice: Choice) -> None:
        """A decision of the planner for an input of this shape."""
        self._known[path] = (rule, shape, choice.method, choice.nbytes)

    def note_all(
        self, paths: Iterable[str], rule: str, shape: tuple[int, ...], choice: Choice
    ) -> None:
        """The same decision for several layers."""
        self._known.update(dict.fromkeys(paths, (rule, shape, choice.method, choice.nbytes)))

    def method(self, path: str) -> str:
        """The last decision for this layer; empty where there is none."""
        known = self._known.get(path)
        return "" if known is None else known[2]

    def planned(self, path: str) -> bool:
        """The planner has decided for this layer."""
        known = self._known.get(path)
        return known is not None and known[2] not in ("", _DIRECT)

    def seen(self, path: str, rule: str, shape: tuple[int, ...], nbytes: int) -> None:
        """A layer that has only one way, and for which nothing was planned, after it ran."""
        self._known[path] = (rule, shape, _DIRECT, nbytes)

    def met(self, path: str, rule: str) -> None:
        """Something that runs in a way which is known only now."""
        if path not in self._known:
            self.register(path, rule)

    def plan(self, looks: Iterable[object] = ()) -> Plan:
        """The table as it stands.

        Args:
            looks: what it cost to find the samples, a line each.
        """
        rows = (_row(path, *known) for path, known in self._known.items())
        return Plan(tuple(rows), tuple(map(str, looks)))


def _row(path: str, rule: str, shape: tuple[int, ...] | None, method: str, nbytes: int) -> PlanRow:
    if shape is None:
        return PlanRow(path, rule)
    return PlanRow(path, rule, str(list(shape)), method, nbytes)


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
