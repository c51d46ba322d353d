"""Bare layers of a model, which run as one node, and the records made of their lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward import bare as backward_bare
from fastclip.backward import python_nodes
from fastclip.backward.bare import BareLayers, Left, LinearStack, Listed
from fastclip.backward.layer_function import Call, LayerBackward
from fastclip.backward.state import GradientState
from fastclip.backward.tapped import Layer, what_lists
from fastclip.engine.interception import LayerHook
from fastclip.ops.planner import NormMethod
from fastclip.rules.conv import ConvRule, geometry_of, zeros_around
from fastclip.rules.embedding import ONLY_PLAIN, EmbeddingRule, padding_of
from fastclip.rules.linear import LinearRule, TransposedLinearRule, by_position
from fastclip.rules.norm import GroupNormRule, LayerNormRule, RMSNormRule
from fastclip.rules.records import BiasRecord, KeptRecord, LinearRecord, written_to
from fastclip.samples.batch_axis import BatchAxis
from fastclip.samples.layout import BatchLayout

# -------------------------------------------------------------------------------------------------
# At the end of a backward pass, what bare layers have listed becomes records.


_FIRST_AXIS = BatchAxis(0)
_MOST = 32
"""Number of endings that are cached."""
_KIND = attrgetter("shape", "dtype", "device")
NORMS: dict[Any, int] = {type(rule): k for k, rule in enumerate(python_nodes.NORMS)}
"""Rules of normalization layers, and their numbers in nodes."""
LINEAR: dict[Any, bool] = {LinearRule: False, TransposedLinearRule: True}
"""Rules of linear layers that may be bare, and whether their weights are transposed."""


def settle(grad_state: GradientState, listed: Listed) -> None:
    """Make records of what nodes have listed in the pass that ends.

    Raises:
        GraphError: inputs of layers were changed in place since.
    """
    bare = grad_state.bare
    numbers, forwards, inputs, gradients, weights, biases, _, written = listed
    if written:
        raise written_to()
    firsts = {own: k for k, own in reversed([*enumerate(map(id, forwards))])}
    for k in sorted(firsts.values()):
        grad_state.admit(bare.layers[numbers[k]][0].path, forwards[k], len(gradients[k]))
    others = frozenset(grad_state.current.others())
    kinds = [None if x is None else _KIND(x) for x in inputs]  # None if its weight is frozen
    key = (
        tuple(numbers), tuple(kinds), tuple(map(_KIND, gradients)),
        tuple(map(id, weights)), tuple(map(id, biases)), grad_state.units is None, others,
        ops.computes_reference(gradients[0]),
    )  # fmt: skip
    ending = bare.endings.get(key)
    if ending is None:
        if len(bare.endings) == _MOST:
            bare.endings.clear()
        ending = bare.endings[key] = _Ending(grad_state, listed, others)
    ending.run(grad_state, listed)


@dataclass
class _Group:
    """Linear layers whose norms are computed from their inputs and output gradients.

    Attributes:
        single: each sample has one position. stacked: a CPU computes their norms together; on a GPU
            kernels do so for all records. layers: indices in the list.
    """

    single: bool
    stacked: bool
    layers: list[int] = field(default_factory=list)
    transposed: list[bool] = field(default_factory=list)


class _Ending:
    """The end of a pass that has listed certain layers, with tensors of certain kinds.

    Args:
        others: ids of parameters with other contributions.
    """

    def __init__(self, grad_state: GradientState, listed: Listed, others: frozenset[int]) -> None:
        numbers, _, inputs, gradients, weights, biases, *_ = listed
        self._groups: dict[Hashable, _Group] = {}
        self._rest: list[int] = []
        """Indices of layers that are recorded one by one, in this order."""
        self._alone: set[int] = set()
        """Indices of layers whose parameters have no other use."""
        noted: dict[tuple[str, tuple, NormMethod], list[str]] = {}
        uses = Counter(id(p) for p in (*weights, *biases) if p is not None)
        uses.update(others)
        for k, number in enumerate(numbers):
            handle, _ = grad_state.bare.layers[number]
            rule, x, g = handle.rule, inputs[k], gradients[k]
            own = [uses[id(p)] for p in (weights[k], biases[k]) if p is not None]
            alone = grad_state.units is None and set(own) == {1} and weights[k] is not None
            if alone:
                self._alone.add(k)
            if type(rule) not in LINEAR or not alone:
                self._rest.append(k)
                continue
            b, t, d = x.shape[0], torch.Size(x.shape[1:-1]).numel(), x.shape[-1]
            choice = grad_state.planner.linear(
                b, t, d, g.shape[-1], x.element_size(), True, x.device
            )  # fmt: skip
            if not (choice.ghost and b and t):
                self._rest.append(k)
                continue
            kind = t == 1, ops.computes_reference(x), g.dtype
            group = self._groups.setdefault(kind, _Group(*kind[:2]))
            group.layers.append(k)
            group.transposed.append(LINEAR[type(rule)])
            noted.setdefault((rule.name, (b, t, d), choice), []).append(handle.path)
        self._noted = noted

    def run(self, grad_state: GradientState, listed: Listed) -> None:
        """Make records of what was listed."""
        numbers, forwards, inputs, gradients, weights, biases, extras, _ = listed
        for (name, shape, choice), paths in self._noted.items():
            grad_state.plan_log.note_all(paths, name, shape, choice)
        keep = grad_state.current.keep
        for k in self._rest:
            left = (
                numbers[k], forwards[k], inputs[k], gradients[k], weights[k], biases[k], extras[k],
            )  # fmt: skip
            _record(grad_state, left, keep if k in self._alone else partial(_keep, grad_state))
        for group in self._groups.values():
            a, g = ([_flattened(side[k]) for k in group.layers] for side in (inputs, gradients))
            own, biases_of = ([side[k] for k in group.layers] for side in (weights, biases))
            if group.stacked:
                stack = LinearStack(group.single, own, a, g, group.transposed)
                grad_state.current.take_together(stack, stack.norms())
                for bias, grads in zip(biases_of, g, strict=True):
                    if bias is not None:
                        keep(bias, grads if grads.dim() == 2 else ops.wide_sum(grads, 1))
                continue
            for weight, bias, *pair, turned in zip(
                own, biases_of, a, g, group.transposed, strict=True
            ):
                record = LinearRecord(*map(by_position, pair), transposed=turned)
                if bias is not None:
                    grad_state.record(bias, BiasRecord(record))
                grad_state.record(weight, record)


def _keep(grad_state: GradientState, parameter: nn.Parameter, gradients: Tensor) -> None:
    grad_state.record(parameter, KeptRecord(gradients))


def _flattened(x: Tensor) -> Tensor:
    """x [b, ..., n] as [b, t, n]; [b, n] is unchanged."""
    return x if x.dim() <= 3 else x.flatten(1, -2)


def _record(
    grad_state: GradientState, left: Left, keep: Callable[[nn.Parameter, Tensor], None]
) -> None:
    """Record what one layer has left.

    Args:
        keep: keeps per-sample gradients.
    """
    number, _, x, g, weight, bias, _ = left
    if type(grad_state.bare.layers[number][0].rule) not in NORMS:
        take(grad_state.bare, left)
        return
    for parameter, gradients in ((weight, x), (bias, g)):
        if parameter is not None:
            keep(parameter, gradients)


def take(bare: BareLayers, left: Left) -> None:
    """Let a layer's rule make records of what it has left."""
    number, forward, x, g, weight, bias, extra = left
    handle, module = bare.layers[number]
    wanted = {n: p for n, p in (("weight", weight), ("bias", bias)) if p is not None}
    call = Call(handle, module, forward, _FIRST_AXIS, extra, wanted)
    LayerBackward(call, (x, None), g, False, wanted).run()


