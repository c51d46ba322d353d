"""Runs on a few rows: the first find the samples, the others hold rows against each other.

The axis of a layer's input that goes from 2 to 3 where the model's input does holds the samples, and an
input that does not change has none: it is expanded, and so are parameters of shape [1, ...], as training
will expand them; the model must still compute the same. Then rows are changed, and gradients asked for
(fastclip.independence). That makes 8 forward passes and 2 backward passes of at most 8 rows; 2 more
forward passes each time that something is expanded, where random numbers are drawn, and where an output
(a loss) belongs to no one row.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastclip.comparison import Comparison
from fastclip.errors import BatchSizeError, FastclipError, where
from fastclip.independence import (
    UNBATCHED,
    by_row,
    followed,
    rows_come_out,
    same,
)
from fastclip.inputs import Cuts, flatten, ways_to_cut
from fastclip.layout import BatchLayout
from fastclip.probe_state import stirred
from fastclip.probing import Probe, Runs, Shapes
from fastclip.watch import Watch

_MOST_CUTS = 64
_TRIALS = 8
"""Seeds under which a layer that runs by chance is looked for."""


class _Unstable(Exception):
    """Outputs are not finite once the model's parameters are stirred: `where`, they are."""

    def __init__(self, where: list[Tensor]) -> None:
        self.where = where


class _NotFound(Exception):
    """No way of cutting the inputs gives rows of output."""


def learn(layout: BatchLayout, run: Runs, path: str | None = None) -> None:
    """Note where the samples of this call are, and that its rows are apart.

    Generators, buffers, attributes and parameters are as before afterwards. Inputs that cannot be cut
    are accepted only where a layer is seen to count its samples itself (EmbeddingBag over the flat ids
    of all bags).

    Args:
        layout: what is known so far. run: the call.
        path: a layer that has just been reached and must be among those seen.

    Raises:
        BatchSizeError: the samples are not to be found, or the model couples them.
    """
    if not layout.known:  # nothing of an earlier refusal is left
        layout.forget()
    learner = _Learner(layout, run)
    try:
        for run.trial in range(_TRIALS):
            learner.look()
            layout.known = True
            if path is None or layout.knows(path):
                layout.watch = layout.watch or Watch(run.model, run.args, run.kwargs)
                layout.tried = max(layout.tried, layout.batch_size(run.args, run.kwargs) or 0)
                return
    except BaseException:
        layout.known = False
        raise
    layout.known = False
    raise BatchSizeError(
        f"{where(path)}: this layer runs with this batch, but not with a few rows of it, so where its "
        "samples lie is not known; let the model use the same layers for any number of rows"
    )


