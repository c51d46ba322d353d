"""What becomes of a function that is called with a parameter: a use with a batch, or a derived value.

Calls of one function with the same parameters at one line of code are alike; what they are, and where
the samples are in what they return, is learnt by the probe (fastclip.samples.learning).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastclip._torch import Native
from fastclip.errors import BatchSizeError, GraphError, UnsupportedLayerError
from fastclip.samples.calls import Forward
from fastclip.samples.layout import BatchLayout
from fastclip.samples.place import Place
from fastclip.samples.probing import Misjudged, Probe
from fastclip.uses.arguments import leaves_of, mapped
from fastclip.uses.checkpoints import followed_checkpoints
from fastclip.uses.composite import opened
from fastclip.uses.derived import DerivedGraph, check_current, edge_of
from fastclip.uses.keeper import Keeper
from fastclip.uses.proxy import Derived, PrivateParameter, detached, intercepted, is_private
from fastclip.uses.replay import RANDOM, ReplayUse
from fastclip.uses.rule import Operands, UseRule, in_place, plain_name, rules_of
from fastclip.uses.tap import Target, UseCall

_REPLAY = ReplayUse()
_NOT_A_CALLER = ("torch/overrides.py", "torch/_tensor.py")


class Key(NamedTuple):
    """By which a use is known again: function, parameters, line of code, dimensions of the rest."""

    label: str
    private: tuple[int, ...]
    code: Any
    line: int
    dims: tuple[int, ...]


class Interceptor:
    """Of one private model.

    Args:
        keeper: to whom records go.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._keys: dict[Any, Key] = {}
        keeper.calls.intercepting = self.on

    def __deepcopy__(self, memo: dict[int, Any]) -> Interceptor:
        raise UnsupportedLayerError("a private model cannot be copied while it runs")

    @contextmanager
    def on(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """These parameters notice their uses inside, whatever kind of checkpoint they are in."""
        parameters = list(parameters)
        with intercepted(parameters, self), followed_checkpoints() if parameters else nullcontext():
            yield

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """A function is called with a private value among its arguments."""
        if func is Tensor.__getitem__ and is_private(args[0]):
            args = (args[0], _numbered(args[1]))
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
        key = self._key(func, private, plain)
        probe = self.keeper.calls.probe
        if probe is not None:
            return self._probed(probe, key, func, args, kwargs, private, plain)
        layout, forward, opens = self._here(key, bool(plain))
        used = layout.uses.get(key, bool(plain)) if layout is not None else bool(plain)
        if not used:
            forward.reached.add(key)
            if forward.derived is None:
                forward.derived = DerivedGraph(self)
            return forward.derived.derive(func, args, kwargs, hash(key))
        if layout is None:
            raise GraphError(
                f"{key.label} is used outside the model's forward, its methods and its parts, where its "
                "samples cannot be told; use it inside one of them"
            )
        out = self._use(layout, forward, key, func, args, kwargs, private)
        forward.reached.add(key)
        if opens:
            for x in _outputs(args[0] if out is None else out):
                self.keeper.begins_with(forward, x)
        return out

    def _here(self, key: Key, plain: bool) -> tuple[BatchLayout | None, Forward, bool]:
        forward, opens = self.keeper.layer_forward(key if plain else None)
        if forward.layout is None:
            return None, forward, opens
        if (plain or not forward.layout.known) and not forward.routings:
            self.keeper.calls.layout_with(key, forward)
        return forward.layout, forward, opens

    # Uses

    def _use(
        self, layout: BatchLayout, forward: Forward, key: Key, func: Callable, args: tuple,
        kwargs: dict, private: list[Any],
    ) -> Any:  # fmt: skip
        place = layout.places.get(key)
        changes = in_place(func)
        target: Any = args[0] if changes else None
        if changes and is_private(target):
            raise UnsupportedLayerError(
                f"{key.label}: a value of parameters is changed in place by values of the batch; "
                "use the function that returns a new tensor"
            )
        out_args, out_kwargs = mapped(detached, (args, kwargs))
        before = target.detach().clone() if changes and _may_need(func, kwargs) else None
        with Native():
            out = func(*out_args, **out_kwargs)
        tensors = [target] if changes else _outputs(out)
        tapped: dict[int, Tensor] = {}
        for number, tensor in enumerate(tensors):
            place = None if place is None else self._checked(layout, forward, key, place, tensor)
            call = self._call(
                forward, key, func, args, kwargs, private, place, tensor, before, changes, number
            )
            if place is None:
                self._follow(layout, forward, key, call)
            result = call.tap(tensor)
            if call.routing is not None:
                call.number = call.routing.watch(result)
            tapped[id(tensor)] = result
        if changes:
            return None if out is None else tapped[id(target)]
        return mapped(lambda x: tapped.get(id(x), x) if isinstance(x, Tensor) else x, out)

    def _checked(
        self, layout: BatchLayout, forward: Forward, key: Key, place: Place, out: Tensor
    ) -> Place | None:
        """Where the samples are in this output.

        Raises:
            BatchSizeError: it cannot hold them.
        """
        batch = forward.batch_size or 0
        found = layout.place_of(key, out, batch, forward.lengths)
        if found is not None:
            return found
        self.keeper.calls.look_again(layout, forward, key, out)
        found = layout.place_of(key, out, batch, forward.lengths)
        if found is None and key in layout.places:
            raise BatchSizeError(
                f"{key.label}: its output of shape {list(out.shape)} cannot hold {batch} samples along "
                f"axis {layout.places[key].axis}; keep the batch along one axis"
            )
        return found

    def _call(
        self, forward: Forward, key: Key, func: Callable, args: tuple, kwargs: dict,
        private: list[Any], place: Place | None, out: Tensor, before: Tensor | None, changes: bool,
        number: int,
    ) -> UseCall:  # fmt: skip
        if before is not None:
            args = (before, *args[1:])
        rule, operands = _rule(func, args, kwargs, out, place, whole=number == 0)
        targets = {n: self._target(v, forward) for n, v in operands.items() if is_private(v)}
        if not targets:
            rule, operands = _REPLAY, _REPLAY.bind(plain_name(func), args, kwargs)
            targets = {n: self._target(v, forward) for n, v in operands.items() if is_private(v)}
        if rule is _REPLAY and plain_name(func) in RANDOM:
            raise UnsupportedLayerError(
                f"{key.label}: {func.__name__} draws random numbers, which cannot be drawn again in "
                "the backward pass; apply it to the batch alone"
            )
        call = UseCall(
            self, forward, func, rule, operands, targets, place, changes=changes, label=key.label
        )
        call.number_of_output = number
        self.keeper.plan_log.met(key.label, rule.name)
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
        """Rows that are moved: the module that runs around them will tell whose they are."""
        router = layout.routers.get(key)
        for path, routing in forward.routings:
            if router is None or path == router:  # else one that was never met: the innermost
                call.routing = routing

    # Probes

    def _probed(
        self, probe: Probe, key: Key, func: Callable, args: tuple, kwargs: dict,
        private: list[Any], plain: list[Tensor],
    ) -> Any:  # fmt: skip
        layout = probe.layout
        layout.met.add(key)
        layout.users.update(probe.inside[-1:])
        used, taint = layout.uses.get(key), probe.taint
        if used is None or (not used and taint is not None):  # a loop may begin with zeros
            used = any(map(taint.holds, plain)) if taint is not None else bool(plain)
            if used or plain:
                layout.uses[key] = used
        if not used:
            if probe.graph is None:
                probe.graph = DerivedGraph(self)
            out = probe.graph.derive(func, args, kwargs, hash(key))
            if in_place(func) and type(args[0]) is Derived:
                args[0].source.written.append(key)
            for x in leaves_of((out, args[:1])) if in_place(func) else leaves_of(out):
                if type(x) is Derived:
                    probe.derived.setdefault(key, []).append(tuple(x.shape))
            return out
        if in_place(func) and is_private(args[0]):
            self._misjudged(layout, key, args[0])
        for value in private:
            layout.proxied.update(_parameters(value))
        if taint is not None and not any(map(taint.holds, plain)):
            probe.constants.add(key)
        if not probe.closed:
            probe.users[key] = tuple(probe.inside)
        changes = in_place(func)
        with Native():
            plain_args, plain_kwargs = mapped(detached, (args, kwargs))
            out = func(*plain_args, **plain_kwargs)
        shown = [args[0]] if changes else _outputs(out)
        marks: dict[int, Tensor] = {}
        for x in shown:
            result = _Mark.apply(
                changes, x, torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            )
            if probe.taint is not None:
                probe.taint.mark(result)
            probe.show(key, result)
            probe.source(key, result)
            marks[id(x)] = result
        if changes:
            return None if out is None else marks[id(args[0])]
        return mapped(lambda x: marks.get(id(x), x) if isinstance(x, Tensor) else x, out)

    @staticmethod
    def _misjudged(layout: BatchLayout, key: Key, target: Any) -> None:
        """A tensor that parameters were written into takes values of the batch: they were uses.

        Raises:
            Misjudged: so that the run is made again. UnsupportedLayerError: it was no such tensor.
        """
        written = target.source.written if type(target) is Derived else []
        if not written:
            raise UnsupportedLayerError(
                f"{key.label}: a value of parameters is changed in place by values of the batch; "
                "use the function that returns a new tensor"
            )
        layout.uses |= dict.fromkeys(written, True)
        raise Misjudged

    def _key(self, func: Callable, private: list[Any], plain: list[Tensor]) -> Key:
        frame = sys._getframe(4)
        while frame.f_code.co_filename.endswith(_NOT_A_CALLER):
            frame = frame.f_back  # type: ignore[assignment]
        names = self.keeper.names
        dims = tuple(dict.fromkeys([x.dim() for x in plain]))
        known = (func, frame.f_code, frame.f_lasti, dims, *[_identity(x) for x in private])
        key = self._keys.get(known)
        if key is None:
            held = sorted({names.get(p, "?") for value in private for p in _parameters(value)})
            labels = tuple(  # once each: a list may hold as many as there are rows
                dict.fromkeys(
                    value.source.label if type(value) is Derived else hash(names.get(value, "?"))
                    for value in private
                )
            )
            label = f"{', '.join(held)} in {plain_name(func)}"
            key = self._keys[known] = Key(label, labels, frame.f_code, frame.f_lasti, dims)
        return key


def _identity(value: Any) -> int:
    """Of a parameter, which the model keeps alive; of a derived value, how it was made."""
    return value.source.label if type(value) is Derived else id(value)


def _numbered(index: Any) -> Any:
    """W[e] of a tensor e without dimensions is a part of W, as of a number: torch reads it, too."""
    if isinstance(index, tuple):
        return tuple(map(_numbered, index))
    plain = type(index) is Tensor and not index.dim() and index.dtype in (torch.int64, torch.int32)
    return int(index) if plain else index


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


def _parameters(value: Any) -> Iterable[nn.Parameter]:
    return (value,) if type(value) is PrivateParameter else value.source.parameters


def _is_number(x: Tensor) -> bool:
    """An index or a size: what it is taken from may be known by it, but nothing is computed with it."""
    return not x.dim() and not x.is_floating_point() and not x.is_complex()


def _outputs(out: Any) -> list[Tensor]:
    """The tensors that a gradient may come to."""
    tensors = [x for x in leaves_of(out) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]


def _may_need(func: Callable, kwargs: dict) -> bool:
    """Whether the old values of what is changed in place matter for the gradient."""
    return plain_name(func) not in ("add", "sub") or bool(kwargs)


def _rule(
    func: Callable, args: tuple, kwargs: dict, out: Tensor, place: Place | None, *, whole: bool
) -> tuple[UseRule, Operands]:
    name = plain_name(func)
    # of complex numbers the rules know nothing: a product's gradient takes the other's conjugate
    for rule in rules_of(func) if whole and not out.is_complex() else []:
        operands = rule.bind(name, args, kwargs)
        if operands is None or (place is None and not rule.routed):
            continue
        private = [n for n, value in operands.items() if is_private(value)]
        if private and rule.fits(operands, private, out, place):
            return rule, operands
    return _REPLAY, _REPLAY.bind(name, args, kwargs)
