"""The findings of a trace, and the user's lines that they come from."""

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

from torch import nn

from fastclip.core.torch_names import creation_number, current_node, current_task, number_of
from fastclip.errors import PER_SAMPLE

HIDDEN = [str(Path(__file__).resolve().parents[1]), "<"]
"""Prefixes of names of files that are not the user's."""
_PACKAGES = ("/site-packages/", "/dist-packages/")
WHOLE_BATCH = "batch=True"
"""The option that asks a loss for one term of all samples instead of one per sample."""
BY_PYTHON = "numbers that Python has read"
"""A cause: samples may have been combined, and no operation shows it."""
_STANDARD = sysconfig.get_path("stdlib")


class Lines:
    """The user's lines of running operations; in a backward pass, of their forward operations."""

    def __init__(self) -> None:
        self._by_number: dict[int, str] = {}
        self._model: list[range] = []
        """Numbers of the nodes made by forward passes of the model."""
        self._entered: int | None = None
        self._again = 0
        """The number from which nodes are made by the running backward pass (checkpoints)."""

    @property
    def inside(self) -> bool:
        """Whether the model's own forward is running."""
        return self._entered is not None

    def enter_model(self) -> None:
        """Notes that the model's own forward begins."""
        self._entered = creation_number()

    def leave_model(self) -> None:
        """Notes that the forward has ended."""
        if self._entered is not None:
            self._model.append(range(self._entered, creation_number()))
            self._entered = None

    def enter_backward(self) -> None:
        """Notes that a backward pass begins."""
        self._again = creation_number()

    def in_model(self) -> bool:
        """Whether the model's own forward runs, or its backward pass."""
        if current_task() == -1:
            return self.inside
        node = current_node()
        if node is None:
            return False
        number = number_of(node)
        return self._again <= number < creation_number() or self.is_of_model(number)

    def is_of_model(self, number: int) -> bool:
        """Whether the model's own forward made the node of this number."""
        return any(number in made for made in self._model)

    def note(self) -> None:
        """Notes the line of a running operation. If it has a node in the graph, that is the newest."""
        newest = creation_number() - 1
        if newest not in self._by_number:
            self._by_number[newest] = line_of(sys._getframe(2))

    def current(self) -> str:
        """Returns `file:line` of the running operation."""
        if current_task() != -1 and (node := current_node()) is not None:
            line = self._by_number.get(number_of(node))
            if line:
                return line
        return line_of(sys._getframe(1))

    def forget(self) -> None:
        """Forgets the lines of a step after its graph is gone."""
        self._by_number.clear()
        self._model.clear()
        self._entered = None


def line_of(frame: FrameType | None) -> str:
    """Returns `file:line` of the nearest frame outside torch; for a library, of the user's too."""
    library = whole = ""
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        whole = whole or ("" if kind == "hidden" else _of_whole_batch(frame))
        if kind == "library":
            library = library or _shown(frame)
        elif kind == "user":
            here = f"{library}, called at {_shown(frame)}" if library else _shown(frame)
            return f"{here}{whole}"
        frame = frame.f_back
    return f"{library or 'unknown line'}{whole}"


def _of_whole_batch(frame: FrameType) -> str:
    """Returns a note if the running loss has one term for the whole batch (an option of MONAI)."""
    code = frame.f_code
    if code.co_name != "forward" or code.co_varnames[:1] != ("self",):
        return ""
    loss = frame.f_locals.get("self")
    asked = isinstance(loss, nn.Module) and getattr(loss, "batch", False) is True
    return f", in {type(loss).__name__}({WHOLE_BATCH})" if asked else ""


@cache
def _kind_of(file: str) -> str:
    """Classifies a file: "user", "library", or "hidden" (torch's, Python's, fastclip's)."""
    if file.startswith(tuple(HIDDEN)) or "/torch/" in file:
        return "hidden"
    if any(folder in file for folder in _PACKAGES):
        return "library"
    return "hidden" if file.startswith(_STANDARD) else "user"


