"""Bare layers in a model that torch.compile turns into one graph: pure functions with taps.

A compiler keeps no side effects of a backward pass. So each call of a layer gets taps: extra inputs that
do not change its result. Their gradients are what the call would list (`fastclip.backward.bare`). All
taps of a forward pass are outputs of one function, and its backward takes their gradients.

A tap has the shape of its gradient. An uncompiled pass over the same layers shows this shape for any
number of samples. A call without a matching tap goes through `PrivateLayer` in the same pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastclip.backward import python_nodes
from fastclip.backward.python_nodes import uncast
from fastclip.core.autograd import differentiable_once, private_function, takes_part, unopened
from fastclip.core.torch_names import version_of
from fastclip.errors import GraphError
from fastclip.rules.contribution import LastCast, multiplied
from fastclip.rules.records import written_to

_MOST = 32
"""Number of kinds of calls for which shapes are kept."""
Kind = tuple[torch.Size, torch.dtype]
"""Of a tensor [b, ...], without b."""


class Use(NamedTuple):
    """A call of a layer, as a pass has listed it.

    Attributes:
        number: of the layer. operand, gradient: what it has left. An embedding leaves no operand.
    """

    number: int
    operand: Kind | None
    gradient: Kind


@dataclass
class Layer:
    """A layer with calls that may get taps.

    Attributes:
        slot: of fastclip.backward.python_nodes. weight, bias: as planned.
        lists: "operands", per-sample "gradients", or "indices". number_of_all: unique among all layers.
        settings: its module's attributes that the computation uses.
        key: of its computation and lists, unique among all layers. A graph holds it as a constant.
    """

    number: int
    slot: Any
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    lists: str
    number_of_all: int
    settings: tuple[tuple[str, Any], ...] = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        trained = [p is not None and p.requires_grad for p in (self.weight, self.bias)]
        self.settings = tuple(self.slot.settings.items())
        self.key = f"{self.number_of_all} {self.settings} {trained}"

    @property
    def as_planned(self) -> bool:
        """Whether it still computes what it did when it was planned."""
        return bool(self.slot.holds(self.module))

    def with_parameters(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """The module with these tensors instead of its parameters, and their `requires_grad`."""
        made = object.__new__(type(self.module))
        own: dict[str, Any] = {"weight": weight.detach().requires_grad_(self.weight.requires_grad)}
        if self.bias is not None and bias is not None:
            own["bias"] = bias.detach().requires_grad_(self.bias.requires_grad)
        held = {**self.module._parameters, **own}
        made.__dict__.update({**self.module.__dict__, **dict(self.settings), "_parameters": held})
        return made


@dataclass
class Given:
    """What one layer's calls get in a forward pass.

    Attributes:
        weight, bias: detached, because a graph must have no edge to parameters.
        taps: of each call; a call without an operand has one tap. used: calls so far.
        eager: one of them ran uncompiled.
        indices: of each call of an embedding. versions: of these tensors as the forward pass ended.
    """

    layer: Layer
    weight: Tensor
    bias: Tensor | None
    taps: list[tuple[Tensor | None, Tensor]] = field(default_factory=list)
    used: int = 0
    eager: bool = False
    indices: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


GIVEN: dict[int, Given] = {}
"""Of the running forward pass, by the layers' numbers among all."""
_LAYERS: WeakValueDictionary[str, Layer] = WeakValueDictionary()
"""By their keys, because a graph holds only constants and tensors."""


def _given(layer: Layer) -> Given:
    bias = None if layer.bias is None else layer.bias.detach()
    return Given(layer, layer.weight.detach(), bias)


def call(number: int, module: nn.Module, x: Any) -> Tensor | None:
    """A layer's call, which torch.compile may trace; None if it must go through `PrivateLayer`."""
    given = GIVEN.get(number)
    if given is None or given.used == len(given.taps) or not torch.is_grad_enabled():
        return None
    layer, own, (first, second) = given.layer, module._parameters, given.taps[given.used]
    same = own["weight"] is layer.weight and own.get("bias") is layer.bias
    if not same or not _fits(layer, x, first, second):
        return None
    for name, value in layer.settings:  # constants in a graph
        if getattr(module, name) != value:
            return None
    given.used += 1
    if not torch.compiler.is_dynamo_compiling():
        given.eager = True
    if layer.lists == "indices":
        given.indices.append(x)
    return _in_graph(layer.key, x, given.weight, given.bias, first, second)


