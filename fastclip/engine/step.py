"""`engine.make_step`: the pass of a training step as one call: compiled, replayed, or of one size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastclip.backward.guards import arm
from fastclip.backward.python_nodes import arithmetic
from fastclip.backward.state import GradientState
from fastclip.clipping.policy import split_error
from fastclip.core.autograd import reached_without
from fastclip.core.checks import whole
from fastclip.engine.capture import (
    Frozen,
    Recording,
    Rehearsed,
    check_decided,
    settled,
    surroundings,
)
from fastclip.engine.graphs import Recorder, TracedRecorder, recorder_of
from fastclip.errors import ArgumentError, BatchSizeError, GraphError, StepError, say
from fastclip.samples.inputs import flatten, rebuild

_MOST_KINDS = 8
"""Kinds of batches that are captured. Each capture holds its own memory."""
_MOST_CAPTURES, _MOST_COMPILED = 32, 8
_MOST_SEEN = 64
"""Kinds that are remembered until they come again. Names of samples make a new kind each time."""
_PLAIN = (bool, int, float, str, type(None))


_Recorders = Callable[[torch.device], Recorder]


def make_step(
    grad_states: Iterable[GradientState], model: nn.Module, loss_function: Callable[..., Tensor], *,
    physical_batch: int | None, cuda_graph: bool, compile: bool, deterministic: bool,
) -> Step:  # fmt: skip
    """`FastPrivacyEngine.make_step` for one of the models with these gradient states."""
    given = {"cuda_graph": cuda_graph, "compile": compile, "deterministic": deterministic}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} expects True or False, got {value!r}.")
    if sum(given.values()) > 1:
        both = " and ".join(name for name, value in given.items() if value)
        raise ArgumentError(
            f"{both} exclude each other. Pass one of them.",
            doc="unsupported-options",
        )
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        raise ArgumentError(
            "model expects one that each rank holds as a whole, got one sharded by fully_shard. Call "
            "model, loss and backward() yourself.",
            doc="sharded-models",
        )
    own: set[Any] = set(model.parameters())
    found = [
        grad_state
        for grad_state in grad_states
        if grad_state.names and own.issuperset(grad_state.names)
    ]
    if len(found) != 1:
        raise ArgumentError(
            "model expects one private model of this engine that trains, got one that holds "
            f"{len(found)} of them. Pass the model that make_private returned.",
            doc="wrapped-model",
        )
    (grad_state,) = found
    if grad_state.calls.batch_axis:
        raise ArgumentError(
            "make_step expects samples along axis 0, but make_private got batch_first=False. Move the "
            "batch axis first.",
            doc="batch-axis",
        )
    samples = _usual_samples(grad_state) if physical_batch is None else physical_batch
    samples = whole("physical_batch", samples, 1)
    return Step(model, grad_state, loss_function, samples, cuda_graph, compile, deterministic)


def _usual_samples(grad_state: GradientState) -> int:
    """A number of samples that few sampled batches exceed; public, as the expected batch size is."""
    expected = grad_state.clipping.expected_batch_size
    if not expected:
        raise ArgumentError(
            "physical_batch is not given, and the optimizer has no expected_batch_size to derive it "
            "from. Pass physical_batch."
        )
    draws = grad_state.batch.draws
    margin = 3 * math.sqrt(expected) if draws is None or draws.independent else 0.0
    return 8 * math.ceil((expected + margin) * grad_state.batch.views / 8)


class Step:
    """Forward pass, loss, backward pass, norms and clipped sums of one batch; see `engine.make_step`.

    Args:
        model: first argument of `loss_function`.
        grad_state: of the private model.
        loss_function: (model, *batch) -> losses [n].
        physical_batch: number of samples that run at once.
        cuda_graph: replay CUDA graphs if the model is on a GPU.
        compiles: compile a pass whole, with norms and clipped sums.
        fills: run every pass with `physical_batch` samples.
    """

    def __init__(
        self, model: nn.Module, grad_state: GradientState, loss_function: Callable[..., Tensor],
        physical_batch: int, cuda_graph: bool, compiles: bool, fills: bool = False,
    ) -> None:  # fmt: skip
        self._model, self._grad_state, self._losses_of = model, grad_state, loss_function
        self.physical_batch = physical_batch
        self._graphs, self._compiles, self._captures = cuda_graph, compiles, 0
        self._fills = fills
        self._seen: set[Any] = set()
        self._new: Any = None
        """The kind of the current batch, if it is new."""
        self._recordings: dict[Any, Recording] = {}

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "A step holds memory of a device and cannot be copied or pickled. Create another one with "
            "engine.make_step.",
            doc="compile-and-graphs",
        )

    @property
    def captured(self) -> int:
        """Number of kinds of batches that are replayed."""
        return len(self._recordings)

    def forget(self) -> None:
        """Drops all captures; call it if Python values of the loss function have changed."""
        self._recordings.clear()
        self._seen.clear()

    def __call__(self, *batch: Any) -> Tensor:
        """Clips and sums the samples of a batch, for `optimizer.step()`.

        Returns:
            The mean (or sum, as loss_reduction says) of its losses, without a graph, NOT private; 0 for
            an empty batch.

        Raises:
            fastclip.errors.*: the batch, the losses or the state of the model do not allow a pass.
        """
        grad_state = self._grad_state
        if grad_state.paused:
            raise StepError("A step cannot train inside engine.paused(). Call it outside.")
        if grad_state.batch.retired:
            raise StepError(
                "The model of this step is no longer private. Call make_private and make_step again.",
                doc="wrapped-model",
            )
        if not torch.is_grad_enabled():
            raise StepError("A step cannot train inside torch.no_grad(). Call it outside.")
        device = next(iter(grad_state.names)).device
        leaves, structure = flatten((batch, {}))
        leaves = [x.to(device, non_blocking=True) if _is_tensor(x) else x for x in leaves]
        samples, parts = self._parts(leaves)
        if len(parts) > 1 and _lists(batch, samples):
            raise BatchSizeError(
                f"The batch holds a list of {samples} values, one per sample, which a step cannot split "
                f"into parts of {self.physical_batch}. Make a tensor of them, or pass a physical_batch "
                "that holds every sampled batch."
            )
        if self._fills and _lists(batch, samples):
            raise BatchSizeError(
                f"The batch holds a list of {samples} values, one per sample, which deterministic=True "
                "cannot fill. Make a tensor of them, or omit deterministic."
            )
        if self._fills and any(_is_tensor(x) and x.requires_grad for x in leaves):
            raise GraphError(
                "A tensor of the batch has requires_grad=True, but a step with deterministic=True "
                "computes no gradient for it. Detach it, or omit deterministic.",
                doc="compile-and-graphs",
            )
        recorder = self._recorder(device)
        totals: list[Tensor] = []
        norms: list[Tensor | None] = []
        before = grad_state.batch.state, grad_state.batch.pending
        try:
            for number in grad_state.clipping.by_parts([last - first for first, last in parts]):
                first, last = parts[number]
                if number:
                    grad_state.batch.step(skip=True)
                part = [x[first:last] if _is_tensor(x) else x for x in leaves]
                totals.append(self._train(part, structure, last - first, recorder).sum())
                norms.append(grad_state.per_sample_norms)
        except BaseException:  # if the batch is tried again, no sample may count twice
            if totals or before != (grad_state.batch.state, grad_state.batch.pending):
                grad_state.batch.break_off()
            raise
        if len(norms) > 1:
            grad_state.per_sample_norms = torch.cat([x for x in norms if x is not None])
        total = sum(totals[1:], totals[0])
        return total / max(samples, 1) if grad_state.mean_loss else total

    def _parts(self, leaves: list[Any]) -> tuple[int, list[tuple[int, int]]]:
        """Number of samples, and [first, last) of each physical batch."""
        shapes = [tuple(x.shape) for x in leaves if _is_tensor(x)]
        if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise BatchSizeError(
                f"A step expects the samples of every tensor along axis 0, got shapes {shapes}. Create "
                "tensors that all samples share in the loss function."
            )
        samples, most = shapes[0][0], self.physical_batch
        parts = [(i, min(i + most, samples)) for i in range(0, samples, most)] or [(0, 0)]
        policy, batch = self._grad_state.clipping.strategy.threshold, self._grad_state.batch
        if len(parts) > 1 and policy.same_step:
            raise StepError(split_error(type(policy).__name__))
        if len(parts) > 1 and batch.draws is not None and batch.draws.stream:
            raise BatchSizeError(
                f"A step cannot split a batch of an IterableDataset, and this one holds {samples} "
                f"samples with physical_batch={most}. Lower the loader's batch_size, and call "
                "optimizer.step() after several batches.",
                doc="sampling",
            )
        units = batch.next_units is not None or (batch.draws is not None and batch.draws.by_units)
        changed = len(parts) > 1 or self._graphs or self._compiles or self._fills
        omitted = "deterministic" if self._fills else "cuda_graph and compile"
        if batch.views > 1 and changed:
            raise StepError(
                f"make_step with views={batch.views} neither captures, fills nor splits a batch, "
                f"here of {samples} samples. Omit {omitted}, and pass a physical_batch that holds "
                "every sampled batch.",
                doc="unsupported-options",
            )
        if units and changed:
            raise StepError(
                "make_step with unit_ids neither captures, fills nor splits a batch, because the number "
                f"of units varies. Omit {omitted}, and pass a physical_batch that holds every "
                "sampled batch.",
                doc="privacy-units",
            )
        return samples, parts

    def _recorder(self, device: torch.device) -> _Recorders | None:
        if self._compiles:
            return TracedRecorder
        if not self._graphs:
            return None
        recorder = recorder_of(device)
        if recorder is None:
            self._graphs = False
            say(
                f"cuda_graph=True, but the model is on {device.type!r}, so the step runs without a "
                "graph. Omit cuda_graph.",
                doc="compile-and-graphs",
            )
        return recorder

    def _train(
        self, leaves: list[Any], structure: Any, samples: int, recorder: _Recorders | None
    ) -> Tensor:
        """Let one physical batch contribute; returns its per-sample losses."""
        if self._fills and samples:
            return self._run_filled(leaves, structure, samples)
        if recorder is None or not samples:
            return self._run(leaves, structure)
        try:
            recording = self._recording(leaves, structure, recorder)
            if recording is not None:
                inputs = iter(recording.inputs)
                for leaf in leaves:
                    if _is_tensor(leaf):
                        _fill(next(inputs), leaf)
                recording.prove_again()
        except GraphError as error:
            if not self._compiles:
                raise
            self._compiles, recording = False, None
            self.forget()
            say(f"The step runs without being compiled. {error}")
        if recording is not None:
            return recording.contribute(samples)
        new, self._new = self._new, None
        losses = self._run(leaves, structure)
        if new is not None:  # the batch has run to its end
            if len(self._seen) >= _MOST_SEEN:  # every batch has other values
                self._seen.clear()
            self._seen.add(new)
        return losses

    def _run_filled(self, leaves: list[Any], structure: Any, samples: int) -> Tensor:
        """Run a batch of `physical_batch` samples, of which the first `samples` contribute.

        While steps are traced, the batch runs alone first and contributes nothing. What is found about
        it raises an error there.
        """
        grad_state = self._grad_state
        traced = grad_state.trace.wanted
        if traced:
            Rehearsed(grad_state, partial(self._run, leaves, structure))
        with grad_state.trace.untraced() if traced else nullcontext():
            filled = [_filled(x, self.physical_batch) if _is_tensor(x) else x for x in leaves]
            found = Rehearsed(grad_state, partial(self._run, filled, structure))
        batch, norm_sq = (
            grad_state.batch,
            grad_state.trace.guarded(found.norm_sq, self.physical_batch),
        )

        def write(scales: Tensor) -> None:
            factors = scales.new_zeros(*scales.shape[:-1], self.physical_batch)
            factors[..., :samples] = scales * found.factor
            found.current.write(grad_state.sums, 1.0, factors)

        batch.begin_pass()
        with arithmetic(grad_state.names):
            sampled = batch.find(samples)
            grad_state.contribute(
                norm_sq[:, :samples], found.layers(), sampled, samples, found.calls, write
            )
        return found.losses[:samples]

    def _run(self, leaves: list[Any], structure: Any) -> Tensor:
        """Run forward pass, loss and backward pass, as a training loop would."""
        batch, _ = rebuild(list(leaves), structure)
        losses = self._losses_of(self._model, *batch)
        samples = next(len(x) for x in leaves if _is_tensor(x))
        if not isinstance(losses, Tensor) or losses.shape != (samples,):
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
            raise BatchSizeError(
                f"loss_function must return one loss per sample, [{samples}], got {got}. Give the "
                'criterion reduction="none", and average over the positions of each sample.',
                doc="coupled-loss",
            )
        if samples > 1 and losses.stride() == (0,):
            raise BatchSizeError(
                "loss_function must return one loss per sample, got one number for the whole batch, "
                'expanded. Give the criterion reduction="none".',
                doc="coupled-loss",
            )
        if not losses.requires_grad:
            raise GraphError(
                "loss_function must return losses that depend on the private model's parameters, got "
                "losses without a gradient. Call the model that the step passes in, without detach() or "
                "no_grad().",
                doc="coupled-loss",
            )
        if self._grad_state.caught is not None:
            self._check_leaves(losses)
        share = 1 / max(samples, 1) if self._grad_state.mean_loss else 1.0
        losses.backward(torch.full_like(losses, share))
        return losses.detach()

    def _check_leaves(self, losses: Tensor) -> None:
        nodes, _ = reached_without([losses.grad_fn], lambda node: False)
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        others = [list(x.shape) for x in leaves if x not in self._grad_state.names]
        if others:
            raise GraphError(
                f"The loss trains tensors of shapes {others} outside the private optimizer, and a graph "
                "would overwrite their gradients. Freeze them, or omit cuda_graph and compile.",
                doc="compile-and-graphs",
            )

    # Recordings

    def _recording(
        self, leaves: list[Any], structure: Any, recorder: _Recorders
    ) -> Recording | None:
        """The recording to replay; None if this batch runs without one."""
        grad_state = self._grad_state
        grad_state.drop_stale()
        grad_state.check_unchanged()
        grad_state.check_hooks(grad_state.names)
        arm(grad_state)
        device = next(iter(grad_state.names)).device
        kind = repr((_kind(leaves), structure, surroundings(device)))
        known = self._recordings.get(kind)
        if known is not None:
            if not known.changed():
                return known
            self.forget()
        if kind not in self._seen:  # the first batch of a kind may need a dry run
            self._new = kind
            return None
        if grad_state.trace.left:  # it is not known yet whether samples are independent
            return None
        check_decided(grad_state)
        if len(self._recordings) >= _MOST_KINDS or not settled(grad_state, self.physical_batch):
            return None
        most = _MOST_COMPILED if self._compiles else _MOST_CAPTURES
        if self._captures >= most:
            return None
        if len(next(filter(_is_tensor, leaves))) < min(2, self.physical_batch):
            return None  # too few samples to compare a replay
        self._captures += 1
        if self._captures == most:
            say(
                f"The model, the loss or the batches changed so often that {most} graphs were captured. "
                "Other batches now run without a graph.",
                doc="compile-and-graphs",
            )
        self._check_place(device)
        grad_state.trace.end()  # the filled batch holds other samples than these
        inputs = [_room(x, self.physical_batch) for x in leaves if _is_tensor(x)]
        for room, leaf in zip(inputs, filter(_is_tensor, leaves), strict=True):
            _fill(room, leaf)
        held = iter(inputs)
        padded = [next(held) if _is_tensor(x) else x for x in leaves]
        recording = Recording(
            recorder(device), grad_state, partial(self._run, padded, structure), inputs,
            partial(Frozen, self._model, grad_state, device, self._losses_of),
        )  # fmt: skip
        self._recordings[kind] = recording
        return recording

    def _check_place(self, device: torch.device) -> None:
        devices = {str(x.device) for x in (*self._model.parameters(), *self._model.buffers())}
        if devices != {str(device)}:
            raise GraphError(
                f"A graph expects the whole model on one device, got {sorted(devices)}. Move it, or "
                "omit cuda_graph and compile.",
                doc="compile-and-graphs",
            )


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _lists(value: Any, samples: int) -> bool:
    """Whether a list or an array in the batch, not a tensor, has one value per sample."""
    if isinstance(value, Mapping):
        return any(_lists(x, samples) for x in value.values())
    if isinstance(value, (list, tuple)):
        own = len(value) == samples and not any(map(_is_tensor, flatten(value)[0]))
        return own or any(_lists(x, samples) for x in value)
    shape: Any = getattr(value, "shape", ())
    return not _is_tensor(value) and bool(shape) and shape[0] == samples


def _kind(leaves: list[Any]) -> tuple[Any, ...]:
    """The properties of a batch that a graph freezes."""
    strange = [type(x).__name__ for x in leaves if not isinstance(x, (Tensor, *_PLAIN))]
    if strange:
        raise GraphError(
            f"A graph expects tensors and plain values in a batch, got {strange}. Take the tensors out "
            "of them, or omit cuda_graph and compile.",
            doc="compile-and-graphs",
        )
    if any(_is_tensor(x) and x.requires_grad for x in leaves):
        raise GraphError(
            "A tensor of the batch has requires_grad=True, but a graph computes no gradient for it. "
            "Detach it, or omit cuda_graph and compile.",
            doc="compile-and-graphs",
        )
    return tuple((x.dtype, tuple(x.shape[1:])) if _is_tensor(x) else x for x in leaves)


def _room(x: Tensor, samples: int) -> Tensor:
    return x.new_empty(samples, *x.shape[1:])


def _filled(x: Tensor, samples: int) -> Tensor:
    room = _room(x, samples)
    _fill(room, x)
    return room


def _fill(room: Tensor, x: Tensor) -> None:
    """Copy the samples of x into `room`, and fill the rest with its first sample."""
    x = x.detach()
    if len(x) == len(room):
        room.copy_(x)
        return
    room[: len(x)].copy_(x)
    room[len(x) :].copy_(x[:1].expand(len(room) - len(x), *x.shape[1:]))