# -------------------------------------------------------------------------------------------------


_SETTINGS: dict[Any, tuple[str, ...]] = {
    LayerNormRule: ("normalized_shape", "eps"),
    RMSNormRule: ("normalized_shape", "eps"),
    GroupNormRule: ("num_groups", "eps"),
    EmbeddingRule: ("padding_idx", *ONLY_PLAIN),
    ConvRule: ("stride", "padding", "dilation", "groups", "padding_mode"),
}
"""Attributes of a layer that determine its result."""


def may_be_bare(bare: BareLayers, handles: Mapping[nn.Module, LayerHook]) -> None:
    """Let the model's layers with rules run bare."""
    bare.layers = [
        (handle, module) for module, handle in handles.items() if handle.rule is not None
    ]
    bare.plans, bare.settles, bare.takes = plan, settle, take


def plan(bare: BareLayers, layout: BatchLayout) -> None:
    """Choose the layers that run bare in calls of this layout."""
    bare.paths = []
    bare.endings.clear()
    for number, (handle, module) in enumerate(bare.layers):
        handle.bare = (
            _slot(bare, number, backward_bare.nodes) if _is_bare(handle, module, layout) else None
        )
        if handle.bare is None:
            continue
        bare.paths.append(handle.path)
        if number not in bare.known:
            bare.known.add(number)
            own = (p for p in module._parameters.values() if p is not None)
            bare.parameters += [p for p in own if p in handle.grad_state.names]
            bare.modules.setdefault(type(module), []).append(module)
    bare.tapped.plan(dict(_tapped(bare)))


