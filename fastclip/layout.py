"""Where the samples are in every layer's input: what was found, and every later call checked against it.

A position table embeds ids of shape [1, t] or [t]; a recurrent layer may see [t, b, d]; t may equal
b by accident. What holds the samples is never assumed: fastclip.learning runs the model to find out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fastclip.errors import BatchSizeError, where
from fastclip.independence import UNBATCHED, UNCLEAR
from fastclip.inputs import batch_sizes_of, flatten, rows_of
from fastclip.probing import MOST_ROWS, Probe
from fastclip.watch import Watch


class BatchLayout:
    """The samples' axis of every intercepted layer, by its path in the model, for one kind of call.

    Args:
        axis: axis of the samples in the model's inputs (0 where batch_first).
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.known = False
        self.drives = False
        """The method trains by itself, so it is not run for a look."""
        self.compared = 0
        """Number of distinct rows that were held against each other."""
        self.tried = 0
        """Rows of the largest batch from which distinct rows were taken."""
        self.watch: Watch | None = None
        """The state in which the model was looked at."""
        self.axes: dict[str, int] = {}
        """By a layer's path; UNBATCHED: its input has no samples; UNCLEAR: it has no one axis."""
        self.met: set[str] = set()
        """Modules whose parameters of shape [1, ...] a probe has expanded."""
        self.told_by: list[tuple[int, TreeSpec]] = []
        """The input whose size along `axis` is that of the batch: its number, among these inputs."""
        self.mixed: dict[int, int] = {}
        """Outputs that couple rows, and must not be part of a loss: dimensions, by their number."""
        self.flat = False
        """A probe has met a layer over flat ids, which counts its samples itself."""
        self.integer: set[str] = set()
        self.expand: dict[str, bool] = {}
        """Layers whose input has no samples; True: ids of shape [t], to become [b, t]."""

    def forget(self) -> None:
        """Nothing is known of the layers."""
        self.axes, self.expand, self.mixed = {}, {}, {}
        self.integer, self.met = set(), set()

    def batch_size(self, args: tuple, kwargs: dict) -> int | None:
        """Number of samples in the model's inputs."""
        leaves, structure = flatten((args, kwargs))
        for number, known in self.told_by:
            if structure == known:
                return rows_of(leaves[number], self.axis)
        return next(iter(batch_sizes_of(args, kwargs, self.axis)), None)

    def knows(self, path: str) -> bool:
        """A probe has seen this layer (or cannot see any: inputs that cannot be cut)."""
        return path in self.axes or path in self.met or (self.known and self.flat)

    def due(self, model: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether the model must be run on a few rows before this call; to be asked once a call.

        At the first one, where it has changed its state or is called in another way, and while a
        larger batch may hold more distinct rows than could be compared.
        """
        if not self.known or self.watch is None or self.watch.changed(args, kwargs):
            return True
        if self.compared >= MOST_ROWS or self.flat:
            return False
        rows = self.batch_size(args, kwargs) or 0
        if rows > self.tried:
            return True
        # a batch that repeated one row said nothing
        return self.compared < 2 and rows > 1 and self.watch.rarely()

    def observe(self, probe: Probe, path: str, x: Any, counts_rows: bool) -> Any:
        """Note a layer's input during a probe; expanded as training would."""
        if not isinstance(x, Tensor):
            return x
        if counts_rows:
            self.flat |= x.dim() == 1
            return x
        probe.shapes.setdefault(path, []).append(tuple(x.shape))
        if not x.is_floating_point():
            self.integer.add(path)
        if probe.expand and path in self.expand:
            x = self._expanded(path, x, probe.rows)
        if not probe.trusted and not probe.differentiable:
            probe.seen.setdefault(path, []).append(x.detach().clone())
        return x

    def observed_output(self, probe: Probe, path: str, fixed: int | None, out: Any) -> Any:
        """The layer's output during a probe: changed in some rows where its input was expanded."""
        if probe.expand and path in self.expand and isinstance(out, Tensor):
            out = probe.expanded(out)
        axis = self.axes.get(path, UNCLEAR) if fixed is None else fixed
        if axis != UNCLEAR:
            probe.source(path, max(axis, 0), out)
            if probe.first is None and isinstance(out, Tensor):
                out = probe.noisy(max(axis, 0), out)
                probe.first = (max(axis, 0), out.detach())
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
        axis, place = self.axes.get(path), where(path)
        if axis == UNBATCHED:
            if batch is None:
                raise BatchSizeError(f"{place}: its input has no samples, and the batch is unknown")
            return 0, self._expanded(path, x, batch)
        if axis == UNCLEAR:
            raise BatchSizeError(
                f"{place}: the rows of its input of shape {list(x.shape)} are not the samples: with one "
                "sample more it does not get one row more, or its calls differ in where the samples "
                "lie; keep the batch dimension apart (no reshape to [batch * length, ...]) and along "
                "one axis"
            )
        if axis is None:
            axis = self.axis if fixed is None else fixed
        if fixed is not None and axis != fixed:
            raise BatchSizeError(
                f"{place}: this layer takes its samples along axis {fixed}, but in this model they "
                f"lie along axis {axis} of its input of shape {list(x.shape)}; move the batch first"
            )
        if x.dim() <= axis:
            raise BatchSizeError(
                f"{place}: expected an input with samples along axis {axis}, got shape "
                f"{list(x.shape)}"
            )
        rows = x.shape[axis]
        if batch is not None and rows != batch:
            raise BatchSizeError(
                f"{place}: expected {batch} rows along axis {axis}, as in the model's input, got "
                f"shape {list(x.shape)}; layers must see one row a sample: keep the batch "
                "dimension apart (no reshape to [batch * length, ...]) and pass every input with it"
            )
        return axis, x

    def _expanded(self, path: str, x: Tensor, batch: int) -> Tensor:
        """An input without samples, one copy a sample."""
        if self.expand.get(path) and x.dim() == 1:
            return x.expand(batch, *x.shape)  # ids [t], whose rows are added to [b, t, d]
        if x.dim() and x.shape[0] == 1:
            return x.expand(batch, *x.shape[1:])
        raise BatchSizeError(
            f"{where(path)}: its input of shape {list(x.shape)} has no batch dimension, so no "
            "per-sample gradient exists for it; give it a leading dimension of 1, or register a rule"
        )
