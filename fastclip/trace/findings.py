"""What a trace has found, and the user's line that it comes from."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from os.path import basename
from pathlib import Path
from types import FrameType
from typing import Any

from fastclip._torch import creation_number, current_node, current_task, number_of

HIDDEN = [str(Path(__file__).resolve().parents[1]), "<"]
"""Beginnings of the names of files that are not the user's."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


class Lines:
    """The user's lines: of what runs, and, in a backward pass, of what its gradient is computed for."""

    def __init__(self) -> None:
        self._by_number: dict[int, str] = {}

    def note(self) -> None:
        """An operation runs. If it has a node in the graph, that is the newest one."""
        newest = creation_number() - 1
        if newest not in self._by_number:
            self._by_number[newest] = line_of(sys._getframe(2))

    def current(self) -> str:
        """`file:line`."""
        if current_task() != -1 and (node := current_node()) is not None:
            line = self._by_number.get(number_of(node))
            if line:
                return line
        return line_of(sys._getframe(1))

    def forget(self) -> None:
        """The graph of this step is gone."""
        self._by_number.clear()


def line_of(frame: FrameType | None) -> str:
    """`file:line` of the nearest frame of the user's own code; of a library's, where there is none."""
    library = None
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user":
            return _shown(frame)
        if owner == "library" and library is None:
            library = frame
        frame = frame.f_back
    return "unknown line" if library is None else _shown(library)


@cache
def _owner(file: str) -> str:
    """Whose a file is: "user", "library", or "hidden" (torch's, fastclip's)."""
    if file.startswith(tuple(HIDDEN)) or "/torch/" in file:
        return "hidden"
    return "library" if file.startswith(_INSTALLED) else "user"


def is_a_loaders(frame: FrameType | None) -> bool:
    """Whether a DataLoader is what runs."""
    while frame is not None and "/torch/utils/data/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _shown(frame: FrameType) -> str:
    return f"{basename(frame.f_code.co_filename)}:{frame.f_lineno}"


IGNORED_LABELS = "no label is ignored"
"""A guard: in every later step a mean over classes counts all labels."""


@dataclass(frozen=True)
class Cause:
    """An operation whose result follows from several samples.

    Args:
        operation: torch's name of it. line: of the user's code. shapes: of its operands.
        backward: it ran in the backward pass.
    """

    operation: str
    line: str
    shapes: tuple[tuple[int, ...], ...] = ()
    backward: bool = False

    def __str__(self) -> str:
        shapes = " and ".join(str(list(shape)) for shape in self.shapes[:2])
        where = "the backward pass of " if self.backward else ""
        return f"{self.operation}{f' of {shapes}' if shapes else ''} at {where}{self.line}"


@dataclass(frozen=True)
class Finding:
    """Why the trace does not prove that samples are independent.

    Args:
        kind: "forward", "gradient", "order", "unseen", "factor", "repeated", "calls", "read", "input"
            or "outside".
        use: the layer or function whose parameter's gradient it concerns.
    """

    kind: str
    cause: Cause | None
    use: str


@dataclass(frozen=True)
class Read:
    """Numbers that Python has read.

    Args:
        what: the operation or method. of: "several samples", "one sample" or "chance".
    """

    what: str
    of: str
    line: str


@dataclass
class Report:
    """What one traced step has shown."""

    findings: list[Finding] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    probed: dict[str, int] = field(default_factory=dict)
    """Operations without a rule, and how often each was asked by the local probe."""
    by_value: list[str] = field(default_factory=list)
    """What holds for the values of this batch."""
    guards: set[str] = field(default_factory=set)
    """What must hold in every later step."""
    outside: list[tuple[str, str]] = field(default_factory=list)
    """Trained tensors that are none of the model's: shape and line."""
    carried: list[Cause | None] = field(default_factory=list)
    """What of the batch is still held after the step."""
    uses: dict[str, Any] = field(default_factory=dict)
    """Shadows of the outputs of layers and uses, by their name."""
    factors: set[int | None] = field(default_factory=set)
    mixing: list[Cause] = field(default_factory=list)
    """Operations in which samples met, in their order."""
    factor_cause: Cause | None = None
    """Where a number of the whole batch first became a factor."""
    shifts: set[int] = field(default_factory=set)
    """By which powers of the batch's size samples may have been multiplied before they were summed."""
    operations: int = 0

    def add(self, kind: str, cause: Any, use: str) -> None:
        """Note a finding once."""
        found = Finding(kind, cause if isinstance(cause, Cause) else None, use)
        if found not in self.findings:
            self.findings.append(found)

    def of(self, kinds: Iterable[str]) -> list[Finding]:
        """The findings of these kinds."""
        return [found for found in self.findings if found.kind in kinds]

    @property
    def verdict(self) -> str:
        """ "coupled", or how far it is proven that samples are independent: "path" for the way that this
        step took, "values" for what this batch holds, "proven".
        """
        if self.findings or self.outside:
            return "coupled"
        if self.reads:
            return "path"
        return "values" if self.by_value or self.probed else "proven"


_VERDICTS = {
    "coupled": "samples depend on each other",
    "path": "proven for the path that this step took, which follows from numbers that Python read",
    "values": "proven with the values of this batch",
    "proven": "proven",
}
_MOST_LINES = 12


@dataclass(frozen=True)
class Proof:
    """What the traced steps of a private model have shown; `print` it.

    Args:
        steps: a report for each traced step. unproven: parts of the model's forward that dry runs
            compare instead, because the trace does not prove them.
    """

    steps: tuple[Report, ...]
    unproven: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.steps:
            return "no step has been traced yet: explain() after the first backward pass"
        lines = []
        for number, report in enumerate(self.steps, 1):
            lines.append(
                f"traced step {number}: {_VERDICTS[report.verdict]} "
                f"({report.operations:,} operations, {len(report.uses)} uses of parameters)"
            )
            sections: dict[str, list[str]] = {
                "samples met in": [str(cause) for cause in report.mixing],
                "not independent": [f"{f.use}: {f.kind}, {f.cause}" for f in report.findings],
                "numbers read by Python": [
                    f"{r.what} at {r.line}, of {r.of}" for r in report.reads
                ],
                "proven by trying values": [
                    f"{name} ({n} times)" for name, n in report.probed.items()
                ],
                "holds for this batch": report.by_value,
                "watched in later steps": sorted(report.guards),
                "trained, but not in the model": [
                    f"{shape} at {line}" for shape, line in report.outside
                ],
            }
            for title, entries in sections.items():
                lines += _listed(title, entries)
        return "\n".join([*lines, *_listed("compared by dry runs", self.unproven)])


@dataclass
class TraceLog:
    """What is kept of the traced steps of one model, also when that is gone."""

    reports: list[Report] = field(default_factory=list)
    """The newest last."""
    unproven: list[str] = field(default_factory=list)
    error: Exception | None = None
    """The last that a traced step has raised."""

    @property
    def proof(self) -> Proof:
        return Proof(tuple(self.reports), tuple(dict.fromkeys(self.unproven)))


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(entries))
    if not found:
        return []
    more = [f"    and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return [f"  {title}:", *(f"    {entry}" for entry in found[:_MOST_LINES]), *more]
