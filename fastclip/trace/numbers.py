"""Numbers that Python gives to operations on samples, held against those of the step before.

What Python has read from a batch can come back as a number, or as a constant tensor that is made of it,
and no operation connects the two. But it changes from batch to batch. A number that is the batch's size,
or follows it, is told from a constant in the same way: by another batch.
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
    """Of the step that is traced, and of the one before."""

    def __init__(self) -> None:
        self._now: dict[tuple, list[tuple[Any, int]]] = {}
        self._before: dict[tuple, list[tuple[Any, int]]] = {}
        self.answers: dict[tuple[str, str], bool] = {}
        """What comparisons of counts of several samples have given, all entries alike."""

    def begin(self) -> None:
        """Another step."""
        if self._now:
            self._before, self._now = self._now, {}

    def met(self, place: tuple, value: Any, samples: int) -> tuple[Any, int] | None:
        """Keep what an operation was given.

        Returns:
            What it was given there in the step before, and of how many samples that step's batch was.
        """
        here = self._now.setdefault(place, [])
        here.append((value, samples))
        before = self._before.get(place, ())
        return before[len(here) - 1] if len(here) <= len(before) else None


def is_fraction(value: Any) -> bool:
    """A number that counts nothing."""
    return isinstance(value, float) and not value.is_integer()


class Questions:
    """What Python asks of the batch: yes or no, or for a fraction of several samples.

    Attributes:
        answers: what it got. wanted: what it is to get, by number. whole: of each, whether it is if
            all of a mask is true, or if no sample is special and the answer was that none is. of: the
            sample that each is about, and the line; None if of several. masks: how many entries masks
            have.
    """

    def __init__(self) -> None:
        self.answers: list[bool | float] = []
        self.wanted: dict[int, bool | float] = {}
        self.whole: list[bool] = []
        self.of: list[tuple[int, str] | None] = []
        self.masks: set[int] = set()
        self._of_masks: set[int] = set()
        """Memory that says whether all of a mask is true."""
        self._of_each: dict[int, bool] = {}
        """Memory that says whether something is so of all samples (True), or of none (False)."""
        self._counts: dict[int, int] = {}
        """Memory that says how many entries of a mask are true, and how many there are."""

    def met(
        self, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow], out: Any
    ) -> None:  # fmt: skip
        """An operation on samples has run."""
        if not isinstance(out, Tensor) or out.dim() or kind.aliases:
            return
        x, own = tensors[0], key_of(out)
        self._counts.pop(own, None)
        self._of_each.pop(own, None)
        self._of_masks.discard(own)  # what lay there has been freed
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
        """What Python gets."""
        self.answers.append(self.wanted.get(len(self.answers), found))
        samples = {k for shadow in shadows for k in shadow.samples}
        self.of.append((samples.pop(), line) if len(samples) == 1 else None)
        keys = [*map(key_of, tensors)]
        none_special = any(self._of_each.get(key) is found for key in keys)
        self.whole.append(none_special or any(key in self._of_masks for key in keys))
        return self.answers[-1]


def _is_given(shadow: Shadow) -> bool:
    """Each entry follows from one sample as it was given, whatever its number is."""
    more = shadow.mixed or shadow.factor is not None or shadow.flags & (ORDER | LEARNED)
    return shadow.held and not more


class Python:
    """What Python may know of the batch of one step.

    Attributes:
        armed: it may have read numbers of samples. knows_several: of several.
        numbers: those of several samples, and where they were read. handed: the batch was observed
            from where a loader handed it out. met_others: tensors from elsewhere, as long as the batch,
            have come into operations on constants. extents: as many entries as there were in the batch,
            and in sums over samples.
    """

    def __init__(self) -> None:
        self.armed = self.knows_several = self.handed = self.met_others = False
        self.numbers: dict[float, str] = {}
        self.extents: set[int] = set()
        self._literals: set[int] = set()
        """Memory of tensors that were made of Python's numbers."""
        self.suspects: dict[int, Cause] = {}
        """Nodes of the graph in whose operations a number of samples may have had a part."""
        self.suspected: Cause | None = None
        """The last such number, if there was one."""
        self._read: list[weakref.ref[Tensor]] = []
        """Tensors that it has read."""

    @property
    def may_hold_samples(self) -> bool:
        """Constants of this step may follow from samples."""
        return self.armed or (self.met_others and not self.handed)

    def knows(self, value: float, line: str, *, several: bool) -> None:
        """It has read a number of one or of several samples."""
        self.armed = True
        if several:
            self.knows_several = True
            self.numbers.setdefault(value, line)

    def takes(self, x: Tensor, shadow: Shadow) -> None:
        """It has read all of a tensor."""
        self.armed = True
        if len(shadow.samples) != 1:
            self.knows_several = True
            self._read.append(weakref.ref(x))

    def suspect(self, cause: Cause | None, operands: Sequence[Tensor]) -> None:
        """The operation that runs was given a number that Python may have computed from samples.

        Args:
            cause: that number, if it is none of the operands.
        """
        self.suspected = cause or self.suspected
        if self.suspected and (number := _running_node(operands)) is not None:
            self.suspects.setdefault(number, self.suspected)

    def has_read(self, x: Tensor) -> bool:
        """The numbers of `x` are those of a tensor that it has read."""
        held = [y for read in self._read if (y := read()) is not None]
        return any(y.shape == x.shape and y.dtype == x.dtype and torch.equal(x, y) for y in held)

    def made(self, literal: bool, operands: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Constants were made, of Python's numbers (`literal`) or of other constants."""
        if literal or (self._literals and any(map(self.is_literal, operands))):
            self._literals.update(map(key_of, outs))

    def is_literal(self, x: Tensor) -> bool:
        """It was made of Python's numbers in this step."""
        return key_of(x) in self._literals


class Counts:
    """Means over as many entries as data chose: how many these are is a factor of their gradients.

    Attributes:
        nodes: numbers of the nodes of such means; of each the factor, and where it is.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, Cause]] = {}
        self._made: set[int] = set()

    def add(self, operands: Sequence[Tensor], line: str) -> None:
        """The operation that runs is one."""
        if (number := _running_node(operands)) is not None:
            cause = Cause("mean over entries that the batch selects", line, factor=True)
            self.nodes[number] = hash(("count", number)), cause

    def divide(self, tracer: Any, outs: Sequence[Tensor]) -> None:
        """An operation has run, which may be a part of the backward pass of one."""
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
    """The number of the node that autograd has made for the running operation, if it has."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return creation_number() - 1 if recorded else None


def number_arguments(kind: Kind, args: tuple) -> Iterator[float]:
    """What an operation was given as numbers of Python's."""
    for k in kind.numbers:
        value = args[k] if k < len(args) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield value


def exported(tracer: Any, what: str, x: Tensor) -> None:
    """Python or NumPy is about to get all numbers of a tensor, or a hook its gradient."""
    if what == "register_hook":
        tracer.report.hooked = True
        return
    shadow = tracer.shadow_of(x)
    if shadow.held or shadow.flags & RANDOM:
        tracer.read(what, [shadow], each=True)
        by_python = what in ("tolist", "numpy")
        if by_python and shadow.held and not tracer.lines.in_model():
            tracer.python.takes(x, shadow)


def held_against(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow]
) -> tuple[dict[float, tuple[int, bool]], bool]:  # fmt: skip
    """Suspect the numbers that an operation is given, and what was computed from such numbers.

    Returns:
        As of `_compared`; whether one of its own numbers is suspected.
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
    """Numbers that Python has read from several samples, and that are arguments again."""
    for value in number_arguments(kind, args):
        line = tracer.python.numbers.get(value)
        if line is None or (value % 1 and not 20 * value % 1):  # as 0.5: by accident
            continue
        of_formulas = {-1, 0, 1, 2}  # of `2 * x` and squares, and the largest of three classes
        if value not in of_formulas | _sizes(tracer, tensors):
            what = f"a number of several samples, read at {line}, in {kind.base}"
            tracer.python.suspect(Cause(what, tracer.lines.current()), tensors)


def _compared(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow]
) -> dict[float, tuple[int, bool]]:  # fmt: skip
    """Hold the numbers and constants that meet samples against those of the step before.

    Returns:
        Of each number: which power of the batch's size it is, and whether another batch has shown it.
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
    """The numbers, those in constant tensors too, and what identifies constants of several."""
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
    """Numbers that shapes explain."""
    return {tracer.memory.samples, *(n for x in tensors for n in (*x.shape, x.numel()))}


def _is_scale(value: float, before: float) -> bool:
    """The scale of a loss, which grows and shrinks."""
    return before > 0 < value and math.log2(value / before).is_integer()
