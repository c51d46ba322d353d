"""The law of independent samples: each entry depends on one sample, and all samples are treated alike.

Every use of a trained tensor adds f(operands, gradient of its output) to the sum of gradients. If each
entry of the output and of the gradient depends on one and the same sample, that term belongs to that
sample. The computation for a sample must not depend on its position in the batch either. A constant with
different values alongside different samples reveals the position: masks of ones pass, `arange(b)` does
not. Parts with only some samples may be joined again (`cat`, `stack`, writes into slices) if all were
made in the same way. So a loop over samples is proven, and `cat([h[:2], 1.5 * h[2:]])` is not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Container, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.findings import Read, Report
from fastclip.trace.memory import (
    BY_VALUE,
    CHANCE,
    MOVED,
    ORDER,
    RANDOM,
    TRAINED,
    Shadow,
    content_of,
)
from fastclip.trace.operation import Kind, is_leaf

_LARGEST = 65536
"""Entries of a constant whose content identifies it."""
_NEAR = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative tolerance for values computed from parameters: the order of sums may vary."""
_OF_POSITION = frozenset(("select_backward", "slice_backward"))
"""Their numbers say which part it is, not how it was computed."""


class Law:
    """Compares the gradients of one step with what they belong to, and reports to the tracer.

    Args:
        tracer: of the step.
    """

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self._rows: Tensor | None = None
        self._met = False
        self._chance = generators()
        self._covered: dict[Hashable, tuple[set[int], object, str]] = {}
        """How some samples were treated, and which these are."""

    def gradient_arrived(
        self, use: str, key: Hashable, out: Shadow, cause: object, gradient: Tensor | None
    ) -> None:
        """A gradient has arrived at what a trained tensor and data have made.

        Args:
            use: names it in findings. key: identifies the trained tensors. out: the output's shadow.
            cause: where the output first depended on several samples. gradient: of the output;
            None if it is zero.
        """
        tracer = self.tracer
        if gradient is None:
            return
        report, got = tracer.report, tracer.shadow_of(gradient)
        with tracer.aside(), torch.no_grad():
            if not got.held and got.factor is None and not bool(gradient.any()):
                return
            of_gradient = tracer.memory.cause(gradient)
            report.factors.setdefault(got.factor, None if got.factor is None else of_gradient)
            flags = out.flags | got.flags
            if not flags & ORDER and self._is_uneven(out, got, gradient):
                flags |= BY_VALUE if is_branched(tracer) else ORDER
            if flags & BY_VALUE and use not in report.by_value:
                report.by_value.append(use)
            if out.mixed or out.factor is not None:
                report.add("unseen" if _is_unseen(out) else "forward", cause, use)
            elif not _is_same(out, got):
                kind = "factors" if getattr(of_gradient, "factor", False) else "gradient"
                report.add("unseen" if _is_unseen(got) else kind, of_gradient, use)
            elif flags & ORDER:
                report.add("order", cause or of_gradient, use)
            elif not flags & MOVED:
                self._cover(use, key, out, got, cause or of_gradient)

    def is_given(self, rows: Tensor | None) -> bool:
        """Whether the model was called with the same samples for all gradients of this step.

        Args:
            rows: the sample of each row of its input; None: row i is sample i.
        """
        before, self._rows = self._rows if self._met else rows, rows
        self._met = True
        return before is rows or (
            before is not None and rows is not None and torch.equal(before, rows)
        )

    def _is_uneven(self, out: Shadow, got: Shadow, gradient: Tensor) -> bool:
        """Whether the computation for a sample depends on its position in the batch."""
        own = out.sample
        if own is None or (out.flags | got.flags) & (MOVED | BY_VALUE) or not out.whole:
            return False
        if got.sample is None:
            return changes_alongside(gradient, own, got)
        both = at.joined(own, got.sample)
        assert both is not None
        return any(
            bool((none := x == at.NONE).any()) and at.differs(none, both) for x in (own, got.sample)
        )

    def _cover(self, use: str, key: Hashable, out: Shadow, got: Shadow, cause: object) -> None:
        if (out.whole or not out.held) and (got.whole or not got.held):
            return
        way = (key, out.part, got.part if got.held else None)
        seen = self._covered.setdefault(way, (set(), cause, use))[0]
        seen |= got.samples if got.held else out.samples

    def end_step(self, reached: Container[int] | None = None) -> None:
        """Ends the step, after all gradients have arrived.

        Args:
            reached: numbers of the nodes below the losses; None: all nodes.
        """
        report = self.tracer.report
        for number, cause in self.tracer.python.suspects.items():
            if reached is None or number in reached:
                report.add("read", cause, "your loss")
        if generators() != self._chance:
            report.reads.append(Read("random numbers of Python or NumPy", "chance", "unknown line"))
        samples = self.tracer.memory.samples if self._rows is None else self._rows.unique().numel()
        branched = is_branched(self.tracer)
        for seen, cause, use in self._covered.values():
            if len(seen) < samples and not branched:
                report.add("order", cause, use)
        cause = next((x for x in report.factors.values() if x is not None), None)
        if len(report.factors) > 1:
            report.add("factors", cause, "gradients that share no factor")
        elif report.factors.keys() - {None}:
            report.add("factor", cause, "all gradients")
        self._covered.clear()


