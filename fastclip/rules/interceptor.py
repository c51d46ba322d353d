"""Intercepts functions called with a parameter, and identifies uses and derived values.

Calls of one function with the same parameters at one line of code are alike. The probe
(fastclip.samples.learning) determines what they are, and the batch axes of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fastclip.core.torch_names import (
    CallingPlace,
    CheckpointFunction,
    Native,
    calling_place,
    current_task,
    settled,
)
from fastclip.errors import BatchSizeError, GraphError, UnsupportedLayerError
from fastclip.rules.chance import (
    Chance,
    check_repeats,
    given,
    is_of_torch,
    leaves_of,
    mapped,
    outputs,
)
from fastclip.rules.contraction import Product
from fastclip.rules.derived import (
    Derived,
    DerivedGraph,
    PrivateParameter,
    check_current,
    detached,
    edge_of,
    intercepted,
    is_private,
    opened,
    parameters_of,
)
from fastclip.rules.recompute import RecomputeUse
from fastclip.rules.use import (
    Intercepts,
    Operands,
    Target,
    UseCall,
    UseRule,
    UseState,
    in_place,
    plain_name,
    rules_of,
)
from fastclip.samples.batch_axis import BatchAxis
from fastclip.samples.calls import Forward
from fastclip.samples.layout import BatchLayout, Rows
from fastclip.samples.probing import Opened, Probe
from fastclip.samples.state import applied_by

# -------------------------------------------------------------------------------------------------
# Keys that identify the calls of one function, in the next pass and in the probe.


_NOT_A_CALLER = (
    "torch/overrides.py", "torch/_tensor.py", "fastclip/rules/derived.py",
    "fastclip/rules/interceptor.py", "fastclip/engine/model_loss.py",
)  # fmt: skip


class Key(NamedTuple):
    """Identifies a use by function, parameters, place in the code and dimensions of the rest."""

    label: str
    private: tuple[int, ...]
    place: CallingPlace
    dims: tuple[int, ...]


class Keys:
    """The keys of one model's calls.

    Args:
        names: of its parameters.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._keys: dict[Any, Key] = {}

    def of(self, func: Callable, private: list[Any], plain: list[Tensor]) -> Key:
        """Returns the key of a call three frames above the caller."""
        names, place = self._names, calling_place(4, _NOT_A_CALLER)
        dims = tuple(dict.fromkeys([x.dim() for x in plain]))
        known = (func, place, dims, *[_identity(x) for x in private])
        key = self._keys.get(known)
        if key is None:
            held = sorted({names.get(p, "?") for value in private for p in parameters_of(value)})
            labels = tuple(  # once each: a list may hold one per sample
                dict.fromkeys(
                    value.source.label if type(value) is Derived else hash(names.get(value, "?"))
                    for value in private
                )
            )
            label = f"{', '.join(held)} in {plain_name(func)}"
            key = self._keys[known] = Key(label, labels, settled(place), dims)
        return key


def _identity(value: Any) -> int:
    """Of a parameter, which the model keeps alive; of a derived value, how it was made."""
    return value.source.label if type(value) is Derived else id(value)


# -------------------------------------------------------------------------------------------------
# What the probe learns about functions called with a parameter: which are uses, and their batch axes.


