"""Numbers that Python gives to operations on samples, compared with those of the previous step.

A number that Python has read from a batch can come back as a number, or as a constant tensor made from
it. No operation connects the two, but it changes from batch to batch. Another batch also distinguishes a
constant from the batch size, or a number that depends on it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.core.torch_names import creation_number, current_node, current_task, number_of
from fastclip.trace.findings import Cause
from fastclip.trace.memory import (
    LEARNED,
    ORDER,
    RANDOM,
    READ,
    TRAINED,
    Shadow,
    content_of,
    key_of,
)
from fastclip.trace.operation import Kind

LARGEST = 4096
"""Entries of a constant that is compared."""
_WEIGHS = frozenset((
    "mul", "div", "index", "index_select", "gather", "embedding", "nll_loss_forward",
    "nll_loss2d_forward", "binary_cross_entropy_with_logits",
))  # fmt: skip
"""Operations in which a constant tensor weighs samples."""
_NEAR = 1e-6


class Numbers:
    """The numbers of the traced step, and of the previous one."""

    def __init__(self) -> None:
        self._now: dict[tuple, list[tuple[Any, int]]] = {}
        self._before: dict[tuple, list[tuple[Any, int]]] = {}
        self.answers: dict[tuple[str, str], bool] = {}
        """Results of comparisons of counts of several samples, equal for all entries."""

    def begin(self) -> None:
        """Begins a step."""
        if self._now:
            self._before, self._now = self._now, {}

    def met(self, place: tuple, value: Any, samples: int) -> tuple[Any, int] | None:
        """Stores an operation's number.

        Returns:
            The number given there in the previous step, and the size of that step's batch.
        """
        here = self._now.setdefault(place, [])
        here.append((value, samples))
        before = self._before.get(place, ())
        return before[len(here) - 1] if len(here) <= len(before) else None


def is_fraction(value: Any) -> bool:
    """Whether a number is not a count."""
    return isinstance(value, float) and not value.is_integer()


class Questions:
    """Questions of Python about the batch: yes or no, or a fraction of several samples.

    Attributes:
        answers: the answers given. wanted: answers to give, by number. whole: for each question,
            whether it asks if all of a mask is true, or if any sample is an edge sample, with the
            answer no. of: the sample that each is about, and the line; None for several. masks:
            numbers of entries of masks.
    """

    def __init__(self) -> None:
        self.answers: list[bool | float] = []
        self.wanted: dict[int, bool | float] = {}
        self.whole: list[bool] = []
        self.of: list[tuple[int, str] | None] = []
        self.masks: set[int] = set()
        self._of_masks: set[int] = set()
        """Memory with the answer whether all of a mask is true."""
        self._of_each: dict[int, bool] = {}
        """Memory with the answer whether something holds for all samples (True), or for any (False)."""
        self._counts: dict[int, int] = {}
        """Memory with the number of true entries of a mask, and the size of the mask."""

    def met(
        self, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow], out: Any
    ) -> None:  # fmt: skip
        """Notes an operation on samples."""
        if not isinstance(out, Tensor) or out.dim() or kind.aliases:
            return
        x, own = tensors[0], key_of(out)
        self._counts.pop(own, None)
        self._of_each.pop(own, None)
        self._of_masks.discard(own)  # its old contents were freed
        if kind.name in ("all", "any") and _is_given(shadows[0]):
            self._of_each[own] = kind.name == "all"
        if kind.name == "all" and x.numel() in self.masks and not x.is_floating_point():
            self._of_masks.add(own)
        elif kind.name == "sum" and x.numel() in self.masks and x.dtype == torch.bool:
            self._counts[own] = x.numel()
        elif kind.name in ("eq", "ne") and self._counts.get(key_of(x)) == args[1]:
            self._of_masks.add(own)

    def answer(
        self, found: bool | float, tensors: Sequence[Tensor], shadows: Sequence[Shadow], line: str
    ) -> bool | float:
        """Returns the answer that Python gets."""
        self.answers.append(self.wanted.get(len(self.answers), found))
        samples = {k for shadow in shadows for k in shadow.samples}
        self.of.append((samples.pop(), line) if len(samples) == 1 else None)
        keys = [*map(key_of, tensors)]
        none_edge = any(self._of_each.get(key) is found for key in keys)
        self.whole.append(none_edge or any(key in self._of_masks for key in keys))
        return self.answers[-1]


def _is_given(shadow: Shadow) -> bool:
    """Whether each entry depends on one given sample, and not on its position."""
    more = shadow.mixed or shadow.factor is not None or shadow.flags & (ORDER | LEARNED)
    return shadow.held and not more


class Python:
    """What Python may know of the batch of one step.

    Attributes:
        armed: it may have read numbers of samples. knows_several: of several.
        numbers: those of several samples, and where they were read. handed: the batch was observed
            from the loader on. met_others: tensors from elsewhere, as long as the batch, were used in
            operations on constants. extents: numbers of entries in the batch and in sums over samples.
    """

    def __init__(self) -> None:
        self.armed = self.knows_several = self.handed = self.met_others = False
        self.numbers: dict[float, str] = {}
        self.extents: set[int] = set()
        self._literals: set[int] = set()
        """Memory of tensors made from Python's numbers."""
        self.suspects: dict[int, Cause] = {}
        """Nodes of the graph whose operations may have used a number of samples."""
        self.suspected: Cause | None = None
        """The last such number, if there was one."""
        self._read: list[weakref.ref[Tensor]] = []
        """Tensors that Python has read."""

    @property
    def may_hold_samples(self) -> bool:
        """Whether constants of this step may depend on samples."""
        return self.armed or (self.met_others and not self.handed)

    def knows(self, value: float, line: str, *, several: bool) -> None:
        """Notes that Python has read a number of one or several samples."""
        self.armed = True
        if several:
            self.knows_several = True
            self.numbers.setdefault(value, line)

    def takes(self, x: Tensor, shadow: Shadow) -> None:
        """Notes that Python has read all of a tensor."""
        self.armed = True
        if len(shadow.samples) != 1:
            self.knows_several = True
            self._read.append(weakref.ref(x))

    def suspect(self, cause: Cause | None, operands: Sequence[Tensor]) -> None:
        """Notes that the running operation uses a number that Python may have computed from samples.

        Args:
            cause: that number, if it is not an operand.
        """
        self.suspected = cause or self.suspected
        if self.suspected and (number := _running_node(operands)) is not None:
            self.suspects.setdefault(number, self.suspected)

    def has_read(self, x: Tensor) -> bool:
        """Whether `x` has the values of a tensor that Python has read."""
        held = [y for read in self._read if (y := read()) is not None]
        return any(y.shape == x.shape and y.dtype == x.dtype and torch.equal(x, y) for y in held)

    def made(self, literal: bool, operands: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Notes constants made from Python's numbers (`literal`) or from other constants."""
        if literal or (self._literals and any(map(self.is_literal, operands))):
            self._literals.update(map(key_of, outs))

    def is_literal(self, x: Tensor) -> bool:
        """Whether it was made from Python's numbers in this step."""
        return key_of(x) in self._literals


class Counts:
    """Means over entries selected by data: their number is a factor of the gradients.

    Attributes:
        nodes: numbers of the nodes of such means, each with its factor and line.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, Cause]] = {}
        self._made: set[int] = set()

    def add(self, operands: Sequence[Tensor], line: str) -> None:
        """Notes that the running operation is such a mean."""
        if (number := _running_node(operands)) is not None:
            cause = Cause("mean over entries that the batch selects", line, factor=True)
            self.nodes[number] = hash(("count", number)), cause

    def divide(self, tracer: Any, outs: Sequence[Tensor]) -> None:
        """Gives the factor to the outputs of an operation in such a mean's backward pass."""
        node = current_node() if current_task() != -1 else None
        found = None if node is None else self.nodes.get(number_of(node))
        if found is None:
            return
        number, cause = found
        for x in outs:
            own = tracer.shadow_of(x)
            if x.is_floating_point() and own.factor not in self._made:
                factor = hash((own.factor, number))
                self._made.add(factor)
                shadow = tracer.made(own.sample, own.flags, part=own.part, factor=factor)
                tracer.memory.write(x, shadow, cause)


def _running_node(operands: Sequence[Tensor]) -> int | None:
    """Returns the number of autograd's node for the running operation, if there is one."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return creation_number() - 1 if recorded else None


def number_arguments(kind: Kind, args: tuple) -> Iterator[float]:
    """Yields the Python numbers among an operation's arguments."""
    for k in kind.numbers:
        value = args[k] if k < len(args) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield value


def exported(tracer: Any, what: str, x: Tensor) -> None:
    """Notes that Python or NumPy reads all numbers of a tensor, or a hook its gradient."""
    if what == "register_hook":
        tracer.report.hooked = True
        return
    shadow = tracer.shadow_of(x)
    if shadow.held or shadow.flags & RANDOM:
        tracer.read(what, [shadow], each=True)
        by_python = what in ("tolist", "numpy")
        if by_python and shadow.held and not tracer.lines.in_model():
            tracer.python.takes(x, shadow)


def compared_with_before(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow]
) -> tuple[dict[float, tuple[int, bool]], bool]:  # fmt: skip
    """Marks suspected numbers of an operation, and results of such numbers.

    Returns:
        The result of `_compared`, and whether one of its own numbers is suspected.
    """
    python = tracer.python
    if current_task() != -1:
        return {}, False
    if any(s.flags & READ for s in shadows):
        python.suspect(None, tensors)
    before, python.suspected = python.suspected, None
    powers = {}
    if not tracer.lines.in_model():
        with tracer.aside():
            powers = _compared(tracer, kind, args, tensors, shadows)
    if python.numbers and kind.numbers:
        _come_back(tracer, kind, args, tensors)
    suspected = python.suspected is not None
    python.suspected = python.suspected or before
    return powers, suspected


