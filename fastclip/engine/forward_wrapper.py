"""Code around a module's forward: opens the pass at the root, and follows samples in parts."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fastclip.backward.guards import arm
from fastclip.backward.state import GradientState
from fastclip.core.autograd import fills_a_checkpoint
from fastclip.core.compiler import disable_dynamo, graphs_made, pass_over
from fastclip.core.torch_names import current_task
from fastclip.distributed.ranks import whole
from fastclip.engine.interception import ATTRIBUTE, LayerHook
from fastclip.engine.own_forward import check_given, eagerly, enter, follow, has_more, left
from fastclip.errors import GraphError, see
from fastclip.rules.recurrent import sorted_by
from fastclip.rules.routing import Routing
from fastclip.samples.calls import FORWARD, Entered, Forward
from fastclip.samples.inputs import tensors_of

_NO_SAMPLES = "The batch has no samples, which Poisson sampling allows"
_PLACEHOLDER = "Pass rand_on_empty=True to make_private"
_TAKEN = "let forward accept 0 samples, with x.flatten(1) instead of x.view(len(x), -1)"
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _explain(error: BaseException | None, samples: int | None) -> None:
    """Add the suggested fix to an error that a forward pass over no samples has raised."""
    plain = type(error) in (RuntimeError, ValueError, IndexError, ZeroDivisionError)
    if error is not None and plain and samples == 0 and len(error.args) == 1:
        library = _library(error)
        fix = (
            f", and {library} does not accept it. {_PLACEHOLDER}."
            if library
            else f". {_PLACEHOLDER}, or {_TAKEN}."
        )
        error.args = (see(f"{str(error).rstrip('.')}. {_NO_SAMPLES}{fix}", "sampling"),)


def _library(error: BaseException) -> str:
    """The installed library that raised the error, other than torch; empty for a script's own code."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("torch", "fastclip"):
            found = name if frame.f_code.co_filename.startswith(_INSTALLED) else ""
    return found