def probed(
    interceptor: Intercepts, probe: Probe, key: Key, func: Callable, args: tuple, kwargs: dict,
    private: list[Any], plain: list[Tensor],
) -> Any:  # fmt: skip
    """Returns the output of a call while the model is probed.

    Args:
        private, plain: the tensors among its arguments.
    """
    layout = probe.layout
    layout.met.add(key)
    layout.users.update(probe.inside[-1:])
    # a tensor with a gradient replaces a sample, if all others are constants
    used = layout.uses.get(key)
    data = [x for x in plain if probe.holds(x) or x.requires_grad]
    if not used:  # a loop may begin with zeros
        used = bool(data)
        if used or plain:
            layout.uses[key] = used
    # a rule raises its errors before anything has run
    bound = [rule.bind(plain_name(func), args, kwargs) or {} for rule in rules_of(func)]
    if not used:
        if probe.graph is None:
            probe.graph = DerivedGraph(interceptor)
        out = probe.graph.derive(func, args, kwargs, hash(key))
        if in_place(func) and type(args[0]) is Derived:
            args[0].source.written.append(key)
        rows = _rows_met(bound, private)
        for x in leaves_of((out, args[:1])) if in_place(func) else leaves_of(out):
            if type(x) is Derived:
                x.source.rows |= rows
                probe.derived.setdefault(key, []).append(tuple(x.shape))
        return out
    if in_place(func) and is_private(args[0]):
        _misjudged(layout, key, args[0])
    for value in private:
        layout.proxied.update(parameters_of(value))
    if not all(x.is_floating_point() for x in data):
        layout.chosen |= dict.fromkeys(_chosen_from(private), key.label)
    if not probe.closed:
        probe.users.setdefault(key, {})[tuple(probe.inside)] = None
    changes = in_place(func)
    with Native():
        plain_args, plain_kwargs = mapped(detached, (args, kwargs))
        if is_of_torch(func):
            out = func(*plain_args, **plain_kwargs)
        else:
            out = check_repeats(key.label, func, plain_args, plain_kwargs)
    shown = [args[0]] if changes else outputs(out)
    marks: dict[int, Tensor] = {}
    for x in shown:
        result = _Mark.apply(
            changes, x, torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        )
        probe.show(key, result)
        marks[id(x)] = result
    if changes:
        return None if out is None else marks[id(args[0])]
    return mapped(lambda x: marks.get(id(x), x) if isinstance(x, Tensor) else x, out)


def _misjudged(layout: BatchLayout, key: Key, target: Any) -> None:
    """Marks calls as uses if their tensor, filled with parameters, takes values of the batch.

    Raises:
        Opened: repeats the run. UnsupportedLayerError: it is no such tensor.
    """
    written = target.source.written if type(target) is Derived else []
    if not written:
        raise UnsupportedLayerError(
            f"{key.label}: values of the batch change a value of parameters in place, which is "
            "unsupported. Use the function that returns a new tensor."
        )
    layout.uses |= dict.fromkeys(written, True)
    raise Opened


def _rows_met(bound: list[Operands], private: list[Any]) -> set[Rows]:
    """Returns the constants whose rows are those of the function's output."""
    found = {rows for x in private if type(x) is Derived for rows in x.source.rows}
    for operands in bound:
        product = operands.get("product")
        if not isinstance(product, Product) or not product.out:
            continue
        for number, letters in enumerate(product.letters):
            x, axis = operands[str(number)], letters.find(product.out[0])
            if type(x) is Tensor and axis >= 0 and x.shape[axis] > 1:
                found.add(Rows.of(x, axis))
    return found


def _chosen_from(private: list[Any]) -> set[Rows]:
    """Returns the rows of these values that are still there."""
    values = [x for x in private if type(x) is Derived]
    return {rows for x in values for rows in x.source.rows if rows.number in x.shape}


class _Mark(Function):
    """The identity, whose output needs a gradient."""

    @staticmethod
    def forward(ctx: Any, changes: bool, x: Tensor, dummy: Tensor) -> Tensor:
        if changes:
            ctx.mark_dirty(x)
            return x
        return x.clone() if ctx.needs_input_grad[1] else x.data

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        return None, g, None


# -------------------------------------------------------------------------------------------------
# Reentrant checkpoints run as non-reentrant ones: equally exact and sparing, and followed.
#
# A reentrant one detaches its arguments and returns values without a history. Their origin is lost,
# and no gradient can be taken through it.


