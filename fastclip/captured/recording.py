"""One pass over a fixed number of rows as two graphs, and the scales between them.

The first graph is the forward pass, the loss, the backward pass and the squared norms; the second is
the clipped sums. From norms to scales the engine goes on by itself, over the rows that are there:
thresholds, counts, groups and noise are not in a graph, and no placeholder row reaches them. Its scale
is 0, which leaves it out of every sum whatever its gradient is, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward.arithmetic import arithmetic
from fastclip.backward.backward_pass import BackwardPass
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.sums import SumsOfOne
from fastclip.captured.device import Recorder
from fastclip.captured.frozen import Frozen
from fastclip.errors import FastclipError, GraphError
from fastclip.trace.law import generators

_TOLERANCE = {torch.float64: 1e-9}
_COARSE = 2e-2
"""Of coarser losses: kernels may sum in another order. A graph that is wrong is wrong by more."""


class _Sums(SumsOfOne):
    """Clipped sums by parameter, of one pass."""

    def __init__(self) -> None:
        self.held: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, clipped: Tensor) -> None:
        """As of ClippedSums, shown to nobody."""
        before = self.held.get(parameter)
        clipped = clipped.reshape(-1)
        self.held[parameter] = clipped if before is None else before + clipped


class _Rehearsed:
    """A pass that contributes nothing: its losses, its norms, and itself."""

    def __init__(self, keeper: BookKeeper, run: Callable[[], Tensor]) -> None:
        self.keeper = keeper
        self._caught: list[tuple[BackwardPass, float]] = []
        self.norm_sq = torch.empty(0, dtype=torch.float32, device="cpu")
        keeper.caught = self._catch
        try:
            self.losses = run().detach()
        finally:
            keeper.caught = None
        if len(self._caught) != 1:
            raise GraphError(
                "the losses expect to be computed from what the private model returns, but no "
                "gradient has reached it; return the losses of the model's output, one a row"
            )
        self.current, self.factor = self._caught[0]
        self.calls = len(self.current.forwards)

    def _catch(self, current: BackwardPass, factor: float) -> None:
        self._caught.append((current, factor))
        self.norm_sq = current.norms(factor, self.keeper.names)

    def layers(self) -> Tensor | None:
        """Which parameters took part, for thresholds by layer."""
        if not self.keeper.clipping.strategy.threshold.per_layer:
            return None
        return self.current.places(self.keeper.names, self.norm_sq.device)

    def sums(self, factors: Tensor) -> tuple[list[tuple[nn.Parameter, ...]], list[Tensor]]:
        """Clipped sums given the factors: parameters of each type, and their sums end to end."""
        sums: Any = _Sums()
        with arithmetic(self.keeper.names), ops.looked_at(factors):
            self.current.sum_into(sums, factors)
            kinds: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in self.keeper.names:  # in one order, whichever layers are bare
                if (total := sums.held.get(parameter)) is not None:
                    kinds.setdefault(total.dtype, []).append(parameter)
            flat = [torch.cat([sums.held[p] for p in held]) for held in kinds.values()]
        return [tuple(held) for held in kinds.values()], flat


class Recording:
    """A captured pass.

    Args:
        recorder: captures.
        keeper: the model's book-keeper.
        run: the pass over `inputs`, whose rows are there already; returns the losses of the rows.
        inputs: the tensors that the graph reads.
        frozen: makes the state to be captured in.

    Raises:
        GraphError: the pass cannot be captured, or a replay does not do what the pass does. Nothing
            has been counted or summed.
    """

    def __init__(
        self, recorder: Recorder, keeper: BookKeeper, run: Callable[[], Tensor],
        inputs: list[Tensor], frozen: Callable[[], Frozen],
    ) -> None:  # fmt: skip
        self.inputs, self._keeper, self._without = inputs, keeper, recorder.without
        self._recorder, self._pass, self._replays = recorder, run, 0
        state = recorder.random_state()
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a graph must cast the weights as they are then
        torch.clear_autocast_cache()
        given = [x.clone() for x in inputs]
        try:
            with keeper.trace.untraced():
                self._record(frozen)
        except FastclipError:
            raise
        except RuntimeError as error:
            raise GraphError(
                f"this pass cannot be {recorder.what} ({str(error).splitlines()[0]}); let the model "
                "and the loss neither wait for the device nor draw from generators of their own, or "
                f"pass {recorder.without}"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(cached)
            keeper.drop_stale()
            recorder.set_random_state(state)
            for x, before in zip(inputs, given, strict=True):
                x.copy_(before)

    def _record(self, frozen: Callable[[], Frozen]) -> None:
        recorder = self._recorder
        # The first compiles and tunes kernels and fills caches; the second shows what never rests, the
        # third what waits for the device.
        recorder.warm_up(self._rehearse)
        self.frozen = frozen()
        by_python = generators(), self.frozen.reach.generators()
        recorder.warm_up(self._rehearse)
        self._check_rests()
        recorder.rehearse(self._rehearse)
        self._capture()
        self._check_rests()
        if (generators(), self.frozen.reach.generators()) != by_python:
            raise GraphError(
                "Python code of the model or of the loss draws random numbers, which a graph would draw "
                f"no more; let torch draw them, or pass {self._without}"
            )
        self._prove()
        self._check_rests()

    def changed(self) -> bool:
        """Something that it was captured with is not as it was."""
        moved = self._first.has_moved() or self._second.has_moved()
        return moved or self.frozen.changed()

    def _check_rests(self) -> None:
        if self.frozen.changed():
            raise GraphError(
                "the model changes its attributes, buffers or parts while it runs, which a replay "
                f"would not do; keep what counts calls out of the model, or pass {self._without}"
            )

    def _rehearse(self) -> _Rehearsed:
        rehearsed = _Rehearsed(self._keeper, self._pass)
        rehearsed.sums(self._no_factors(rehearsed.norm_sq))
        return rehearsed

    def _no_factors(self, norm_sq: Tensor) -> Tensor:
        shape = (
            norm_sq.shape
            if self._keeper.clipping.strategy.threshold.per_layer
            else norm_sq.shape[1:]
        )
        return norm_sq.new_zeros(shape)

    def _capture(self) -> None:
        def first() -> tuple[_Rehearsed, list[Tensor]]:
            rehearsed = _Rehearsed(self._keeper, self._pass)
            return rehearsed, [rehearsed.losses, rehearsed.norm_sq]

        self._first, rehearsed = self._recorder.capture(first)
        self._factor, self._calls = rehearsed.factor, rehearsed.calls
        self._layers = rehearsed.layers()
        self._whose = [*self._keeper.names][:1]  # all lie on one device
        self._factors = self._no_factors(rehearsed.norm_sq)
        sums = partial(rehearsed.sums, self._factors)
        self._second, self._kinds = self._recorder.capture(sums)

    def _prove(self) -> None:
        """Other rows than were captured, and other weights, by both ways."""
        for x in self.inputs:
            x.copy_(x.roll(1, 0))
        with _stirred(self._keeper.names):
            self._compare()

    def _compare(self) -> None:
        """Hold a replay against the pass itself, on the rows in `inputs`.

        Raises:
            GraphError: they differ.
        """
        state = self._recorder.random_state()
        expected = _Rehearsed(self._keeper, self._pass)
        dtype, norm_sq = expected.losses.dtype, expected.norm_sq.clone()
        losses = expected.losses.clone()
        sizes = norm_sq.sum(0).sqrt()
        rows = torch.arange(len(sizes), dtype=sizes.dtype, device=sizes.device)
        factors = torch.where(sizes.isfinite(), (1 + rows) / (1 + sizes), 0.0)
        self._factors.copy_(factors)
        kinds, sums = expected.sums(self._factors.clone())
        self._recorder.set_random_state(state)
        found = [*self._first.replay(), *self._second.replay()]
        self._first.let_go()
        wanted = [losses, norm_sq, *sums]
        tolerance = _TOLERANCE.get(dtype, _COARSE)
        same = kinds == self._kinds and len(found) == len(wanted)
        if not same or not all(map(_close, found, wanted, repeat(tolerance))):
            raise GraphError(
                "a replay of this pass does not give what the pass gives on the same rows, so Python "
                f"code of the model or of the loss decides what is computed; pass {self._without}"
            )

    def prove_again(self) -> None:
        """Where that costs no wait for a device: hold every 2nd, 4th, 8th, ... replay against the pass.

        Raises:
            GraphError: they differ; nothing has been counted or summed.
        """
        self._replays += 1
        if self._recorder.waits or self._replays & (self._replays - 1) or self._replays < 2:
            return
        state = self._recorder.random_state()
        try:
            with self._keeper.trace.untraced():
                self._compare()
        finally:
            self._recorder.set_random_state(state)

    def contribute(self, rows: int) -> Tensor:
        """Replay over the rows in `inputs`, of which the first `rows` are real; their losses."""
        keeper = self._keeper
        keeper.batch.begin_pass()
        with arithmetic(self._whose):
            losses, norm_sq = self._first.replay()
            try:
                drawn = keeper.batch.find(rows)
                norm_sq = norm_sq[:, :rows]
                keeper.contribute(norm_sq, self._layers, drawn, rows, self._calls, self._write)
            finally:
                self._first.let_go()
        return losses[:rows]

    def _write(self, scales: Tensor) -> None:
        """Sums of the pass, given the scales of its real rows; all others have 0."""
        self._factors.zero_()
        self._factors[..., : scales.shape[-1]] = scales * self._factor
        for parameters, flat in zip(self._kinds, self._second.replay(), strict=True):
            own = flat if self._second.fresh else flat.clone()
            parts = own.split([parameter.numel() for parameter in parameters])
            shaped = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
            # `data` has a version of its own, so that no part need be copied again.
            self._keeper.sums.add_all(parameters, [x.data for x in shaped])


@contextmanager
def _stirred(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Other weights inside: what was computed of the captured pass' weights alone shows."""
    held = [p.detach() for p in parameters if p.requires_grad]
    before = [x.clone() for x in held]
    try:
        for x in held:
            ramp = torch.linspace(-0.02, 0.02, x.numel(), dtype=x.dtype, device=x.device)
            x.add_(ramp.view(x.shape))
        yield
    finally:
        for x, own in zip(held, before, strict=True):
            x.copy_(own)


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal up to rounding, NaN and inf in the same places."""
    finite = expected.isfinite()
    if found.shape != expected.shape or not bool((found.isfinite() == finite).all()):
        return False
    x, y = (torch.where(finite, z, 0.0).double() for z in (found, expected))
    return bool((x - y).norm() <= tolerance * y.norm())
