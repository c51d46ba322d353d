"""Counts the cases of a run by Opacus' module and by mode, and says what may not be overlooked."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conformance import not_applicable

MOST = 0.07
"""Of the cases, a smaller share may be not applicable; each of them is listed with its reason."""

PASSED, NOT_APPLICABLE, SKIPPED, FAILED = "passed", "not applicable", "skipped", "failed"
OUTCOMES = (PASSED, NOT_APPLICABLE, SKIPPED, FAILED)


@dataclass
class Case:
    """One test: its worst outcome over its phases and subtests, and how long it took."""

    module: str
    mode: str
    outcomes: set[str] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return next(o for o in (FAILED, NOT_APPLICABLE, SKIPPED, PASSED) if o in self.outcomes)


class Summary:
    """A pytest plugin; prints its table at the end and fails a run that breaks the rules."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.rules: list[str] = []
        self.start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mode = dict(report.user_properties).get("mode")
        if mode is None:
            return
        file = report.nodeid.split("::")[0]
        module = file.rpartition("/test_")[2].removesuffix(".py")
        case = self.cases.setdefault(report.nodeid, Case(module, str(mode)))
        if report.failed:
            case.outcomes.add(FAILED)
        if isinstance(report, pytest.SubtestReport):  # a part of the case, whose own report follows
            return
        case.seconds += report.duration
        if report.skipped:
            case.outcomes.add(NOT_APPLICABLE if hasattr(report, "wasxfail") else SKIPPED)
        elif report.when == "call":
            case.outcomes.add(PASSED)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        options = session.config.option
        whole = not (options.keyword or options.markexpr or options.collectonly)
        self.rules = self.problems() if whole and exitstatus in (0, 1) else []
        if self.rules:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("Opacus' own tests on FastPrivacyEngine")
        for line in self.table():
            terminalreporter.write_line(line)
        for rule in self.rules:
            terminalreporter.write_line(rule, red=True)

    def table(self) -> list[str]:
        """Cases by module and mode, in total, and the time."""
        rows: dict[tuple[str, str], Counter[str]] = {}
        seconds: Counter[tuple[str, str]] = Counter()
        for case in self.cases.values():
            for key in ((case.module, case.mode), ("total", "")):
                rows.setdefault(key, Counter())[case.outcome] += 1
                seconds[key] += case.seconds
        form = "{:<28}{:<8}" + "{:>16}" * len(OUTCOMES) + "{:>10}"
        lines = [form.format("module", "mode", *OUTCOMES, "seconds")]
        for key in sorted(rows, key=lambda key: (key[0] == "total", key)):
            counts = [rows[key][outcome] for outcome in OUTCOMES]
            lines.append(form.format(*key, *counts, f"{seconds[key]:.0f}"))
        lines.append(f"not applicable: {self.share():.1%} of the cases that Opacus does not skip")
        lines.append(f"whole run: {time.monotonic() - self.start:.0f} s")
        return lines

    def share(self) -> float:
        """How many of the cases that run are not applicable."""
        counts = Counter(case.outcome for case in self.cases.values())
        return counts[NOT_APPLICABLE] / max(1, len(self.cases) - counts[SKIPPED])

    def problems(self) -> list[str]:
        """Rules of the whole run that are broken, which fails it although no case did."""
        found = []
        if self.share() >= MOST:
            found.append(f"{MOST:.0%} of the cases or more are not applicable")
        names = [not_applicable.case_of(nodeid) for nodeid in self.cases]
        found += [
            f"not_applicable.py: {entry.pattern} meets no case"
            for entry in not_applicable.ENTRIES
            if not any(entry.meets(name) for name in names)
        ]
        return found
