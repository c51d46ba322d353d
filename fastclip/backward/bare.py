"""Layers that run bare: each call is one node of autograd's graph, of C++ (csrc/step) or lean Python.

The node returns its input's gradient and lists the input and the output's gradient; a layer that
normalizes lists samples' gradients, of one call of `fastclip.ops`. What is listed becomes records when
the pass ends. A call that is not standard (a transform, a checkpoint or other hooks on saved tensors,
another batch axis, replaced parameters) goes through `PrivateLayer` in the same pass.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward import python_nodes
from fastclip.backward.python_nodes import uncast
from fastclip.backward.tapped import TappedLayers
from fastclip.core.autograd import is_of_cpp, refusing, unopened
from fastclip.core.building import of_this_torch
from fastclip.core.numerics import lost_squares, may_be_zero
from fastclip.core.torch_names import hooks_of, version_of
from fastclip.errors import GraphError, where
from fastclip.rules.protocol import all_unchanged
from fastclip.rules.records import written_to
from fastclip.samples.calls import Forward
from fastclip.samples.layout import BatchLayout

_CHOSEN = os.environ.get("FASTCLIP_NODES", "")
nodes: Any
"""The module that makes them: fastclip._step, or the same in Python."""
try:
    if _CHOSEN in ("0", "python"):
        raise ImportError(f"FASTCLIP_NODES={_CHOSEN}")
    nodes, WHY_NOT = of_this_torch("_step", "step"), ""
except ImportError as error:
    nodes, WHY_NOT = python_nodes, str(error)
SERVES = _CHOSEN != "0"
"""Whether layers may be bare; else all go through `PrivateLayer`."""

Left = tuple[int, Forward, Any, Tensor, Any, Any, Any]
"""What a layer leaves: its number, the forward pass, its input and its output's gradient (of one that
normalizes samples' gradients of weight and bias; none where the weight of a linear layer takes no part),
its weight and bias where they take part, and the second result of its rule's `prepare`."""
Listed = tuple[
    list[int], list[Forward], list[Any], list[Tensor], list[Any], list[Any], list[Any], bool
]
"""What all layers leave in a pass, as columns, and whether one of the tensors was written to since."""
NORMS: tuple[Callable[..., tuple[Tensor | None, ...]], ...] = (
    ops.layer_norm_backward, ops.rms_norm_backward, ops.group_norm_backward,
)  # fmt: skip
"""By the numbers that nodes have for them."""
_ALL: WeakValueDictionary[int, BareLayers] = WeakValueDictionary()
"""By the addresses that C++ knows."""