class _Learner:
    def __init__(self, layout: BatchLayout, run: Runs) -> None:
        self.layout, self.run = layout, run

    def look(self) -> None:
        """Once, with parameters that say something; or as they are, if the model needs that."""
        try:
            for must_be_finite in (True, False):
                try:
                    with stirred(self.run.private):
                        self._learn(must_be_finite)
                        return
                except _NotFound:
                    break
                except _Unstable as unstable:
                    if not self._are_finite(unstable.where):
                        break
            self._learn(must_be_finite=False)
            return
        except _NotFound:
            self.run.as_called()  # a model that fails on its own input says why itself
        raise BatchSizeError(
            "cannot tell which axis of the model's inputs holds the samples: no way of cutting them "
            "to 2 and to 3 rows gives as many rows of output. Pass tensors with one row a sample "
            f"along axis {self.layout.axis} (a list of tensors: stack or pad them), and let the model "
            f"take any number of rows{self.run.last_error}"
        )

    def _are_finite(self, where: list[Tensor]) -> bool:
        """Whether outputs are finite there and nowhere else, as parameters are: masked scores."""
        found = self._first_run()
        own = [] if found is None else _finite(found[2])
        same_shapes = [x.shape for x in own] == [x.shape for x in where]
        return same_shapes and all(map(torch.equal, own, where))

    def _learn(self, must_be_finite: bool) -> None:
        found = self._first_run()
        if found is None and not self.layout.flat:
            raise _NotFound
        if found is None:
            return
        cuts, probes, outputs = found
        if must_be_finite and not all(bool(x.all()) for x in _finite(outputs)):
            raise _Unstable(_finite(outputs))
        try:
            self._find(cuts, probes, outputs)
        except Exception:
            if not self.layout.flat:
                raise
            # ids of all bags in one row: not to be cut
            self.layout.axes, self.layout.expand = {}, {}

    def _first_run(self) -> tuple[Cuts, list[Probe], list[Any]] | None:
        """The first way to cut the inputs with which rows go in and come out."""
        for cuts in islice(
            ways_to_cut(self.run.args, self.run.kwargs, self.layout.axis), _MOST_CUTS
        ):
            self.run.cut(cuts)
            try:
                probes, outputs = self._both()
            except FastclipError:
                raise
            except Exception as error:  # this way does not fit the model
                self.run.last_error = f" ({type(error).__name__}: {error})"
                continue
            layers = any(axis >= 0 for axis in _followed(probes).values())
            if layers and rows_come_out(outputs, self.layout.axis):
                return cuts, probes, outputs
        return None

    def _both(self, expand: bool = False) -> tuple[list[Probe], list[Any]]:
        """Runs on 2 and on 3 copies of the first row."""
        probes = [Probe(self.layout, rows, expand) for rows in (2, 3)]
        return probes, [self.run.once(probe, [0] * probe.rows) for probe in probes]

    def _find(self, cuts: Cuts, probes: list[Probe], outputs: list[Any]) -> None:
        plain = outputs[0]
        axes = _followed(probes)
        self.layout.axes = self._joined(axes)
        self.layout.expand = {
            **self.layout.expand,
            **{
                p: probes[0].shapes[p][0] != (1,)
                for p in _unbatched(axes) if p in self.layout.integer and p not in self.layout.expand
            },
        }  # fmt: skip
        while probes[0].broadcasts or _unbatched(axes):
            try:
                probes, outputs = self._both(expand=True)
                problem = "" if same(plain, outputs[0]) else "computes something else"
            except FastclipError:
                raise
            except Exception as error:
                problem = f"fails ({type(error).__name__}: {error})"
            if problem:
                if not self._reconsider(probes[0].shapes):
                    raise BatchSizeError(
                        f"{self._expanded_names()}: used without a batch dimension, and the model "
                        f"{problem} once there is one row a sample; add them by broadcasting over a "
                        "leading batch dimension, or register a rule"
                    )
                continue
            axes = _followed(probes)
            self.layout.axes = self._joined(axes)
            remaining = [path for path in _unbatched(axes) if path not in self.layout.expand]
            if not remaining:
                break
            # The first in call order alone: later layers may follow from it.
            self.layout.expand[remaining[0]] = False
        Comparison(self.layout, self.run, probes, outputs).hold_apart(cuts)
        number = next(i for i, axis in enumerate(cuts) if axis == self.layout.axis)
        structure = flatten((self.run.args, self.run.kwargs))[1]
        others = [told for told in self.layout.told_by if told[1] != structure]
        self.layout.told_by = [(number, structure), *others]

    def _joined(self, axes: dict[str, int]) -> dict[str, int]:
        """What is known of the layers with what this probe has seen of them.

        Raises:
            BatchSizeError: they contradict each other.
        """
        for path, axis in axes.items():
            if self.layout.known and self.layout.axes.get(path, axis) != axis:
                raise BatchSizeError(
                    f"{where(path)}: its samples lay along axis {self.layout.axes[path]} of its input "
                    f"before, and now along {axis}; keep them along one axis"
                )
        return {**self.layout.axes, **axes}

    def _reconsider(self, shapes: Shapes) -> bool:
        """Ids of shape [1] are a batch of one or a length of one: try the other; False if tried."""
        single = [p for p, ids in self.layout.expand.items() if not ids and shapes.get(p) == [(1,)]]
        for path in single:
            self.layout.expand[path] = True
        return bool(single)

    def _expanded_names(self) -> str:
        return ", ".join(sorted(self.layout.expand)) or "parameters of shape [1, ...]"


def _finite(outputs: list[Any]) -> list[Tensor]:
    return [torch.isfinite(x) for output in outputs for x in by_row(output)]


def _followed(probes: list[Probe]) -> dict[str, int]:
    return followed(probes[0].shapes, probes[1].shapes)


def _unbatched(axes: dict[str, int]) -> list[str]:
    return [path for path, axis in axes.items() if axis == UNBATCHED]
