"""Which axis of a layer's input holds the samples: found from two batch sizes, never assumed.

A position table embeds ids of shape [1, t] or [t]; a recurrent layer may see [t, b, d]; t may equal
b by accident. So at the first training forward the model also runs, without gradients, on its own
input cut to 2 and to 3 rows: the axis of a layer's input that goes from 2 to 3 holds the samples,
and an input that does not change has none. Later calls are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fastclip.errors import BatchSizeError, FastclipError
from fastclip.inputs import Cuts, batch_sizes_of, flatten, rows_of, ways_to_cut
from fastclip.probing import (
    UNBATCHED,
    UNCLEAR,
    Probe,
    Runs,
    Shapes,
    check_apart,
    followed,
    rows_come_out,
    same,
)

_MOST_CUTS = 64


class BatchLayout:
    """The samples' axis of every intercepted layer, by its path in the model.

    Args:
        axis: axis of the samples in the model's inputs (0 where batch_first).
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.known = False
        self.probe: Probe | None = None
        """The probe that is running: layers show it their inputs and otherwise run as they were."""
        self._axes: dict[str, int] = {}
        self._told_by: tuple[int, TreeSpec] | None = None
        """The input whose size along `axis` is that of the batch: its number, among these inputs."""
        self._flat = False
        """A probe has met a layer over flat ids, which counts its samples itself."""
        self._integer: set[str] = set()
        self._expand: dict[str, bool] = {}
        """Layers whose input has no samples; True: ids of shape [t], to become [b, t]."""

    def batch_size(self, args: tuple, kwargs: dict) -> int | None:
        """Number of samples in the model's inputs."""
        if self._told_by is not None:
            leaves, structure = flatten((args, kwargs))
            number, known = self._told_by
            if structure == known:
                return rows_of(leaves[number], self.axis)
        return next(iter(batch_sizes_of(args, kwargs, self.axis)), None)

    def learn(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict,
    ) -> None:  # fmt: skip
        """Run the model's `forward` on 2 and on 3 rows of its input and note which axes follow.

        Further rounds do so with inputs and parameters without samples expanded, as training
        will, until every layer has samples; the model must still compute the same, and no row may
        change another's output. Dropout is off, random generators and buffers are restored.

        Inputs that cannot be cut are accepted only where a layer is seen to count its samples
        itself (EmbeddingBag over the flat ids of all bags).

        Raises:
            BatchSizeError: the samples are not to be found, or the model couples them.
        """
        if self.known:
            return
        run = Runs(self, model, forward, args, kwargs)
        found = self._first_run(run)
        if found is not None and self._flat:
            try:
                self._learn(run, *found)
            except BatchSizeError:  # ids of all bags in one row: not to be cut
                self._axes, self._expand = {}, {}
        elif found is not None:
            self._learn(run, *found)
        elif not self._flat:
            raise BatchSizeError(
                "cannot tell which axis of the model's inputs holds the samples: no way of cutting "
                "them to 2 and to 3 rows gives as many rows of output. Pass tensors with one row a "
                f"sample along axis {self.axis} (a list of tensors: stack or pad them), and let the "
                f"model take any number of rows{run.last_error}"
            )
        self.known = True

    def _first_run(self, run: Runs) -> tuple[Cuts, list[Shapes], list[Any]] | None:
        """The first way to cut the inputs with which rows go in and come out."""
        for cuts in islice(ways_to_cut(run.args, run.kwargs, self.axis), _MOST_CUTS):
            try:
                shapes, outputs = run.both(cuts)
            except FastclipError:
                raise
            except Exception as error:  # this way does not fit the model
                run.last_error = f" ({type(error).__name__}: {error})"
                continue
            layers = any(axis >= 0 for axis in followed(*shapes).values())
            if layers and rows_come_out(outputs, self.axis):
                return cuts, shapes, outputs
        return None

    def _learn(self, run: Runs, cuts: Cuts, shapes: list[Shapes], plain: list[Any]) -> None:
        self._axes = followed(*shapes)
        self._expand = {p: shapes[0][p][0] != (1,) for p in self._unbatched() if p in self._integer}
        if run.rows(cuts) > 1:
            check_apart(plain, run.once(cuts, Probe(2), rows=[0, 1]), 0, "the model")
        while True:
            try:
                shapes, outputs = run.both(cuts, expand=True)
                problem = "" if same(plain[0], outputs[0]) else "computes something else"
            except FastclipError:
                raise
            except Exception as error:
                problem = f"fails ({type(error).__name__}: {error})"
            if problem:
                if not self._reconsider(shapes):
                    raise BatchSizeError(
                        f"{self._expanded_names()}: used without a batch dimension, and the model "
                        f"{problem} once there is one row a sample; add them by broadcasting over a "
                        "leading batch dimension, or register a rule"
                    )
                continue
            self._axes = followed(*shapes)
            remaining = [path for path in self._unbatched() if path not in self._expand]
            if not remaining:
                break
            # The first in call order alone: later layers may follow from it.
            self._expand[remaining[0]] = False
        for row in (0, 1):
            disturbed = run.once(cuts, Probe(2, expand=True, disturb=row))
            check_apart(outputs, disturbed, 1 - row, self._expanded_names())
        number = next(i for i, axis in enumerate(cuts) if axis == self.axis)
        self._told_by = number, flatten((run.args, run.kwargs))[1]

    def _reconsider(self, shapes: list[Shapes]) -> bool:
        """Ids of shape [1] are a batch of one or a length of one: try the other; False if tried."""
        single = [p for p, ids in self._expand.items() if not ids and shapes[0].get(p) == [(1,)]]
        for path in single:
            self._expand[path] = True
        return bool(single)

    def _unbatched(self) -> list[str]:
        return [path for path, axis in self._axes.items() if axis == UNBATCHED]

    def _expanded_names(self) -> str:
        return ", ".join(sorted(self._expand)) or "parameters of shape [1, ...]"

    def observe(self, path: str, x: Any, counts_rows: bool) -> Any:
        """Note the shape of a layer's input during a probe; expanded as training would."""
        assert self.probe is not None
        if not isinstance(x, Tensor):
            return x
        if counts_rows:
            self._flat |= x.dim() == 1
            return x
        self.probe.shapes.setdefault(path, []).append(tuple(x.shape))
        if not x.is_floating_point():
            self._integer.add(path)
        if not self.probe.expand or path not in self._expand:
            return x
        return self._expanded(path, x, self.probe.rows)

    def observed_output(self, path: str, out: Any) -> Any:
        """The layer's output during a probe: changed in one row where its input was expanded."""
        assert self.probe is not None
        if self.probe.expand and path in self._expand and isinstance(out, Tensor):
            return self.probe.expanded(out)
        return out

    def locate(
        self, path: str, x: Tensor, batch: int | None, fixed: int | None
    ) -> tuple[int, Tensor]:
        """The samples' axis of `x`, and `x` expanded where one row serves the whole batch.

        Args:
            path: the layer's path. x: its input. batch: samples in the model's input, if known.
            fixed: the axis that the layer itself prescribes, if any.

        Raises:
            BatchSizeError: no axis of `x` can hold the samples.
        """
        axis = self._axes.get(path)
        if axis == UNBATCHED:
            if batch is None:
                raise BatchSizeError(f"{path}: its input has no samples, and the batch is unknown")
            return 0, self._expanded(path, x, batch)
        if axis == UNCLEAR:
            raise BatchSizeError(
                f"{path}: the rows of its input of shape {list(x.shape)} are not the samples: with one "
                "sample more it does not get one row more, or its calls differ in where the samples "
                "lie; keep the batch dimension apart (no reshape to [batch * length, ...]) and along "
                "one axis"
            )
        if axis is None:
            axis = self.axis if fixed is None else fixed
        if fixed is not None and axis != fixed:
            raise BatchSizeError(
                f"{path}: this layer takes its samples along axis {fixed}, but in this model they "
                f"lie along axis {axis} of its input of shape {list(x.shape)}; move the batch first"
            )
        if x.dim() <= axis:
            raise BatchSizeError(
                f"{path}: expected an input with samples along axis {axis}, got shape "
                f"{list(x.shape)}"
            )
        rows = x.shape[axis]
        if batch is not None and rows != batch:
            raise BatchSizeError(
                f"{path}: expected {batch} rows along axis {axis}, as in the model's input, got "
                f"shape {list(x.shape)}; layers must see one row a sample: keep the batch "
                "dimension apart (no reshape to [batch * length, ...]) and pass every input with it"
            )
        return axis, x

    def _expanded(self, path: str, x: Tensor, batch: int) -> Tensor:
        """An input without samples, one copy a sample."""
        if self._expand.get(path) and x.dim() == 1:
            return x.expand(batch, *x.shape)  # ids [t], whose rows are added to [b, t, d]
        if x.dim() and x.shape[0] == 1:
            return x.expand(batch, *x.shape[1:])
        raise BatchSizeError(
            f"{path}: its input of shape {list(x.shape)} has no batch dimension, so no per-sample "
            "gradient exists for it; give it a leading dimension of 1, or register a rule"
        )
