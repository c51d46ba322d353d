"""The gradient state: what one private model keeps from the forward pass to the clipped sums.

The pass is opened where the gradient enters the model (a hook on the root's output), so that its
end-of-backward callback belongs to the outermost graph task: a nested backward of reentrant
checkpointing must not close it on partial norms. Leftovers of a failed pass are dropped by the
next one. All state of the engine that is not the optimizer's lives in one GradientState.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fastclip import ops
from fastclip.backward import guards, loss
from fastclip.backward.backward_pass import BackwardPass
from fastclip.backward.bare import BareLayers
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.guards import check_batch_norm, show
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.backward.loss import check_begun, check_loss, running_loss, running_scale
from fastclip.backward.penalties import Penalties
from fastclip.backward.python_nodes import arithmetic
from fastclip.backward.sums import ClippedSums, ShownSum, changed
from fastclip.backward.traced_step import StepTrace
from fastclip.clipping import Clipping
from fastclip.core.autograd import takes_part, unopened
from fastclip.core.compiler import disable_dynamo
from fastclip.core.torch_names import Native, at_end_of_pass, backward_calls, current_task
from fastclip.distributed.processes import check_processes
from fastclip.distributed.shards import Bucket, Shards, buckets
from fastclip.errors import where
from fastclip.ops.planner import PlanLog, Planner
from fastclip.ops.units import UnitSamples
from fastclip.rules import LayerRule, Record
from fastclip.rules.interceptor import Interceptor, followed_checkpoints
from fastclip.rules.use import Target
from fastclip.samples.calls import Calls, Forward, SampleOrders
from fastclip.samples.layout import BatchLayout


class GradientState:
    """Everything that one private model remembers.

    Args:
        names: the private parameters (trainable and the optimizer's, in its order) and their names.
        clipping: the strategy. max_grad_norm: C_0, a number, or a list for per-layer strategies.
        mean_loss: the loss is a mean over the physical batch; its size is multiplied back.
        batch_axis: axis of the samples in the model's inputs.
        frozen: the optimizer's parameters that were not trainable when the model was intercepted.
        planner: chooses how norms are computed.
    """

    def __init__(
        self, names: dict[nn.Parameter, str], clipping: Clipping,
        max_grad_norm: float | Sequence[float], *, mean_loss: bool, batch_axis: int,
        frozen: dict[nn.Parameter, str] | None = None, planner: Planner | None = None,
    ) -> None:  # fmt: skip
        self.names, self.mean_loss = names, mean_loss
        self.frozen, self.others = frozen or {}, dict[nn.Parameter, str]()
        """Of the optimizer's parameters; and the model's that are none of these."""
        self.clipping = ClippingState(clipping, max_grad_norm, len(names))
        self.batch, self.sums = LogicalBatch(), ClippedSums()
        self.penalties = Penalties(names)
        self.calls = Calls(batch_axis, names, self.batch.in_hand)
        self.planner, self.plan_log = planner or Planner(), PlanLog()
        self.guard, self.outside = guards.LeakGuard(), loss.Outside()
        self.monitor, self.sample_orders = guards.NonFiniteMonitor(), SampleOrders()
        self.caught: Callable[[BackwardPass, float], None] | None = None
        """Takes a pass that is traced or captured, with its factor; the pass contributes nothing."""
        self.depth, self.forward = 0, Forward(None)
        self.per_sample_norms: Tensor | None = None
        self.batch_norms: list[tuple[str, nn.Module]] = []
        self.trace = StepTrace(names, self.others, batch_axis)
        self.bare = BareLayers()
        self.model_loss: Any = None
        """Replaces losses inside the model, if make_private was asked to."""
        self._connect()
        self._shared: set[nn.Parameter] = set()
        self._pass: BackwardPass | None = None
        self.interceptor = Interceptor(self)

    @property
    def paused(self) -> bool:
        """Whether the running forward or backward pass contributes nothing.

        Each private layer and use remembers the value in its forward pass, and reads it again in its
        backward pass. A pass is opened under the same condition.
        """
        return self.calls.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the model inside; parts that are called by themselves leave nothing behind."""
        before = self.paused, self.forward
        self.calls.paused = True
        if not self.depth:
            self.forward = Forward(None)
        try:
            # A reentrant checkpoint runs its part again later, which may be outside.
            with followed_checkpoints(), self.bare.aside():
                yield
        finally:
            self.calls.paused, self.forward = before

    # Forward

    @contextmanager
    def root_forward(
        self, batch_size: int | None, layout: BatchLayout | None = None
    ) -> Iterator[Forward]:
        """The model's own forward runs inside; nested calls share the outermost one's Forward."""
        self.drop_stale()
        previous, depth, recompute = self.forward, self.depth, self._recomputing()
        if not depth:
            self.forward = recompute or Forward(batch_size, layout=layout)
        self.depth, entered = depth + 1, self.forward
        try:
            yield entered
        finally:
            if self.forward is entered:  # else it was dropped
                self.depth = depth
                self.forward = entered if depth or recompute is None else previous

    def layer_forward(self, path: Hashable | None = None) -> tuple[Forward, bool]:
        """The Forward of a layer's call, and whether its output must open the pass itself.

        Args:
            path: of the layer; None for parameters that a part of the model uses itself.

        Raises:
            BatchSizeError: the samples cannot be located in a method of the model.
        """
        if self.depth:
            return self.forward, False
        if (recompute := self._recomputing()) is not None:
            return recompute, False
        if self.calls.outermost is not None and self.calls.outermost.forward is None:
            self.drop_stale()
        called = self.calls.reached(path)
        if (
            called is None or called.forward is None
        ):  # by itself: the entries of its input are the samples
            if self.forward.finished or self.forward.batch_size is not None:
                self.drop_stale()
                self.forward = Forward(None)
            return self.forward, True
        return called.forward, True

    def running_forward(self) -> Forward | None:
        """The Forward of the running call, without locating its samples."""
        if self.depth:
            return self.forward
        if (recompute := self._recomputing()) is not None:
            return recompute
        called = self.calls.outermost
        return None if called is None else called.forward

    @property
    def recomputes(self) -> bool:
        """A running backward pass computes parts of the model again."""
        return self._recomputing() is not None

    def _recomputing(self) -> Forward | None:
        """The Forward that a running backward pass recomputes (checkpointing), if one does."""
        if self._pass is not None and current_task() != -1:
            return self._pass.forwards[-1]
        return None

    def check_unchanged(self) -> None:
        """Check that the model runs in no transform, and is unchanged since make_private.

        A parameter that was unfrozen would get plain gradients. A frozen BatchNorm put back into
        training mode would couple the samples. Another engine would release every sample again.
        """
        guards.check_plain()
        check_processes(self.clipping.ranks)
        guards.check_alone(self.names)
        for path, module in self.batch_norms:
            check_batch_norm(path, module)
        guards.check_frozen(self.frozen)

    def drop_stale(self, *, forwards: bool = False) -> None:
        """Forget a backward pass that failed: outside any backward pass none can be running.

        Args:
            forwards: forget forward passes that did not end (Ctrl-C), too, as the loop clears sums.
        """
        if current_task() != -1:
            return
        if self._pass is not None:
            stale, self._pass = self._pass, None
            stale.unwatch()
            self.trace.end()
        if not self.depth or forwards:
            self.bare.drop()
        if forwards and self.depth:
            self.depth, self.forward = 0, Forward(None)
            self.calls.drop_forward()

    # Backward

    def open_pass(self, forward: Forward, gradient: Tensor | None = None) -> None:
        """Open the backward pass, because the gradient has reached the model's output (a hook)."""
        if self.paused:
            return
        task = current_task()
        if self._pass is None or self._pass.task != task:
            check_processes(self.clipping.ranks)
            unbounded = self.clipping.strategy.unbounded
            self._pass = BackwardPass(task, self.planner, self._shared, running_loss(), unbounded)
            at_end_of_pass(partial(self.close_pass, self._pass))
            self.bare.check_hooks(self.check_hooks)
            self.bare.opened(True)
            self.outside.check(forward, self.names, self.others)
            self.trace.check_outside()
        self._pass.loss_scale = running_scale()
        if forward not in self._pass.forwards:
            self._pass.forwards.append(forward)
        self._pass.watch(forward, self.calls)

    def begins_with(self, forward: Forward, out: Tensor) -> None:
        """Let the gradient of `out`, of a layer or use outside the model's forward, open the pass."""
        self.check_unchanged()
        guards.arm(self)
        if not self.paused and out.requires_grad:
            out.register_hook(partial(self.open_pass, forward))

    @property
    def running(self) -> bool:
        """A backward pass has been opened and not closed."""
        return self._pass is not None

    @property
    def units(self) -> UnitSamples | None:
        """Which samples of the running pass are clipped as one; None: each alone."""
        return None if self._pass is None else self._pass.joined

    @property
    def last_input(self) -> ops.LastInput:
        """What is known about the last input of the running pass."""
        return ops.LastInput() if self._pass is None else self._pass.last_input

    def shared(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is known to be used more than once, so its norm waits for the end."""
        return bool(self._shared) and parameter in self._shared

    def mark_shared(self, parameter: nn.Parameter) -> None:
        """Note in advance that a parameter is used more than once (tied or recurrent weights)."""
        self._shared.add(parameter)

    def admit(self, path: str, forward: Forward, samples: int) -> None:
        """Check that a layer's contribution may enter the running pass."""
        if self._pass is None:
            raise unopened(where(path))
        self._pass.admit(path, forward, samples, self.batch)

    @property
    def current(self) -> BackwardPass:
        """The pass that runs."""
        assert self._pass is not None
        return self._pass

    def record(self, parameter: nn.Parameter, record: Record) -> None:
        """Take a contribution to `parameter`."""
        assert self._pass is not None
        self._pass.take(parameter, record)

    def check_hooks(self, parameters: Collection[nn.Parameter]) -> None:
        """Check that these parameters have no gradient hooks, which would not run."""
        guards.check_hooks(self.names, parameters)

    def is_penalty(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """Whether a gradient that autograd adds to `parameter.grad` comes from terms without data."""
        known = parameter in self.names and type(gradient) is Tensor
        known &= self.caught is None and not self.paused
        with self.trace.aside(), torch.enable_grad(), Native():
            node = get_gradient_edge(parameter).node
        if not (known and takes_part(node)):
            return (
                False  # of a shard, make_step, a pause, or what torch.autograd.grad was asked for
            )
        if self.trace.observing:
            return self.trace.is_public(gradient) and self.penalties.allow()
        return self.penalties.known

    def record_derived(
        self, target: Target, record: Record, wanted: Iterable[nn.Parameter]
    ) -> None:
        """Take a contribution to a value computed from parameters; its norms wait for the end."""
        assert self._pass is not None
        self._pass.take_derived(target, record, wanted)

    @disable_dynamo
    def close_pass(self, current: BackwardPass) -> None:
        """End of the backward pass: norms to scales, records to clipped sums, records freed."""
        self.bare.opened(False)
        current.check_kept(self._pass)
        with self.trace.aside(), arithmetic(self.names):
            try:
                self.bare.settle(self)
            finally:
                self._pass = None
                current.unwatch()
            if not current.empty:
                self.sample_orders.finish(current.forwards)
                current.pull_back(self.clipping.ranks)
                self._close(current)
            self.penalties.finish()

    def _close(self, current: BackwardPass) -> None:
        batch_size, calls = current.batch_size or 0, len(current.forwards)
        check_begun()
        check_loss(current.loss, "mean" if self.mean_loss else "sum", batch_size)
        sampled = bool(self.caught is None and self.batch.find(batch_size))
        self.trace.judge(
            self.mean_loss, batch_size, whole=self.batch.whole,
            scale_invariant=self.clipping.strategy.scale_invariant,
        )  # fmt: skip
        # The mean's 1/b, multiplied back, and the scale of the loss, which ends here.
        factor = (float(batch_size) if self.mean_loss else 1.0) / current.loss_scale
        if self.caught is not None:
            self.caught(current, factor)
            return
        norm_sq = self.trace.guarded(current.norms(factor, self.names), batch_size)
        per_layer = self.clipping.strategy.threshold.per_layer
        layers = current.places(self.names, norm_sq.device) if per_layer else None
        write = partial(current.write, self.sums, factor)
        self.contribute(norm_sq, layers, sampled, batch_size, calls, write, current.units)

    def contribute(
        self, norm_sq: Tensor, layers: Tensor | None, sampled: bool, samples: int, calls: int,
        write: Callable[[Tensor], None], units: UnitSamples | None = None,
    ) -> None:  # fmt: skip
        """A pass over `samples` samples enters the sums: `write` adds them, given the scales."""
        with self.batch.changing():  # until every sum is written
            try:
                scales, self.per_sample_norms = self.clipping.clip(
                    norm_sq, layers, fresh=self.batch.fresh, placeholder=not sampled, units=units
                )
            except Exception:  # neither counted nor summed
                self.batch.unchanged()
                raise
            write(scales)
            self.batch.end_pass(samples, calls)
        show(self.names)
        self.monitor.check(self.per_sample_norms)

    def contribute_none(self) -> None:
        """Contribute what a pass over no samples of the sampled batch does.

        Raises:
            StepError, BatchSizeError: as of such a pass.
        """
        self.batch.begin_pass()
        units = self.batch.unit_samples(0)
        sampled, device = self.batch.find(0), next(iter(self.names)).device
        norm_sq = torch.zeros(len(self.names), 0, dtype=torch.float32, device=device)
        layers = torch.arange(len(self.names), device=device)
        per_layer = self.clipping.strategy.threshold.per_layer
        self.contribute(
            norm_sq, layers if per_layer else None, sampled, 0, 0, lambda scales: None, units
        )

    # Step

    def zero_grad(self) -> None:
        """Clear the sums, unless they belong to a logical batch that is still being gathered."""
        self.drop_stale(forwards=True)
        self.trace.over()
        if not self.batch.keeps_sums():
            with self.batch.clearing():
                self._clear()

    def discard(self) -> None:
        """Give up the logical batch that is being gathered, with its sums and counts."""
        self.drop_stale(forwards=True)
        with self.batch.abandon():
            self._clear()

    def _clear(self) -> None:
        self.clipping.discard()
        self.penalties.clear()
        self.sums.clear(self.names)
        show(self.names, None)

    def retire(self) -> None:
        """Detach from the model, which was cleaned up or given to another gradient state."""
        if not self.batch.retired:
            self.guard.disarm()
            self.batch.retire()
            self.sums.clear(self.names)

    def _connect(self) -> None:
        """Connect calls with the trace of their step, and backward passes with their losses."""
        backward_calls.watch(self)
        self.trace.misplaced, self.trace.owns = self.calls.look_again_at_all, self.bare.owns
        self.calls.traces, self.calls.traced = self.trace.again, lambda: self.trace.observing

    def __getstate__(self) -> dict[str, Any]:
        """Omit raw data from copies and pickles of a model."""
        left = {"per_sample_norms": None, "_pass": None, "forward": Forward(None)}
        return {**self.__dict__, **left, "interceptor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has no sums, so nothing of a logical batch is pending in it."""
        self.__dict__.update(state)
        self._connect()
        self.interceptor = Interceptor(self)
        with self.batch.abandon():
            pass


# -------------------------------------------------------------------------------------------------
# What the backward pass needs to know about an intercepted layer.


class SeenLayer(Protocol):
    """An intercepted layer as its private function sees it; fastclip.engine.interception makes them.

    Attributes:
        path: of the layer in the model. grad_state: its gradient state. rule: its rule, if it has one.
        bypass: run the original module (while a rule calls it from inside).
    """

    path: str
    grad_state: GradientState
    rule: LayerRule | None
    bypass: bool

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters that the rule answers for, by their name in the module."""


# -------------------------------------------------------------------------------------------------
# The clipped sums of a model that is sharded over ranks: each rank keeps those of its own shards.


_BUCKET = 25 * 2**20
"""Bytes of whole sums that are held, and sent, at once."""


class ShardedSums(ClippedSums):
    """As `ClippedSums`; what a pass has summed is added over all ranks before the pass ends.

    `p.summed_grad` of a parameter that the optimizer holds shows this rank's shard.

    Args:
        shards: of the model. names: the private parameters, in the same order on all ranks.
    """

    def __init__(self, shards: Shards, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._shards = shards
        held = [shards.parameters[p] for p in names]
        self.names: dict[Any, str] = {each.own: names[each.whole] for each in held}
        """Of the parameters as the optimizer holds them."""
        self.buckets = buckets(reversed(held), _BUCKET)
        self.passes = 0
        """Number of passes summed; a rank that has forgotten some has the sums of other samples."""
        self._parts: dict[Bucket, tuple[Tensor, int]] = {}
        self._shown: dict[Bucket, list[Tensor]] = {}

    def together(self, entries: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """All parameters, with or without entries, in the order in which their gradients are known."""
        for bucket in self.buckets:
            yield [each.whole for each in bucket.parameters]

    def exchange(self, parameters: list[nn.Parameter]) -> None:
        """Send the whole sums of these to the ranks that hold the shards. All ranks call this.

        Raises:
            UnsupportedLayerError: one of these has a gradient hook.
            StepError: the sums so far were changed, or another rank is gone.
        """
        bucket = next(b for b in self.buckets if b.parameters[0].whole is parameters[0])
        guards.check_hooks(self.names, _owns(bucket))
        self.passes += bucket is self.buckets[0]
        part = bucket.scattered([self._forget(p) for p in parameters])
        held = self._part(bucket)
        held = part if held is None else held.add_(part)
        self._parts[bucket] = held, held._version
        self._shown[bucket] = [view.as_subclass(ShownSum) for view in bucket.views(held)]
        for each, view in zip(bucket.parameters, self._shown[bucket], strict=True):
            each.own.summed_grad = view  # type: ignore[attr-defined]

    def _part(self, bucket: Bucket) -> Tensor | None:
        held, version = self._parts.get(bucket, (None, 0))
        owns = _owns(bucket)
        for own, view in zip(owns, self._shown.get(bucket, [None] * len(owns)), strict=True):
            if getattr(own, "summed_grad", None) is not view:
                raise changed(self.names[own])
        if held is not None and held._version != version:
            raise changed(" or ".join(self.names[own] for own in owns))
        return held

    def _forget(self, parameter: nn.Parameter) -> Tensor | None:
        total = self.take(parameter)
        self._held.pop(id(parameter), None)
        parameter.summed_grad = None  # type: ignore[attr-defined]
        return total

    def parts(self) -> list[Tensor]:
        """This rank's part of every bucket's sum, over all ranks that share its shards.

        Raises:
            StepError: they are not what was summed.
        """
        self._shards.check_held()
        found = []
        for bucket in self.buckets:
            part = self._part(bucket)
            if part is None:
                part = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device)
            found.append(part)
        return found

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """As the base class."""
        super().clear(parameters)
        self.passes = 0
        self._parts.clear()
        self._shown.clear()
        for own in self.names:
            own.summed_grad = None  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return bool(self._held or self._parts)


def follow_shards(grad_state: GradientState) -> None:
    """Tell the gradient state of a model that was just intercepted how its parameters are sharded."""
    ranks, names = grad_state.clipping.ranks, grad_state.names
    if ranks is not None and ranks.shards is not None:
        grad_state.sums = sums = ShardedSums(ranks.shards, names)
        grad_state.calls.shards = ranks.shards
        guards.check_hooks(sums.names, sums.names)
        grad_state.guard.arm({**names, **sums.names}, grad_state)


def _owns(bucket: Bucket) -> list[Any]:
    return [each.own for each in bucket.parameters]