def _tapped(bare: BareLayers) -> Iterator[tuple[int, Layer]]:
    """Layers whose calls may get output hooks, and their descriptions."""
    for number, (handle, module) in enumerate(bare.layers):
        slot = None if handle.bare is None else _slot(bare, number, python_nodes)
        weight = module._parameters.get("weight")
        if slot is None or weight is None:
            continue
        if isinstance(slot, python_nodes.Conv) and not weight.requires_grad:
            continue  # its input size does not determine its output size
        bias = module._parameters.get("bias")
        yield number, Layer(number, slot, module, weight, bias, what_lists(slot), handle.key)


def _is_bare(handle: LayerHook, module: nn.Module, layout: BatchLayout) -> bool:
    path, grad_state, batch_axis = (
        handle.path,
        handle.grad_state,
        layout.batch_axes.get(handle.path),
    )
    placed = (
        batch_axis is not None and batch_axis.plain and not batch_axis.axis and path in layout.met
    )
    if handle.wrappers or layout.returns or layout.by_values:
        return False
    own = [p for p in module._parameters.values() if p is not None]
    plain = all(
        type(p) is nn.Parameter and (p in grad_state.names or not p.requires_grad) for p in own
    )
    return (
        plain
        and placed
        and path not in layout.open
        and module._parameters.get("weight") is not None
    )


def _slot(bare: BareLayers, number: int, nodes: Any) -> Any:
    """The object that calls a layer's node; None for a layer without one."""
    handle, module = bare.layers[number]
    rule, held, parameters = type(handle.rule), module.__dict__, module._parameters
    weight = parameters["weight"]
    assert weight is not None
    settings = {name: held[name] for name in _SETTINGS.get(rule, ()) if name in held}
    if len(settings) < len(_SETTINGS.get(rule, ())):
        return None
    assert bare.slots is not None
    given = bare.slots, number, parameters, settings
    # A kept gradient replaces its operands at once.
    at_once = handle.grad_state.plan_log.method(handle.path) == "keep"
    if rule in LINEAR:
        return nodes.Linear(*given, at_once, LINEAR[rule])
    if rule is ConvRule and (padding := zeros_around(module)) is not None:
        geo = geometry_of(module, padding)
        return nodes.Conv(*given, geo, at_once, geo.stride, geo.padding, geo.dilation, geo.groups)
    # A kernel may run the forward pass of GroupNorm on a GPU, so its nodes are for a CPU only.
    if rule in NORMS and (rule is not GroupNormRule or ops.computes_reference(weight)):
        shape, eps = settings.get("normalized_shape"), settings["eps"]
        return nodes.Norm(*given, NORMS[rule], shape or [settings["num_groups"]], eps)
    if rule is EmbeddingRule and not any(settings[name] for name in ONLY_PLAIN):
        row = padding_of(module)
        return nodes.Lookup(*given, row, -1 if row is None else row)
    return None