class BareLayers:
    """The bare layers of one model.

    Attributes:
        layers: all its layers with rules, by the numbers that nodes know, each with its handle.
        plans: says which of them are bare in calls of such a layout. settles: makes records of what was
            listed. takes: makes records of what one layer leaves, while the pass runs.
    """

    plans: Callable[[BareLayers, BatchLayout], None]
    settles: Callable[[Any, Listed], None]
    takes: Callable[[BareLayers, Left], None]

    def __init__(self) -> None:
        self.layers: list[tuple[Any, nn.Module]] = []
        self.paths: list[str] = []
        """Of those that are bare."""
        self.known: set[int] = set()
        """Those that have been bare: nodes of an earlier plan may still be in a graph."""
        self.parameters: list[nn.Parameter] = []
        """Of these, as far as they are trained."""
        self.modules: dict[type, list[nn.Module]] = {}
        """These, by their classes."""
        self.endings: dict[Hashable, Any] = {}
        """How passes end, by what they have listed."""
        self.listed = self.taken = 0
        """Calls of bare layers that the last pass has taken: when it ended, and while it ran."""
        self._hooks: list[Any] = []
        """Hooks on gradients of `parameters`, all guards when last checked. This is no Snapshot, because
        every pass asks twice, and a new hook is checked instead of raising an error."""
        self._planned: tuple[BatchLayout, int] | None = None
        self._begun: Forward | None = None
        """The forward pass that runs, and may have bare layers."""
        self.slots = nodes.Slots() if SERVES else None
        self.laid = False
        """Calls of the running forward pass have taps (`fastclip.backward.tapped`)."""
        self._users: set[str] = set()
        """Modules that use parameters by themselves."""
        self.tapped = TappedLayers(self.slots)
        if self.slots is not None:
            _ALL[self.slots.address] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> BareLayers:
        """A copy has layers of its own, of which none is bare yet."""
        made = BareLayers()
        made.layers = copy.deepcopy(self.layers, memo)
        if self.layers:
            made.plans, made.settles, made.takes = self.plans, self.settles, self.takes
        return made

    def __reduce__(self) -> Any:
        return BareLayers, ()

    def begin(self, forward: Forward) -> None:
        """Begin a forward pass of the model, in which layers may be bare."""
        layout = forward.layout
        self.end()
        if self.slots is None or not self.layers or layout is None or forward.batch_size is None:
            return
        if self._planned is None or self._planned != (layout, layout.version):
            self.plans(self, layout)
            self._planned = layout, layout.version
        if self.paths and self.are_as_they_were():
            forward.reached.update(self.paths)
            self.slots.begin(forward, forward.batch_size)
            self._begun = forward

    def lays(self, inputs: Iterable[Tensor]) -> bool:
        """Give the calls taps, because torch.compile may trace the forward pass that has begun.

        Args:
            inputs: of the model.

        Returns:
            False if it must run without them: the lists of its layers are not known yet, or there are
            no samples.
        """
        forward = self._begun
        if forward is None or forward.layout is None or forward.layout.axis:
            return True
        if not forward.batch_size:
            return False
        kinds = tuple((x.shape[1:], x.dtype, x.device.type) for x in inputs)
        devices = {device for *_, device in kinds} | {p.device.type for p in self.parameters[:1]}
        cast = (*((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),)
        self.laid = self.tapped.lay(forward, (kinds, frozenset(cast)))
        self._users = forward.layout.users
        return self.laid

    def traced(self, path: str) -> bool:
        """Whether torch.compile traces this part of the model and may continue: its private layers have
        taps and no parameter is used by itself, or no gradient is computed."""
        if not torch.compiler.is_dynamo_compiling():
            return False
        return not torch.is_grad_enabled() or (self.laid and path not in self._users)

    def are_as_they_were(self) -> bool:
        """The bare layers compute what their classes' rules were written for."""
        return all(map(all_unchanged, self.modules, self.modules.values()))

    def check_hooks(self, check: Callable[[list[nn.Parameter]], None]) -> None:
        """Of the bare layers' parameters, as a backward pass begins and when it ends.

        Args:
            check: raises an error for parameters with hooks on their gradients.
        """
        hooks = hooks_of(self.parameters)
        if len(hooks) != len(self._hooks) or not all(map(is_, hooks, self._hooks)):
            check(self.parameters)
            self._hooks = hooks

    def end(self) -> None:
        """It has returned, or failed."""
        self._begun, self.laid = None, False
        self.tapped.end()
        if self.slots is not None:
            self.slots.end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside no call is bare, and no node lists anything."""
        if self.slots is None:
            yield
            return
        before, self.slots.paused = self.slots.paused, True
        try:
            yield
        finally:
            self.slots.paused = before

    def owns(self, node: Any) -> bool:
        """Whether a node of the graph is one of theirs, and contributes as things are."""
        if self.slots is None or self.slots.paused:
            return False
        if nodes is not python_nodes and not is_of_cpp(node):
            return False
        return bool(nodes.slots_of(node) == self.slots.address)

    def opened(self, now: bool) -> None:
        """Say whether a backward pass runs that ends with `settle`. Entries listed before it began
        belong to another pass, which ends with an error."""
        if self.slots is not None:
            if now:
                self.slots.take()
                self.tapped.taken()
                self.taken = 0
            self.slots.opened = now

    def drop(self) -> None:
        """Drop what a failed pass has left; no pass runs, forward or backward."""
        if self.slots is not None:
            self.slots.opened = False
            self.end()
            self.slots.take()
            self.tapped.taken()

    def settle(self, grad_state: Any) -> None:
        """The pass has ended: make records of what nodes have listed, and let go of it.

        Raises:
            GraphError: layers have changed since the model's forward pass, or what they were given has.
        """
        found = None if self.slots is None else self.slots.take()
        if self.tapped.learning is not None and found is not None:
            self.tapped.note(zip(*found[:-1], strict=True))
            self.tapped.learnt()
        if self.tapped.left:
            assert found is not None
            left, written = self.tapped.taken()
            columns = zip(found[:-1], zip(*left, strict=True), strict=True)
            found = *([*a, *b] for a, b in columns), found[-1] or written
        self.listed = 0 if found is None else len(found[0])
        if found is None or not (self.listed or self.taken):
            return
        self.check_hooks(grad_state.check_hooks)
        if not self.are_as_they_were():
            raise GraphError(
                "A layer's methods were replaced between the model's forward pass and the end of the "
                "backward pass. Replace them before the forward pass, and call make_private again.",
                doc="changed-tensors",
            )
        if self.listed:
            self.settles(grad_state, found)


def _refuse(address: int, number: int) -> None:
    """Raise an error: a node was reached by a backward pass that was not opened."""
    bare = _ALL.get(address)
    handle, module = bare.layers[number] if bare is not None else (None, None)
    raise unopened("a private layer" if handle is None else where(handle.path, module))


def _take(address: int, one: Left) -> None:
    """Take what a layer has left, without holding any of it."""
    bare = _ALL[address]
    bare.taken += 1
    if bare.tapped.learning is not None:
        bare.tapped.note([one])
    with uncast(one[3]):
        bare.takes(bare, one)


def _normalized(
    kind: int, operands: list[Tensor | None], need_input: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of a layer that normalizes: of its input, and by sample of its weight and bias."""
    x, g, mean, rstd, weight = operands
    assert g is not None
    given = (x, g, rstd, weight) if mean is None else (x, g, mean, rstd, weight)
    with uncast(g):
        found = NORMS[kind](*given, need_input)
    return found if len(found) == 3 else (*found, None)


for made_by in {nodes, python_nodes}:
    made_by.ask(_refuse, _take, refusing, _normalized)


# -------------------------------------------------------------------------------------------------
# Bare linear layers on a CPU: norms in one call, sums in few.


ROOM = 1 << 20
"""Bytes of sums that are computed at once; the operands of their layers are freed then."""


@dataclass
class LinearStack:
    """Weights [p, d] of k layers, with the layers' inputs a [b, t, d] and output gradients g [b, t, p];
    where t is 1 they may be [b, d] and [b, p].

    Attributes:
        single: t is 1 of all of them, else of none. transposed: of each, whether its weight is [d, p].
    """

    single: bool
    parameters: list[nn.Parameter]
    a: list[Tensor]
    g: list[Tensor]
    transposed: list[bool]

    def __post_init__(self) -> None:
        self._versions = [*map(version_of, (*self.a, *self.g))]

    @property
    def device(self) -> torch.device:
        """On which the sums are computed."""
        return self.parameters[0].device

    def norms(self) -> Tensor:
        """Squared norms of the weights' gradients, [k, b]."""
        if not self.single:
            return ops.gram_norms([*zip(self.a, self.g, strict=True)]).raised()
        return nodes.single_norms(self.a, self.g, *map(_lost, (self.a, self.g)))

    def clipped_sums(self, scales: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of every weight; its operands are let go of.

        Args:
            scales: [b], or [k, b].
        """
        if [*map(version_of, (*self.a, *self.g))] != self._versions:
            raise written_to()
        any_zero, last = may_be_zero(scales), len(self.parameters)
        while last:
            first = self._first_of(last)
            own = scales if scales.dim() == 1 else scales[first:last]
            turned = self.transposed[first:last]
            sides = zip(self.a[first:], self.g[first:], turned, strict=True)
            a, g = zip(*((g, a) if t else (a, g) for a, g, t in sides), strict=True)
            del self.a[first:], self.g[first:]
            sums = nodes.scaled_sums(a, g, own, any_zero)
            del a, g
            yield from zip(self.parameters[first:last], sums, strict=True)
            last = first

    def _first_of(self, last: int) -> int:
        """The first of the layers before the `last`, counted from 1, with sums that fit together."""
        first, size = last - 1, self.parameters[last - 1].nbytes
        while first and (size := size + self.parameters[first - 1].nbytes) <= ROOM:
            first -= 1
        return first


def _lost(side: list[Tensor]) -> list[float]:
    """What squares that underflow can hide of each."""
    kinds = [(x.shape[-1], x.dtype) for x in side]
    known = {kind: lost_squares(*kind) for kind in {*kinds}}
    return [known[kind] for kind in kinds]
