"""How many bounds are looked at: the best of several is no bound, unless they share its significance."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from fastclip.accounting.segments import new_name
from fastclip.errors import ArgumentError

_LIVE: WeakValueDictionary[str, Announced] = WeakValueDictionary()
"""By name: copies, pickled ones too, are one in this process."""


class Announced:
    """The reports of one set of coins: what the first says, before a bound is seen, holds for all.

    Copies share it, wherever they are in this process; in another they go on from what was reported when
    they were made.
    """

    def __init__(self) -> None:
        self._name = new_name()
        self._first: dict[str, Any] = {}
        """Settings of the first report; none before it."""
        self._seen: set[bytes] = set()
        _LIVE[self._name] = self

    def check(self, scores: np.ndarray, delta: float, significance: float, reports: int) -> bytes:
        """What `seen` takes once the report is made; the same report may be made again.

        Raises:
            ArgumentError: it is one more than was announced, or another number or significance is.
        """
        for name, value in {"reports": reports, "significance": significance}.items():
            if self._first.get(name, value) != value:
                raise ArgumentError(
                    f"{name}={self._first[name]} was announced with the first report and cannot change "
                    f"after it, got {value}"
                )
        report = hashlib.sha256(scores.tobytes() + np.float64(delta).tobytes()).digest()
        if report not in self._seen and len(self._seen) >= reports:
            raise ArgumentError(
                "these coins have been reported with other scores or another delta "
                f"(reports={reports}), and the best of several bounds is none at their significance: "
                f"train anew, and announce them in the first report, reports={reports + 1}"
            )
        return report

    def seen(self, report: bytes, significance: float, reports: int) -> None:
        """It was made."""
        self._first = {"reports": reports, "significance": significance}
        self._seen.add(report)

    def __reduce__(self) -> Any:
        return _shared, (self._name, self._first, self._seen)


def _shared(name: str, first: dict[str, Any], seen: set[bytes]) -> Announced:
    """The one that bears the name, or a new one; reports of either have been made."""
    found = _LIVE.get(name)
    if found is None:
        found = Announced.__new__(Announced)
        found._name, found._first, found._seen = name, {}, set()
        _LIVE[name] = found
    found._first = found._first or dict(first)
    found._seen |= seen
    return found