def _fits(layer: Layer, x: Any, first: Tensor | None, second: Tensor) -> bool:
    """Whether a call with this input fits the taps."""
    if not isinstance(x, Tensor) or x.device != second.device:
        return False
    if layer.lists == "operands" and second.dtype != multiplied(x):
        return False
    if layer.lists == "gradients":
        return x.shape[0] == second.shape[0]
    if layer.lists == "indices":
        return x.shape == second.shape[:-1]
    return x.shape == first.shape if first is not None else x.shape[:-1] == second.shape[:-1]


def _in_graph(
    key: str, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor | None, second: Tensor
) -> Tensor:
    """One call in dynamo's graph, which the compiler's backend traces into."""
    layer = _LAYERS[key]
    x, extra = layer.slot.rule.prepare(layer.with_parameters(weight, bias), (x,), {})
    out: Tensor = _TappedLayer.apply(layer, extra, x, weight, bias, first, second)
    return out


class _TappedLayer(Function):
    """A layer; it lists the gradients of its two taps."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        extra: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *taps: Any,
    ) -> Tensor:
        module, rule = layer.with_parameters(weight, bias), layer.slot.rule
        operand = LastCast().of(x) if rule.multiplies else x
        out, saved = rule.forward(module, operand, extra)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.layer, ctx.called, ctx.dtype = layer, (None, module, extra), x.dtype
        ctx.kinds = [None if tap is None else tap.dtype for tap in taps]
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        nothing = None, None
        if g is None:
            return (*nothing, None, *nothing, *nothing)
        layer: Layer = ctx.layer
        wanted = [
            p if p is not None and p.requires_grad else None for p in (layer.weight, layer.bias)
        ]
        with uncast(g):
            found, (operand, own) = layer.slot.gradient(ctx, g, wanted)
        if found is not None and found.dtype != ctx.dtype:
            found = found.to(ctx.dtype)
        for tap, got in zip(ctx.kinds, (operand, own), strict=True):
            if None not in (tap, got) and tap != got.dtype:
                raise GraphError(
                    f"{type(layer.module).__name__} records {got.dtype} for clipping, but an earlier "
                    f"pass recorded {tap}. Call the model without torch.compile.",
                    doc="compile-and-graphs",
                )
        return (*nothing, found, *nothing, None if layer.lists == "indices" else operand, own)


@private_function
class _Taps(Function):
    """All taps of a forward pass. Its backward lists their gradients."""

    @staticmethod
    def forward(ctx: Any, tapped: TappedLayers, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.tapped, ctx.pass_ = tapped, tapped.running
        ctx.set_materialize_grads(False)
        samples = ctx.pass_.rows
        zeros: dict[torch.dtype, Tensor] = {}
        taps = []
        for use in ctx.pass_.uses:
            for kind in (use.operand, use.gradient):
                if kind is None:
                    continue
                shape, dtype = kind
                if dtype not in zeros:
                    zeros[dtype] = parameters[0].new_zeros((), dtype=dtype)
                taps.append(zeros[dtype].expand(samples, *shape))
        return tuple(taps)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        running: _Pass = ctx.pass_
        edges = zip(running.parameters, ctx.next_functions, strict=True)
        ctx.tapped.take(running, gradients, {p for p, (node, _) in edges if takes_part(node)})
        return (None,) * (1 + len(running.parameters))


@dataclass
class _Pass:
    """A forward pass in which layers get taps."""

    forward: Any
    rows: int
    uses: Sequence[Use]
    given: dict[int, Given]
    """By the layers' numbers."""
    parameters: list[nn.Parameter]