def _shown(frame: FrameType) -> str:
    return f"{basename(frame.f_code.co_filename)}:{frame.f_lineno}"


IGNORED_LABELS = "no label is ignored"
"""A guard: every later step must count all labels of samples in a mean over classes."""


@dataclass(frozen=True)
class Cause:
    """An operation whose result depends on several samples.

    Args:
        operation: torch's name of it. line: of the user's code. shapes: of its operands.
        backward: it ran in the backward pass. factor: it multiplied with, or divided by, a number of
            several samples. inside: it ran in the model's own forward, or its backward pass.
    """

    operation: str
    line: str
    shapes: tuple[tuple[int, ...], ...] = ()
    backward: bool = False
    factor: bool = False
    inside: bool = False

    def __str__(self) -> str:
        shapes = " and ".join(str(list(shape)) for shape in self.shapes[:2])
        where = "the backward pass of " if self.backward else ""
        return f"{self.operation}{f' of {shapes}' if shapes else ''} at {where}{self.line}"


_SAID = {
    "factor": "Your loss is divided or multiplied by a number of the whole batch ({what}), so samples "
    "are not independent. {denominator}.",
    "calls": "Your loss joins calls of the model on different samples of the batch, so these would be "
    "clipped as the same samples. Pass the whole batch to every call, its samples in one order.",
    "place": "{use} holds samples in other positions in this batch than in the dry run. Pass the batch "
    "to the model again, and fastclip traces it as a whole.",
    "factors": "Your loss mixes samples: its parts are divided by different numbers of the batch "
    "({what}). Divide each sample's loss by its own numbers, or by constants.",
    "repeated": "Your loop passes the model a batch that holds a sample at several positions, so it "
    "contributes several times. Pass each sample of the loader's batch once.",
    "views": "Your loop passes views of several samples where views=K expects views of one, so they "
    "would be clipped as one. Put the K views of each sample next to each other, as "
    "x.repeat_interleave(K, 0) does.",
    "input": "Your batch {may_mix} samples before the model: {what} reaches an input. Change each "
    "sample by itself, in torch or in the data set.",
    "read": "Your loss depends on {what}, so samples are not independent. Compute the loss without "
    "numbers that Python reads from the batch.",
    "order": "Your loss depends on a sample's position in the batch ({what}), so samples are not "
    "independent. Use the same constants for all samples.",
    "python": "Your loss may mix samples: {what} weigh samples, and fastclip cannot identify which "
    "sample they belong to. Compute them in torch, or in the data set.",
    "mixes": "Your loss mixes samples: {what} reaches the gradient of {use}, so the guarantee does not "
    "hold. {fix}",
}
"""Texts of errors by the kind of finding; "python" and "mixes" are for every other kind."""