@contextmanager
def _explained(samples: int | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the model raises
        _explain(error, samples)
        raise


@pass_over
def call_root(model: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call a model whose forward may be private.

    Code of the user's that changes the inputs before forward is a part of the call.
    """
    handle = model.__dict__.get(ATTRIBUTE)
    if handle is None or not has_more(model):
        return model(*args, **kwargs)
    inner = partial(eagerly, MethodType(type(model).__call__, model))
    return RootForwardWrapper(whole=True).run(handle, model, inner, args, kwargs)


class RootForwardWrapper:
    """Wraps the model's own forward: finds the batch size, and opens the pass at the output's gradient.

    Args:
        whole: code that runs around forward is tracked too.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole

    def run(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        entered = self.enter(handle, module, inner, args, kwargs)
        with entered:
            out = inner(*entered.args, **entered.kwargs)
        return entered.opening(out)

    @disable_dynamo
    def enter(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> RootCall:
        """Run everything before the model's forward; the first training call probes `inner`."""
        trace = handle.grad_state.trace
        try:
            with trace.aside():
                return self._entered(handle, module, inner, args, kwargs)
        except BaseException:
            trace.end()
            raise

    def _entered(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> RootCall:
        grad_state = handle.grad_state
        if grad_state.calls.probe:
            return RootCall(args, kwargs)
        outermost, alone = not grad_state.depth and torch.is_grad_enabled(), False
        if outermost and current_task() != -1:
            # outside a pass, nodes made while the model was paused may ask for their tensors
            if not (grad_state.running or grad_state.paused or fills_a_checkpoint()):
                raise GraphError(
                    "A reentrant checkpoint around the whole private model runs a second backward pass. "
                    "Use checkpoint(model, ..., use_reentrant=False).",
                    doc="second-backward",
                )
            # a recomputation: its records belong to the running pass, if there is one
            outermost, alone = False, not grad_state.running
        layout = grad_state.calls.layout_of(FORWARD)
        followed = partial(_followed, grad_state, inner)
        called = Entered(FORWARD, module, followed, args, kwargs)
        if outermost:
            if not (self._whole or grad_state.paused):
                check_given(handle.path, module, args, kwargs)
            grad_state.check_unchanged()
            due = grad_state.calls.due(layout, called)
            with whole(grad_state.clipping.ranks, due):
                if due:
                    with _explained(layout.batch_size(args, kwargs)):
                        grad_state.calls.learn(layout, called)
            arm(grad_state)
            if layout.by_values:
                grad_state.calls.traces(True)
        batch = layout.batch_size(args, kwargs, begins=outermost)
        if outermost and not grad_state.paused and grad_state.trace.wanted:
            grad_state.drop_stale()
            given = layout.read(args, kwargs)
            cuts = layout.cuts(given.way)
            grad_state.trace.forward(
                given.leaves,
                cuts,
                batch,
                flat=layout.flat,
                proven=layout.proven,
                asked=layout.asked,
            )
        inside = grad_state.root_forward(batch, layout)
        if alone:
            inside = _both(inside, grad_state.calls.intercepted(layout.proxied))
        return RootCall(args, kwargs, grad_state, inside, called if outermost else None)


@contextmanager
def _both(
    inside: AbstractContextManager[Forward], noticing: AbstractContextManager[Any]
) -> Iterator[Forward]:
    """A recomputation outside any pass, where parameters record their uses as in the first run."""
    with inside as forward, noticing:
        yield forward


def _followed(grad_state: GradientState, inner: Callable, *args: Any, **kwargs: Any) -> Any:
    return follow("", grad_state, inner, args, kwargs)


class RootCall:
    """One call of the model's own forward; without a gradient state it only passes the call on.

    torch.compile does not trace its methods.
    """

    def __init__(
        self, args: tuple, kwargs: dict, grad_state: GradientState | None = None,
        inside: AbstractContextManager[Forward] | None = None, called: Entered | None = None,
    ) -> None:  # fmt: skip
        self.args, self.kwargs = args, kwargs
        self._grad_state, self._called = grad_state, called
        self._inside = inside or nullcontext(Forward(None))
        self._forward = self._inside.__enter__()
        self._routing: Routing | None = None
        self._graphs: int | None = None
        """Number of torch.compile's graphs before the model's forward, if it may make one."""
        self.eager = False
        """The model's own code uses parameters and must not be compiled."""
        if grad_state is not None and called is not None:
            layout = self._forward.layout
            grad_state.calls.begin(called, layout.proxied if layout is not None else ())
            enter("", self._forward)
            self.eager = layout is not None and "" in layout.users
            called.forward = self._forward
            if not (grad_state.paused or grad_state.trace.observing or grad_state.calls.shards):
                grad_state.bare.begin(self._forward)
            self._forward.inputs = (args, kwargs)
            if self._forward.layout is not None and self._forward.layout.folds:
                self._forward.lengths = self._forward.layout.lengths(args, kwargs)

    @disable_dynamo
    def may_be_traced(self) -> bool:
        """Whether torch.compile may trace the model's forward in this call."""
        if self._grad_state is None or self._called is None:
            return True
        self._graphs = graphs_made()
        traced = self._grad_state.bare.lays(tensors_of((self.args, self.kwargs)))
        if not traced and self._called.following is None:
            self._called.follow(eager=True)
        return traced

    @pass_over
    def __enter__(self) -> RootCall:
        return self

    @disable_dynamo
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the model's forward. For an error on an empty batch, add the suggested fix."""
        if self._called is not None:
            self._called.ran()
            if self._grad_state is not None:
                self._grad_state.bare.end()
        _explain(error, self._forward.batch_size)
        if self._called is not None:
            if error is not None and self._grad_state is not None:
                self._grad_state.trace.end()
            _, self._routing = self._forward.inside.pop()
        self._inside.__exit__(None, None, None)
        if error is not None and self._forward.layout is not None:
            self._forward.layout.ended()
        if self._grad_state is not None and self._called is not None:
            self._grad_state.calls.end(self._called)
            if error is not None:
                self._grad_state.trace.end()

    @disable_dynamo
    def opening(self, out: Any) -> Any:
        """Hook the model's output so that its gradient opens the backward pass, and return it."""
        if self._routing is not None:
            out = left("", self._forward, self._routing, out)
        if (
            self._grad_state is not None
            and self._called is not None
            and not self._grad_state.paused
        ):
            hook = partial(self._grad_state.open_pass, self._forward)
            for tensor in tensors_of(out):
                if tensor.grad_fn is not None:
                    tensor.register_hook(hook)
            out = self._checked(self._grad_state, self._called, out)
        return out

    def _checked(self, grad_state: GradientState, called: Entered, out: Any) -> Any:
        called.compiles = self._graphs is not None and self._graphs != graphs_made()
        try:
            if not grad_state.trace.proves(out):
                grad_state.calls.compare(called, grad_state.trace.mixes)
            out = grad_state.calls.returned(called, out)
        except BaseException:
            grad_state.trace.end()
            raise
        grad_state.trace.returned(out, self._forward.batch_size)
        return out


class PartForwardWrapper:
    """Wraps a part of the model with its own parameters, which a script may call by itself."""

    def run(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        grad_state = handle.grad_state
        if grad_state.depth:
            return inner(*args, **kwargs)
        if not (grad_state.paused or grad_state.calls.probe or grad_state.recomputes):
            check_given(handle.path, module, args, kwargs)
        with grad_state.calls.inside(f"{handle.path}()", module, inner, args, kwargs) as returned:
            return returned(inner(*args, **kwargs))


class RecurrentForwardWrapper:
    """Wraps Opacus' recurrent layers: a PackedSequence holds samples sorted by length."""

    def run(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        x = args[0] if args else kwargs.get("input")
        grad_state = handle.grad_state
        if not isinstance(x, PackedSequence):
            return inner(*args, **kwargs)
        if grad_state.calls.probe:  # samples are sorted by length, in the order of `sample_order`
            outside, grad_state.calls.probe.trusted = grad_state.calls.probe.trusted, True
            try:
                return inner(*args, **kwargs)
            finally:
                grad_state.calls.probe.trusted = outside
        forward, _ = grad_state.layer_forward()
        samples = int(x.batch_sizes[0])
        order = x.sorted_indices
        if order is None:
            order = torch.arange(samples, device=x.data.device)
        if forward.batch_size is None:
            forward.batch_size = samples
        forward.sample_order = order
        try:
            with grad_state.bare.aside():
                return inner(*args, **kwargs)
        finally:
            forward.sample_order = None


class SortedForwardWrapper:
    """Wraps torch's recurrent layers, and records how the samples of a PackedSequence are sorted."""

    def run(
        self, handle: LayerHook, module: nn.Module, inner: Callable, args: tuple, kwargs: dict
    ) -> Any:
        x = args[0] if args else kwargs.get("input")
        before = sorted_by.set(x.sorted_indices if isinstance(x, PackedSequence) else None)
        try:
            return inner(*args, **kwargs)
        finally:
            sorted_by.reset(before)