def _come_back(tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor]) -> None:
    """Marks arguments that equal numbers which Python has read from several samples."""
    for value in number_arguments(kind, args):
        line = tracer.python.numbers.get(value)
        if line is None or (value % 1 and not 20 * value % 1):  # as 0.5: by coincidence
            continue
        of_formulas = {-1, 0, 1, 2}  # of `2 * x` and squares, and the largest of three classes
        if value not in of_formulas | _sizes(tracer, tensors):
            what = f"a number of several samples, read at {line}, in {kind.base}"
            tracer.python.suspect(Cause(what, tracer.lines.current()), tensors)


def _compared(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow]
) -> dict[float, tuple[int, bool]]:  # fmt: skip
    """Compares the numbers and constants that meet samples with those of the previous step.

    Returns:
        For each number the power of the batch size that it is, and whether another batch confirms it.
    """
    powers: dict[float, tuple[int, bool]] = {}
    several = any(s.held and len(s.samples) != 1 for s in shadows)
    summed = any(s.mixed for s in shadows)
    line = ""
    for value, tensor in _given(tracer, kind, args, tensors, shadows):
        line = line or tracer.lines.current()
        if isinstance(value, int) and tensor is not None:
            before = tracer.numbers.met((line, kind.name, "content"), value, tracer.memory.samples)
            changed = several and before is not None and before[0] != value
            if changed and (
                tracer.python.armed or tracer.python.is_literal(tensor) or not tracer.python.handed
            ):
                what = f"a constant of shape {list(tensor.shape)} that changes"
                tracer.python.suspect(_changing(what, kind, line), tensors)
            continue
        before = tracer.numbers.met((line, kind.name), value, tracer.memory.samples)
        powers[value] = power, _ = _power(
            value, before, tracer.memory.samples, tracer.python.extents
        )
        changed = before is not None and before[0] != value and not power
        if not changed or not several or _is_size(value, tracer, tensors):
            continue
        counts = summed and kind.name in ("mul", "div") and value == int(value) and abs(value) > 2
        elsewhere = tensor is not None and not tracer.python.handed and kind.name in _WEIGHS
        if tracer.python.armed or elsewhere or (counts and not _is_scale(value, before[0])):
            what = f"a number that changes ({before[0]:g}, {value:g})"
            tracer.python.suspect(_changing(what, kind, line), tensors)
    return powers