class TappedLayers:
    """The layers of one model with calls that may get taps.

    Attributes:
        slots: of the bare layers. left: gradients of taps, as `fastclip.backward.bare.Left`.
        learning: the kind of the running call, if its pass must show what its layers list.
    """

    def __init__(self, slots: Any) -> None:
        self.slots = slots
        self.layers: dict[int, Layer] = {}
        self.left: list[tuple] = []
        self.learning: Hashable = None
        self.running: Any = None
        self.eager = False
        """Calls with taps ran uncompiled: torch.compile has given up on code that makes them."""
        self._seen: dict[Hashable, list[Use]] = {}
        self._noted: list[tuple[Any, Use]] = []
        self._versions = 0
        """Of the tensors in `left`, when they were taken."""

    def plan(self, layers: dict[int, Layer]) -> None:
        """Set the model's layers, by their numbers."""
        self.layers = layers
        _LAYERS.update((layer.key, layer) for layer in layers.values())
        self._seen.clear()
        self.learning, self.eager = None, False

    def lay(self, forward: Any, kind: Hashable) -> bool:
        """Begin a forward pass.

        Args:
            kind: of the call.

        Returns:
            Whether its calls have taps. If not, it must run uncompiled, which shows their shapes.
        """
        if self.eager:
            return False
        uses = self._seen.get(kind)
        if uses is None or not all(layer.as_planned for layer in self.layers.values()):
            self.learning, self._noted = kind, []
            return False
        self.learning = None
        if not uses:
            return True
        given = {use.number: _given(self.layers[use.number]) for use in uses}
        own = [p for one in given.values() for p in (one.layer.weight, one.layer.bias)]
        trained = [*dict.fromkeys(p for p in own if p is not None and p.requires_grad)]
        self.running = _Pass(forward, forward.batch_size, uses, given, trained)
        taps = iter(_Taps.apply(self, *trained))
        for use in uses:
            first = None if use.operand is None else next(taps)
            given[use.number].taps.append((first, next(taps)))
        GIVEN.update((one.layer.number_of_all, one) for one in given.values())
        torch.compiler.allow_in_graph(_in_graph)
        return True

    def end(self) -> None:
        """It has returned, or failed."""
        running, self.running = self.running, None
        if running is None:
            return
        self.eager |= any(one.eager for one in running.given.values())
        for one in running.given.values():
            GIVEN.pop(one.layer.number_of_all, None)
            one.taps = []
            one.versions = [*map(version_of, one.indices)]

    def take(self, running: Any, gradients: Sequence[Tensor | None], wanted: set) -> None:
        """Take the gradients of the taps, which a backward pass has reached."""
        if self.slots.paused or not wanted:
            return
        if not self.slots.opened:
            raise unopened("a private layer")
        found, turn = iter(gradients), dict.fromkeys(running.given, 0)
        for use in running.uses:
            one, k = running.given[use.number], turn[use.number]
            turn[use.number] += 1
            first, second = None if use.operand is None else next(found), next(found)
            layer = one.layer
            weight, bias = (p if p in wanted else None for p in (layer.weight, layer.bias))
            if second is None or (weight is None and bias is None):
                continue
            if layer.lists == "indices":
                first = one.indices[k]
                if version_of(first) != one.versions[k]:
                    raise written_to()
            extra = layer.slot.extra
            self.left.append((use.number, running.forward, first, second, weight, bias, extra))
            self._versions += version_of(second) + (0 if first is None else version_of(first))

    def taken(self) -> tuple[list[tuple], bool]:
        """The taps' gradients, which are forgotten, and whether one was written to since."""
        left, before = self.left, self._versions
        self.left, self._versions = [], 0
        now = (version_of(x) for one in left for x in one[2:4] if x is not None)
        return left, sum(now) != before

    def note(self, left: Iterable[tuple]) -> None:
        """Note what a pass has listed, while `learning`."""
        for number, forward, x, g, *_ in left:
            layer = self.layers.get(number)
            if layer is None:
                continue
            operand = None if x is None or layer.lists == "indices" else (x.shape[1:], x.dtype)
            self._noted.append((forward, Use(number, operand, (g.shape[1:], g.dtype))))

    def learnt(self) -> None:
        """The pass has ended."""
        kind, noted = self.learning, self._noted
        self.learning, self._noted = None, []
        if kind is None or len({id(forward) for forward, _ in noted}) > 1:
            return
        if len(self._seen) == _MOST:
            self._seen.clear()
        self._seen[kind] = [use for _, use in reversed(noted)]


def what_lists(slot: Any) -> str:
    """The kind of tensors that such a layer lists."""
    if isinstance(slot, python_nodes.Norm):
        return "gradients"
    return "indices" if isinstance(slot, python_nodes.Lookup) else "operands"
