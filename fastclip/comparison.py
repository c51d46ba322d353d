"""Rows of a call held against each other, on runs that change some of them."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from fastclip.errors import BatchSizeError, FastclipError
from fastclip.independence import (
    axes_of_outputs,
    check_influence,
    check_values,
    extreme_rows,
)
from fastclip.inputs import Cuts
from fastclip.layout import BatchLayout
from fastclip.mixed_outputs import Found, mixed_outputs, note_gradients
from fastclip.probing import Probe, Runs

_SPLIT = frozenset({0, 3, 5, 6})
"""Rows to change: neighbours, halves, strides of two, and rows in reverse lie on either side."""
_FEWEST = 5
"""Rows that are run at least, for that."""
_SMALLEST = 2
"""Rows that are held against a batch of nothing else."""
_SEEDS = (2, 3, 4)
"""Of the runs whose gradients are looked at; one is enough where nothing is drawn."""


class Comparison:
    """What must agree between runs of one call.

    Args:
        layout: where the samples are. run: the call.
        probes, outputs: of the runs on two and on three copies of one row.
    """

    def __init__(
        self, layout: BatchLayout, run: Runs, probes: list[Probe], outputs: list[Any]
    ) -> None:
        self.layout, self.run, self.probes, self.outputs = layout, run, probes, outputs
        self.of_outputs = axes_of_outputs(outputs)

    def _probe(self, rows: int, **how: Any) -> Probe:
        return Probe(self.layout, rows, self.probes[0].expand, **how)

    def hold_apart(self, cuts: Cuts) -> None:
        """No row follows from another one, nor from how many there are.

        Args:
            cuts: how the inputs are cut into rows.

        Raises:
            BatchSizeError: one does.
        """
        real = self.run.distinct(cuts)
        attempts = [(real, False, False), (real[:2], False, True)]  # rows may have to be in order
        if len(real) < 2:  # a row made up of the first one's values, if the model can take it
            attempts = [(real, True, False), (real, False, False)]
        for number, (rows, synthetic, ordered) in enumerate(attempts, 1):
            try:
                self._compare(cuts, rows, synthetic, ordered)
                break
            except FastclipError:
                raise
            except Exception as error:
                if number == len(attempts):
                    raise BatchSizeError(
                        "the model fails on a few rows of its own input, so that they cannot be held "
                        f"against each other ({type(error).__name__}: {error}); let it take any "
                        "number of rows"
                    ) from error
        two, three = self.probes
        if not two.draws and not three.draws:
            check_values(
                two, three, (self.outputs[0], self.outputs[1]), [0], self.layout.axes,
                self.of_outputs, other_size=True,
            )  # fmt: skip
        self.layout.compared = max(self.layout.compared, len(real))

    def _compare(self, cuts: Cuts, real: list[int], synthetic: bool, ordered: bool) -> None:
        choice = self.run.cut(cuts, real or None, synthetic)
        if ordered:
            rows, group = [0, 0, 1, 1], frozenset({2, 3})
        else:
            rows, group = _spread(choice)
        count = len(rows)
        groups = [group, frozenset(range(count)) - group]
        if choice > 1:
            self._disturb(rows, groups)
        found: Found = {}
        for seed in _SEEDS:
            noted = found if seed == _SEEDS[0] else {}
            try:
                drawn = self._influence(rows, groups, seed, noted)
            except FastclipError:
                raise
            except Exception:
                if not self.run.asks_inputs:
                    raise
                self.run.asks_inputs = False  # x.numpy(), or x.requires_grad = True, in its forward
                drawn = self._influence(rows, groups, seed, noted)
            if not drawn:
                break
        for kept in groups if found and choice > 1 else []:
            others: Found = {}
            changed = _others_changed(rows, kept)
            self._influence(changed, [], _SEEDS[0], others)
            self.layout.mixed |= mixed_outputs(found, others, sorted(kept), self.of_outputs)

    def _influence(
        self, rows: list[int], groups: list[frozenset[int]], seed: int, found: Found
    ) -> bool:
        """Ask for gradients; whether random numbers were drawn."""
        probe = self._probe(len(rows), differentiable=True)

        def ask(out: Any) -> None:
            check_influence(list(probe.sources), out, self.of_outputs, groups, probe.rows)
            note_gradients(probe, self.of_outputs, found, out)

        self.run.once(probe, rows, seed, ask)
        return probe.draws

    def _disturb(self, rows: list[int], groups: list[frozenset[int]]) -> None:
        """Rows are changed, to one of the others or to noise, of which the others must show nothing."""
        axes, count = self.layout.axes, len(rows)
        base = self._probe(count)
        out = self.run.once(base, rows, seed=1)
        small = [frozenset({row}) for row in extreme_rows(base, axes)[:_SMALLEST]]
        for kept in (*groups, *small):
            changed = frozenset(range(count)) - kept
            noisy = changed if kept in groups else frozenset()
            probe = self._probe(count, disturbed=changed, replaced=noisy)
            found = self.run.once(probe, _others_changed(rows, kept), seed=1)
            check_values(base, probe, (out, found), sorted(kept), axes, self.of_outputs)


def _spread(choice: int) -> tuple[list[int], frozenset[int]]:
    """Positions for so many rows, and which of them to change: the others hold other rows."""
    count = max(choice, _FEWEST)
    group = _SPLIT & set(range(count))
    inside, outside = (cycle(range(first, max(choice, first + 1), 2)) for first in (0, 1))
    if choice == 1:
        outside = cycle([0])
    return [next(inside if i in group else outside) for i in range(count)], group


def _others_changed(rows: list[int], kept: frozenset[int]) -> list[int]:
    """The same rows where they are kept, and one of them everywhere else."""
    return [row if i in kept else rows[min(kept)] for i, row in enumerate(rows)]