@contextmanager
def followed_checkpoints() -> Iterator[None]:
    """Context in which checkpoints keep the history of values, reentrant or not."""
    before = CheckpointFunction.apply

    def apply(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        given = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if not given or not torch.is_grad_enabled():  # nothing in it gets a gradient
            return before(run_function, preserve_rng_state, *args)
        return checkpoint(
            run_function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    with applied_by(apply):
        yield


# -------------------------------------------------------------------------------------------------


_REPLAY = RecomputeUse()


class Interceptor:
    """Intercepts the functions called with parameters of one private model.

    Args:
        grad_state: takes the records.
    """

    def __init__(self, grad_state: UseState) -> None:
        self.grad_state = grad_state
        self._keys = Keys(grad_state.names)
        grad_state.calls.intercepting = self.on

    def __deepcopy__(self, memo: dict[int, Any]) -> Interceptor:
        raise UnsupportedLayerError(
            "A private model cannot be copied while it runs. Copy it after the forward pass.",
            doc="changed-model",
        )

    @contextmanager
    def on(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Context in which the uses of these parameters are seen, in any kind of checkpoint."""
        parameters = list(parameters)
        with intercepted(parameters, self), followed_checkpoints() if parameters else nullcontext():
            yield

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a function called with a private value among its arguments."""
        if func is torch.autograd.grad:
            raise self._asked(leaves_of((args, kwargs)))
        body = opened(func, args, kwargs)
        found = NotImplemented if body is None else body(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if not torch.is_grad_enabled():
            with Native():
                return func(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        private = [x for x in leaves if is_private(x)]
        plain = [
            x for x in leaves
            if isinstance(x, Tensor) and not is_private(x) and not _is_number(x)
        ]  # fmt: skip
        key = self._keys.of(func, private, plain)
        probe = self.grad_state.calls.probe
        if probe is not None:
            return probed(self, probe, key, func, args, kwargs, private, plain)
        layout, forward, opens = self._here(key, bool(plain))
        used = layout.uses.get(key, bool(plain)) if layout is not None else bool(plain)
        if not used:
            forward.reached.add(key)
            if forward.derived is None:
                forward.derived = DerivedGraph(self)
            return forward.derived.derive(func, args, kwargs, hash(key))
        if layout is None:
            raise GraphError(
                f"{key.label} is used outside the model's forward, its methods and its parts, "
                "where fastclip cannot identify samples. Use it in the model's forward, and "
                "return one loss per sample, of shape [b].",
                doc="untracked-use",
            )
        out = self._use(layout, forward, key, func, args, kwargs, private)
        forward.reached.add(key)
        if opens:
            for x in outputs(args[0] if out is None else out):
                self.grad_state.begins_with(forward, x)
        return out

    def _asked(self, values: list[Any]) -> UnsupportedLayerError:
        """Returns the error for a forward pass that takes gradients of private values."""
        found = (p for x in values if is_private(x) for p in parameters_of(x))
        names = dict.fromkeys(self.grad_state.names.get(p, "?") for p in found)
        return UnsupportedLayerError(
            f"torch.autograd.grad inside forward takes gradients of {', '.join(names)}, which are "
            "sums over all samples. Take gradients of inputs or hidden values instead.",
            doc="second-backward",
        )

    def _here(self, key: Key, plain: bool) -> tuple[BatchLayout | None, Forward, bool]:
        forward, opens = self.grad_state.layer_forward(key if plain else None)
        if forward.layout is None:
            return None, forward, opens
        if (plain or not forward.layout.known) and not forward.routings:
            self.grad_state.calls.layout_with(key, forward)
        return forward.layout, forward, opens

    def _use(
        self, layout: BatchLayout, forward: Forward, key: Key, func: Callable, args: tuple,
        kwargs: dict, private: list[Any],
    ) -> Any:  # fmt: skip
        batch_axis = layout.batch_axes.get(key)
        changes = in_place(func)
        target: Any = args[0] if changes else None
        if changes and is_private(target):
            raise UnsupportedLayerError(
                f"{key.label}: values of the batch change a value of parameters in place, which is "
                "unsupported. Use the function that returns a new tensor."
            )
        out_args, out_kwargs = mapped(detached, (args, kwargs))
        before = target.detach().clone() if changes and _may_need(func, kwargs) else None
        # torch's functions with a rule draw nothing, and only that rule calls them again
        known = is_of_torch(func) and rules_of(func)
        chance = None if known else Chance(func, leaves_of((out_args, out_kwargs)))
        with Native():
            out = func(*out_args, **out_kwargs)
        drew = chance is not None and chance.drew()
        tensors = [target] if changes else outputs(out)
        shown = [] if is_of_torch(func) else given(out, target)
        hooked: dict[int, Tensor] = {}
        # a checkpoint that runs again repeats a turn: no gradient comes to it there
        turns = key in layout.turns and batch_axis is None and current_task() == -1
        taker = forward.turn(key, key.label) if turns else None
        for number, tensor in enumerate(tensors):
            batch_axis = (
                None
                if batch_axis is None
                else self._checked(layout, forward, key, batch_axis, tensor)
            )
            call = self._call(
                forward,
                key,
                func,
                args,
                kwargs,
                private,
                batch_axis,
                tensor,
                before,
                changes,
                number,
            )
            if chance is not None:
                call.repeated_with(chance, drew, shown)
            if batch_axis is None:
                call.taker = taker
                self._follow(layout, forward, key, call)
            result = call.hooked(tensor)
            if call.routing is not None:
                call.number = call.routing.watch(result)
            hooked[id(tensor)] = result
        if changes:
            return None if out is None else hooked[id(target)]
        return mapped(lambda x: hooked.get(id(x), x) if isinstance(x, Tensor) else x, out)

    def _checked(
        self, layout: BatchLayout, forward: Forward, key: Key, batch_axis: BatchAxis, out: Tensor
    ) -> BatchAxis | None:
        """Returns the batch axis of this output.

        Raises:
            BatchSizeError: it cannot hold them.
        """
        batch = forward.batch_size or 0
        found = layout.place_of(key, out, batch, forward.lengths)
        if found is not None:
            return found
        self.grad_state.calls.look_again(layout, forward, key, out)
        found = layout.place_of(key, out, batch, forward.lengths)
        if found is None and key in layout.batch_axes:
            raise BatchSizeError(
                f"{key.label}: its output of shape {list(out.shape)} cannot hold {batch} samples "
                f"along axis {layout.batch_axes[key].axis}. Keep the batch along one axis."
            )
        return found

    def _call(
        self, forward: Forward, key: Key, func: Callable, args: tuple, kwargs: dict,
        private: list[Any], batch_axis: BatchAxis | None, out: Tensor, before: Tensor | None,
        changes: bool, number: int,
    ) -> UseCall:  # fmt: skip
        if before is not None:
            args = (before, *args[1:])
        rule, operands = _rule(func, args, kwargs, out, batch_axis, whole=number == 0)
        targets = {n: self._target(v, forward) for n, v in operands.items() if is_private(v)}
        if not targets:
            rule, operands = _REPLAY, _REPLAY.bind(plain_name(func), args, kwargs)
            targets = {n: self._target(v, forward) for n, v in operands.items() if is_private(v)}
        call = UseCall(
            self,
            forward,
            func,
            rule,
            operands,
            targets,
            batch_axis,
            changes=changes,
            label=key.label,
        )
        call.number_of_output = number
        self.grad_state.plan_log.met(key.label, rule.name)
        return call

    def _target(self, value: Any, forward: Forward) -> Target:
        with Native():
            if type(value) is PrivateParameter:
                return Target(value.detach(), (value,))
            source = value.source
            check_current(source, forward.derived)
            parameters, edge = tuple(source.parameters), edge_of(value)
            return Target(value.detach(), parameters, source.graph, edge, source.lies)

    def _follow(self, layout: BatchLayout, forward: Forward, key: Key, call: UseCall) -> None:
        """Lets the enclosing module that moves rows identify their samples in the backward pass."""
        routers = layout.routers.get(key, ())
        for path, routing in forward.routings:
            if not routers or path in routers:  # the innermost; of one never met, of any
                call.routing = routing


def _is_number(x: Tensor) -> bool:
    """Whether this is an index or a size: it may identify a call, but enters no computation."""
    return not x.dim() and not x.is_floating_point() and not x.is_complex()


def _may_need(func: Callable, kwargs: dict) -> bool:
    """Whether the old values of what is changed in place matter for the gradient."""
    return plain_name(func) not in ("add", "sub") or bool(kwargs)


def _rule(
    func: Callable,
    args: tuple,
    kwargs: dict,
    out: Tensor,
    batch_axis: BatchAxis | None,
    *,
    whole: bool,
) -> tuple[UseRule, Operands]:
    name = plain_name(func)
    # rules do not cover complex numbers: a product's gradient takes the other factor's conjugate
    for rule in rules_of(func) if whole and not out.is_complex() else []:
        operands = rule.bind(name, args, kwargs)
        if operands is None or (batch_axis is None and not rule.routed):
            continue
        private = [n for n, value in operands.items() if is_private(value)]
        if private and rule.fits(operands, private, out, batch_axis):
            return rule, operands
    return _REPLAY, _REPLAY.bind(name, args, kwargs)