def generators() -> tuple:
    """Returns the states of the generators that Python may branch on."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, key, *rest = numpy.random.get_state()
    return random.getstate(), name, key.tobytes(), *rest


def _is_unseen(shadow: Shadow) -> bool:
    return shadow.sample is not None and bool((shadow.sample == at.UNSEEN).any())


def _is_same(out: Shadow, got: Shadow) -> bool:
    """Whether each entry depends on the same sample, or none, in both."""
    if got.mixed:
        return False
    if out.sample is None or got.sample is None:
        return True
    differ = (got.sample != out.sample) & (got.sample != at.NONE) & (out.sample != at.NONE)
    return not bool(differ.any())


# Constants alongside samples


def ordered(
    tracer: Any, kind: Kind, found: list[Shadow], tensors: Sequence[Tensor],
    shadows: Sequence[Shadow], outs: Sequence[Tensor],
) -> list[Shadow]:  # fmt: skip
    """Flags an operation's outputs if constants among its operands differ between samples.

    Args:
        found: the rule's result. tensors, shadows: its operands. outs: its outputs.
    """
    own = found[0].sample if found else None
    if own is None or found[0].flags & ORDER:
        return found
    moved = bool(found[0].flags & MOVED)
    if kind.aligned == "together":
        random = all(s.held or s.flags & RANDOM for s in shadows)
        changes = not random and is_uneven(outs[0], own)
    else:
        axes = [axis - own.dim() for axis, n in enumerate(own.shape) if n > 1]
        changes = False
        backward = kind.aligned == "gradient"
        for x, shadow in zip(tensors, shadows, strict=True):
            if shadow.held or _is_drawn_for_each(shadow) or x.is_meta:
                continue
            if backward and (x is not tensors[0] or x.shape != outs[0].shape):
                continue
            alongside = any(-a <= x.dim() and x.shape[a] > 1 and x.stride(a) for a in axes)
            if kind.aligned == "stacked":
                changes = changes or _is_stacked(x, own)
            elif alongside:
                changes = changes or changes_alongside(x, own, shadow, moved)
    return [flagged(tracer, f) for f in found] if changes else found


def flagged(tracer: Any, shadow: Shadow, flag: int = ORDER) -> Shadow:
    """Returns the same shadow, flagged as dependent on a sample's position."""
    return tracer.made(
        shadow.sample, shadow.flags | flag,
        degree=shadow.degree, part=shadow.part, factor=shadow.factor,
    )  # fmt: skip


def changes_alongside(x: Tensor, own: Tensor, shadow: Shadow, moved: bool = False) -> bool:
    """Whether a constant has different values alongside different samples.

    Args:
        own: the attribution of the other operand. shadow: the constant's. moved: samples lie where data
            put them.
    """
    if _is_drawn_for_each(shadow) or x.numel() < 2 or x.is_meta:
        return False
    try:
        torch.broadcast_shapes(x.shape, own.shape)
    except RuntimeError:
        return False
    if shadow.flags & TRAINED and x.requires_grad and is_leaf(x):  # one trained entry per position
        x = torch.arange(x.numel(), device="cpu").view(x.shape)
    derived = shadow.flags & TRAINED and x.requires_grad and not is_leaf(x)
    return at.differs(x, own, moved, _NEAR.get(x.dtype, 0.0) if derived else 0.0)


