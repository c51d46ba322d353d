"""The law of independent samples, asked where trained tensors have met data and a gradient arrives.

Every use of a trained tensor adds f(operands, gradient of its output) to the sum of gradients. If each
entry of the output and of the gradient follows from one and the same sample, then that term is the
sample's own; and what is done to one sample must be done to all of them.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.order import changes_alongside
from fastclip.trace.shadow import BY_VALUE, MOVED, ORDER, Shadow
from fastclip.trace.tracer import Tracer


class Law:
    """Compares the gradients of one step with what they belong to, and reports to the tracer.

    Args:
        tracer: of the step.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._rows: Tensor | None = None
        self._met = False
        self._covered: dict[Hashable, tuple[set[int], object, str]] = {}
        """How some samples were treated, and which these are."""

    def gradient_arrived(
        self, use: str, key: Hashable, out: Shadow, cause: object, gradient: Tensor | None
    ) -> None:
        """A gradient has arrived at what a trained tensor and data have made.

        Args:
            use: names it in findings. key: identifies the trained tensors. out: the output's shadow.
            cause: where the output first followed from several samples. gradient: of the output;
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
            if flags & BY_VALUE and use not in report.by_value:
                report.by_value.append(use)
            if out.mixed or out.factor is not None:
                report.add("unseen" if _is_unseen(out) else "forward", cause, use)
            elif not _is_same(out, got):
                kind = "factors" if getattr(of_gradient, "factor", False) else "gradient"
                report.add("unseen" if _is_unseen(got) else kind, of_gradient, use)
            elif flags & ORDER or self._is_uneven(out, got, gradient):
                report.add("order", cause or of_gradient, use)
            elif not flags & MOVED:
                self._cover(use, key, out, got, cause or of_gradient)

    def is_given(self, rows: Tensor | None) -> bool:
        """Whether the model has been called with the same samples for all gradients of this step.

        Args:
            rows: the sample of each row that it was called with; None: row i is sample i.
        """
        before, self._rows = self._rows if self._met else rows, rows
        self._met = True
        return before is rows or (
            before is not None and rows is not None and torch.equal(before, rows)
        )

    def _is_uneven(self, out: Shadow, got: Shadow, gradient: Tensor) -> bool:
        """What is done to a sample depends on its number."""
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

    def end_step(self) -> None:
        """All gradients of the step have arrived."""
        report = self.tracer.report
        samples = self.tracer.memory.samples if self._rows is None else self._rows.unique().numel()
        branched = any(read.of == "one sample" for read in report.reads)
        for seen, cause, use in self._covered.values():
            if len(seen) < samples and not branched:
                report.add("order", cause, use)
        cause = next((x for x in report.factors.values() if x is not None), None)
        if len(report.factors) > 1:
            report.add("factors", cause, "gradients that share no factor")
        elif report.factors.keys() - {None}:
            report.add("factor", cause, "all gradients")
        self._covered.clear()


def _is_unseen(shadow: Shadow) -> bool:
    return shadow.sample is not None and bool((shadow.sample == at.UNSEEN).any())


def _is_same(out: Shadow, got: Shadow) -> bool:
    """Each entry is of one sample, or of none, in both."""
    if got.mixed:
        return False
    if out.sample is None or got.sample is None:
        return True
    differ = (got.sample != out.sample) & (got.sample != at.NONE) & (out.sample != at.NONE)
    return not bool(differ.any())
