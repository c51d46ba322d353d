"""What becomes of a function that is called with a parameter: a use with a batch, or a derived value.

Calls of one function with the same parameters at one line of code are alike; what they are, and where
the samples are in what they return, is learnt by the probe (fastclip.samples.learning).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastclip._torch import Native, current_task
from fastclip.errors import VALUES_IN_LOSSES, BatchSizeError, GraphError, UnsupportedLayerError
from fastclip.samples.calls import Forward
from fastclip.samples.layout import BatchLayout
from fastclip.samples.place import Place
from fastclip.uses.arguments import leaves_of, mapped, outputs
from fastclip.uses.chance import Chance, given, is_of_torch
from fastclip.uses.checkpoints import followed_checkpoints
from fastclip.uses.composite import opened
from fastclip.uses.derived import DerivedGraph, check_current, edge_of
from fastclip.uses.keeper import Keeper
from fastclip.uses.key import Key, Keys
from fastclip.uses.probed import probed
from fastclip.uses.proxy import (
    PrivateParameter,
    detached,
    intercepted,
    is_private,
    parameters_of,
)
from fastclip.uses.replay import ReplayUse
from fastclip.uses.rule import Operands, UseRule, in_place, plain_name, rules_of
from fastclip.uses.tap import Target, UseCall

_REPLAY = ReplayUse()


class Interceptor:
    """Of one private model.

    Args:
        keeper: to whom records go.
    """

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._keys = Keys(keeper.names)
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
        probe = self.keeper.calls.probe
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
                f"{key.label} is used outside the model's forward, its methods and its parts, where its "
                f"samples cannot be told; use it inside one of them: {VALUES_IN_LOSSES}"
            )
        out = self._use(layout, forward, key, func, args, kwargs, private)
        forward.reached.add(key)
        if opens:
            for x in outputs(args[0] if out is None else out):
                self.keeper.begins_with(forward, x)
        return out

    def _asked(self, values: list[Any]) -> UnsupportedLayerError:
        """The forward pass asks for gradients of private values, which no private layer gives."""
        found = (p for x in values if is_private(x) for p in parameters_of(x))
        names = dict.fromkeys(self.keeper.names.get(p, "?") for p in found)
        return UnsupportedLayerError(
            f"torch.autograd.grad inside forward takes gradients of {', '.join(names)}, which are sums "
            "over all samples; take them of inputs or hidden values, which are each sample's own"
        )

    def _here(self, key: Key, plain: bool) -> tuple[BatchLayout | None, Forward, bool]:
        forward, opens = self.keeper.layer_forward(key if plain else None)
        if forward.layout is None:
            return None, forward, opens
        if (plain or not forward.layout.known) and not forward.routings:
            self.keeper.calls.layout_with(key, forward)
        return forward.layout, forward, opens

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
        # torch's functions with a rule draw nothing, and are not called again but by that rule
        known = is_of_torch(func) and rules_of(func)
        chance = None if known else Chance(func, leaves_of((out_args, out_kwargs)))
        with Native():
            out = func(*out_args, **out_kwargs)
        drew = chance is not None and chance.drew()
        tensors = [target] if changes else outputs(out)
        shown = [] if is_of_torch(func) else given(out, target)
        tapped: dict[int, Tensor] = {}
        # a checkpoint that runs again repeats a turn: no gradient comes to it there
        turns = key in layout.turns and place is None and current_task() == -1
        taker = forward.turn(key, key.label) if turns else None
        for number, tensor in enumerate(tensors):
            place = None if place is None else self._checked(layout, forward, key, place, tensor)
            call = self._call(
                forward, key, func, args, kwargs, private, place, tensor, before, changes, number
            )
            if chance is not None:
                call.repeated_with(chance, drew, shown)
            if place is None:
                call.taker = taker
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
        routers = layout.routers.get(key, ())
        for path, routing in forward.routings:
            if not routers or path in routers:  # the innermost; of one never met, of any
                call.routing = routing


def _is_number(x: Tensor) -> bool:
    """An index or a size: what it is taken from may be known by it, but nothing is computed with it."""
    return not x.dim() and not x.is_floating_point() and not x.is_complex()


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