def _is_drawn_for_each(shadow: Shadow) -> bool:
    """Whether its entries are drawn independently, from one distribution."""
    return bool(shadow.flags & RANDOM and not shadow.flags & CHANCE)


def _is_stacked(x: Tensor, own: Tensor) -> bool:
    stacked = x.dim() > 2 and own.dim() == x.dim() and x.shape[0] > 1 < own.shape[0]
    if not stacked or not x.stride(0):
        return False
    return at.differs(x.flatten(-2)[..., None, :], own.amax((-1, -2), keepdim=True))


def is_uneven(x: Tensor, sample: Tensor) -> bool:
    """Whether constant entries, among those of samples, differ between samples."""
    none = sample == at.NONE
    if x.is_meta or not x.numel() or x.is_complex() or not bool(none.any()) or bool(none.all()):
        return False
    values = x.detach().double().expand(x.shape)
    for axis in range(sample.dim()):
        if not at.lie_along(sample, axis):
            continue  # only one sample lies along this axis
        here = none.expand(x.shape)
        high = values.masked_fill(~here, -torch.inf).movedim(axis, 0)
        least, some = values.masked_fill(~here, torch.inf).movedim(axis, 0), here.movedim(axis, 0)
        if (
            order := _in_equal_shares(sample, axis)
        ) is not None:  # n entries per sample, heads perhaps
            high, least, some = high[order], least[order], some[order]
        high, least, some = high.amax(0), least.amin(0), some.any(0)
        if bool(((high > least) & some).any()):
            return True
    return False


def _in_equal_shares(sample: Tensor, axis: int) -> Tensor | None:
    """Returns the entries along an axis by sample [b, n], if each belongs to one, and all have n."""
    line = at.reduced(sample, [d for d in range(sample.dim()) if d != axis])
    if line is None or at.is_mixed(line):
        return None
    line = line.reshape(-1)
    _, counts = line[line != at.NONE].unique(return_counts=True)
    if len(counts) < 2 or int(counts.min()) != int(counts.max()) or int(counts.sum()) < len(line):
        return None
    return line.argsort(stable=True).view(len(counts), -1)


# Random numbers

_COPYING = frozenset(("_to_copy", "clone", "copy", "detach", "alias", "lift_fresh"))


def drawn(kind: Kind, tensors: Sequence[Tensor], shadows: Sequence[Shadow], *, again: bool) -> int:
    """Returns RANDOM if an operation without samples draws each entry independently. Returns CHANCE if
    entries depend on several draws, or on one that differs between entries (from changing numbers, by a
    permutation).

    Args:
        again: it has drawn the numbers of the step before, which are constants.
    """
    draws, random = kind.draws and not again, any(s.flags & RANDOM for s in shadows)
    alone = (kind.random and draws) or (kind.pointwise and random)
    if any(s.flags & CHANCE for s in shadows) or (draws and not alone):
        chance = True
    elif draws:
        written = kind.written(tuple(tensors), {})
        given = (x for x in tensors if x.numel() > 1 and not any(x is y for y in written))
        chance = any(bool((x != x.reshape(-1)[0]).any()) for x in given if not x.is_meta)
    else:
        one_by_one = kind.pointwise or kind.aliases or kind.name in _COPYING
        chance = random and not one_by_one
    return RANDOM * alone | CHANCE * chance


def meets_chance(
    report: Report, kind: Kind, x: Tensor, shadow: Shadow, shadows: Sequence[Shadow]
) -> None:  # fmt: skip
    """Notes that samples meet random numbers, which may place samples or weigh one by the others.

    Args:
        x: the random operand. shadow: its shadow. shadows: of all operands.
    """
    if not shadow.flags & CHANCE:
        report.by_chance |= not (kind.pointwise or x.is_floating_point())
    elif kind.pointwise and not any(at.meet(x.shape, s.sample) for s in shadows):
        report.chance_of_all = True
    else:
        report.by_chance = True


# Tensors that no operation of the step has made

_MATRICES = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution"))