def _changing(what: str, kind: Kind, line: str) -> Cause:
    return Cause(f"{what} from batch to batch, in {kind.base}", line)


def _given(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow]
) -> Iterator[tuple[Any, Tensor | None]]:  # fmt: skip
    """Yields the numbers, also those in constant tensors, and ids of larger constants."""
    for value in number_arguments(kind, args):
        if math.isfinite(value):
            yield float(value), None
    for x, shadow in zip(tensors, shadows, strict=True):
        if shadow.held or shadow.flags & (RANDOM | TRAINED) or isinstance(x, nn.Parameter):
            continue
        if x.is_meta or x.device.type != "cpu" or not 0 < x.numel() <= LARGEST or x.is_complex():
            continue
        if x.layout is not torch.strided or tracer.memory.knows(x) or x in tracer.known:
            continue
        plain = x.detach()
        if plain.numel() == 1 or (
            kind.name in ("mul", "div") and bool((plain == plain.reshape(-1)[0]).all())
        ):
            if math.isfinite(plain.reshape(-1)[0]):
                yield float(plain.reshape(-1)[0]), x
        elif kind.name in _WEIGHS and x.is_floating_point():
            yield content_of(x), x


def _power(
    value: float, before: tuple[Any, int] | None, samples: int, extents: set[int]
) -> tuple[int, bool]:
    if before is not None and before[1] != samples and isinstance(before[0], float):
        if before[0] == value:
            return 0, True
        ratio = samples / before[1]
        for power in (1, -1):
            if before[0] and math.isclose(value / before[0], ratio**power, rel_tol=_NEAR):
                return power, True
    sizes = {samples, *(n for n in extents if n % samples == 0)} if samples > 1 else set()
    if value in sizes:
        return 1, False
    if 0 < value < 1 and _is_whole(1 / value) and round(1 / value) in sizes:
        return -1, False
    return 0, False


def _is_whole(value: float) -> bool:
    return math.isclose(value, round(value), rel_tol=_NEAR)


def _is_size(value: float, tracer: Any, tensors: Sequence[Tensor]) -> bool:
    return value in _sizes(tracer, tensors) or value in tracer.python.extents


def _sizes(tracer: Any, tensors: Sequence[Tensor]) -> set[int]:
    """Returns numbers that shapes explain."""
    return {tracer.memory.samples, *(n for x in tensors for n in (*x.shape, x.numel()))}


def _is_scale(value: float, before: float) -> bool:
    """Whether a number is a loss scale, which grows and shrinks."""
    return before > 0 < value and math.log2(value / before).is_integer()
