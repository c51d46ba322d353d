"""How many bounds are looked at: the best of several is no bound, unless they share its significance."""

from __future__ import annotations

import hashlib

import numpy as np

from fastclip.errors import ArgumentError


class Announced:
    """The reports of one set of coins: their number is said with the first, before a bound is seen."""

    def __init__(self) -> None:
        self._reports = 0
        self._seen: set[bytes] = set()

    def check(self, scores: np.ndarray, delta: float, reports: int) -> bytes:
        """What `seen` takes once the report is made; the same report may be made again.

        Raises:
            ArgumentError: it is one more than was announced, or another number is.
        """
        if self._seen and reports != self._reports:
            raise ArgumentError(
                f"reports={self._reports} was announced with the first report and cannot change after "
                f"it, got {reports}"
            )
        report = hashlib.sha256(scores.tobytes() + np.float64(delta).tobytes()).digest()
        if report not in self._seen and len(self._seen) >= reports:
            raise ArgumentError(
                "these coins have been reported with other scores or another delta "
                f"(reports={reports}), and the best of several bounds is none at their significance: "
                f"train anew, and announce them in the first report, reports={reports + 1}"
            )
        return report

    def seen(self, report: bytes, reports: int) -> None:
        """It was made."""
        self._reports = reports
        self._seen.add(report)