@dataclass(frozen=True)
class Finding:
    """Why the trace does not prove that samples are independent.

    Args:
        kind: "forward", "gradient", "order", "unseen", "factor", "factors", "repeated", "calls",
            "views", "read", "input" or "outside".
        use: the layer or function with the affected parameter.
    """

    kind: str
    cause: Cause | None
    use: str

    @property
    def said(self) -> str:
        """Returns the error's message: what mixes samples, where, and one fix."""
        what = str(self.cause) if isinstance(self.cause, Cause) else "an operation"
        kind = self.kind
        if kind not in _SAID:
            kind = "python" if BY_PYTHON in what else "mixes"
        whole = "Pass batch=False for one loss per sample."
        return _SAID[kind].format(
            what=what, use=repr(self.use) if self.use else "the model",
            may_mix="may mix" if BY_PYTHON in what else "mixes",
            denominator=self._denominator if kind == "factor" else "",
            fix=whole if WHOLE_BATCH in what else "Compute each sample's loss from that sample alone.",
        )  # fmt: skip

    @property
    def _denominator(self) -> str:
        """Returns what to divide a loss by, instead of labels or tokens of the batch."""
        cause = self.cause
        if isinstance(cause, Cause) and cause.inside:
            return f"{PER_SAMPLE}, or return one loss per sample, [b]"
        if isinstance(cause, Cause) and cause.operation.startswith("nll_loss"):
            return (
                "Use fastclip.losses.per_sample_cross_entropy(...).mean(), or "
                'make_private(criterion=criterion, model_loss="per_sample")'
            )
        return (
            "Use a public denominator, len(batch) times a fixed max_length, or "
            "clipping='automatic' with gamma=0"
        )


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
    """The result of one traced step."""

    findings: list[Finding] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    probed: dict[str, int] = field(default_factory=dict)
    """Operations without a rule, and how often the local probe ran each."""
    by_value: list[str] = field(default_factory=list)
    """Statements that hold for the values of this batch."""
    guards: set[str] = field(default_factory=set)
    """Statements that must hold in every later step."""
    constant_labels: set[int] = field(default_factory=set)
    """For each mean over classes, the number of constant ignored labels per sample."""
    outside: list[tuple[str, str]] = field(default_factory=list)
    """Trained tensors outside the model: shape and line."""
    carried: list[Cause | None] = field(default_factory=list)
    """Tensors computed from the batch that are still held after the step."""
    uses: dict[str, Any] = field(default_factory=dict)
    """Shadows of the outputs of layers and uses, by their name."""
    factors: dict[int | None, Any] = field(default_factory=dict)
    """Numbers of the whole batch that gradients share, and where each became a factor of them."""
    mixing: list[Cause] = field(default_factory=list)
    """Operations that combined samples, in their order."""
    shifts: set[int] = field(default_factory=set)
    """Powers of the batch size that may have multiplied samples before they were summed."""
    operations: int = 0
    drew: bool = False
    """Random numbers were drawn."""
    by_chance: bool = False
    """Positions or factors of samples depend on several random numbers."""
    chance_of_all: bool = False
    """Numbers that depend on several random ones met samples, the same for all of them."""
    unknown: bool = False
    """A constant met samples that no operation made, and that did not exist before."""
    counted: bool = False
    """It holds for the numbers of entries that this batch selected; the next batch is traced too."""
    hooked: bool = False
    """Hooks were set on gradients of tensors."""

    def add(self, kind: str, cause: Any, use: str) -> None:
        """Adds a finding once."""
        found = Finding(kind, cause if isinstance(cause, Cause) else None, use)
        if found not in self.findings:
            self.findings.append(found)

    def of(self, kinds: Iterable[str]) -> list[Finding]:
        """Returns the findings of these kinds."""
        return [found for found in self.findings if found.kind in kinds]

    @property
    def verdict(self) -> str:
        """ "coupled", or how far the independence of samples is proven: "path" for the branches of this
        step, "values" for the values of this batch, or "proven".
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
    """The results of the traced steps of a private model; `print` it.

    Args:
        steps: a report for each traced step. unproven: parts of the model's forward that are
            compared by values, because the trace does not prove them.
    """

    steps: tuple[Report, ...]
    unproven: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.steps:
            return "No step has been traced yet. Call explain() after the first backward pass."
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
        return "\n".join([*lines, *_listed("compared by values", self.unproven)])


@dataclass
class TraceLog:
    """The traced steps of one model, also kept after the model is gone."""

    reports: list[Report] = field(default_factory=list)
    """The newest last."""
    unproven: list[str] = field(default_factory=list)
    error: Exception | None = None
    """The last error of a traced step."""

    @property
    def proof(self) -> Proof:
        return Proof(tuple(self.reports), tuple(dict.fromkeys(self.unproven)))


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(entries))
    if not found:
        return []
    more = [f"    and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return [f"  {title}:", *(f"    {entry}" for entry in found[:_MOST_LINES]), *more]