def lies_across(tracer: Any, kind: Kind, x: Tensor, axis: int, shadows: Sequence[Shadow]) -> bool:
    """Whether an axis as long as the batch is not the batch axis: the samples it meets lie along another
    one, or outside the model it meets only parameters, entry by entry (a penalty on their change).

    Args:
        x: an operand. axis: its axis. shadows: of all operands.
    """
    alone = not any(s.held for s in shadows) and any(s.flags & TRAINED for s in shadows)
    if alone and kind.pointwise and not tracer.lines.in_model():
        return True
    if kind.name in _MATRICES:
        return True
    behind = x.dim() - axis
    held = [s.sample for s in shadows if s.sample is not None and s.sample.numel() > 1]
    return kind.pointwise and any(own.dim() < behind or own.shape[-behind] == 1 for own in held)


def samples_beside(x: Tensor, samples: int, shadows: Sequence[Shadow]) -> at.Attribution:
    """Returns the samples of an operand's rows that are as many as `x`'s, more than one per sample."""
    if not x.dim() or not x.stride(0) or len(x) % samples:
        return None
    for shadow in shadows:
        own = shadow.sample
        if own is not None and own.dim() and len(own) == len(x) == own.numel():
            return None if shadow.flags & MOVED else own.reshape([-1] + [1] * (x.dim() - 1))
    return None


# Parts of a batch


def is_branched(tracer: Any) -> bool:
    """Whether Python knows numbers or lengths of single samples, and may choose parts by them."""
    return tracer.memory.lengths_read or any(r.of == "one sample" for r in tracer.report.reads)


def parts_described(
    tracer: Any, kind: Kind, args: tuple, tensors: Sequence[Tensor], shadows: Sequence[Shadow],
    found: Sequence[Shadow], outs: Sequence[Tensor],
) -> list[Shadow]:  # fmt: skip
    """Gives each part of the outputs a number for how it was made."""
    with tracer.aside():
        made = [_identified(tracer, x, s) for x, s in zip(tensors, shadows, strict=True)]
        return [
            _described(tracer, kind, args, made, shadows, f, out)
            for f, out in zip(found, outs, strict=True)
        ]


def _described(
    tracer: Any, kind: Kind, args: tuple, made: list[Any], shadows: Sequence[Shadow], found: Shadow,
    out: Tensor,
) -> Shadow:  # fmt: skip
    def again(part: int | None = None, flags: int = 0) -> Shadow:
        return tracer.made(
            found.sample, found.flags | flags, degree=found.degree, part=part, factor=found.factor
        )

    if not found.held or found.flags & (MOVED | ORDER):
        return found
    partial = [s for s in shadows if s.held and not s.whole]
    met = {s.part for s in partial if not s.flags & MOVED}
    if found.whole:
        if kind.writes or not _meets(kind, found, partial, shadows, met):
            return found
        return again(flags=BY_VALUE if is_branched(tracer) else ORDER)
    merges = kind.pointwise and kind.name in ("add", "where") and len(met) == 1
    if merges and at.are_apart([s.sample for s in shadows]):
        return again(next(iter(met)))
    if kind.aliases and not kind.writes:
        return again(tracer.memory.part_of(out, found))
    if kind.name == "copy":
        return again(next((s.part for s in reversed(shadows) if s.held), None))
    numbers = (
        () if kind.name in _OF_POSITION else tuple(a for a in args if isinstance(a, (int, float)))
    )
    return again(hash((kind.name, numbers, *made)))


def _meets(
    kind: Kind, found: Shadow, partial: Sequence[Shadow], shadows: Sequence[Shadow], met: set
) -> bool:  # fmt: skip
    """Whether some samples were treated differently in a tensor that holds all of them."""
    if len(met) > 1:
        return True
    if kind.pointwise:
        return not at.are_apart([s.sample for s in shadows])
    if found.mixed or not met:
        return False
    return kind.name not in ("cat", "stack", "block_diag") or len(partial) < sum(
        s.held for s in shadows
    )


def _identified(tracer: Any, x: Tensor, shadow: Shadow) -> Any:
    """Returns what identifies an operand."""
    if shadow.held:
        if shadow.whole:
            return hash((tracer.memory.serial(x), True))
        return shadow.part if shadow.part is not None else hash((tracer.memory.serial(x), False))
    if shadow.flags & RANDOM:
        return "random"
    if shadow.flags & TRAINED and tracer.memory.record(x) is not None:
        return tracer.memory.formula(x)
    if x.numel() > _LARGEST or x.is_meta or x.layout is not torch.strided:
        return tracer.memory.serial(x), tuple(x.shape)
    return content_of(x)
