"""Which layers of a model are bare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fastclip import ops
from fastclip.backward import bare as backward_bare
from fastclip.backward import python_nodes
from fastclip.backward.bare import BareLayers
from fastclip.backward.tapped import Layer, what_lists
from fastclip.layers.conv import ConvRule, geometry_of, zeros_around
from fastclip.layers.embedding import ONLY_PLAIN, EmbeddingRule, padding_of
from fastclip.layers.norm import GroupNormRule, LayerNormRule, RMSNormRule
from fastclip.model.interception import Handle
from fastclip.model.listed import LINEAR, NORMS, settle, take
from fastclip.samples.layout import BatchLayout

_SETTINGS: dict[Any, tuple[str, ...]] = {
    LayerNormRule: ("normalized_shape", "eps"),
    RMSNormRule: ("normalized_shape", "eps"),
    GroupNormRule: ("num_groups", "eps"),
    EmbeddingRule: ("padding_idx", *ONLY_PLAIN),
    ConvRule: ("stride", "padding", "dilation", "groups", "padding_mode"),
}
"""Attributes of a layer by which it computes."""


def may_be_bare(bare: BareLayers, handles: Mapping[nn.Module, Handle]) -> None:
    """The model's layers with rules may be bare."""
    bare.layers = [
        (handle, module) for module, handle in handles.items() if handle.rule is not None
    ]
    bare.plans, bare.settles, bare.takes = plan, settle, take


def plan(bare: BareLayers, layout: BatchLayout) -> None:
    """Choose the layers that are bare in calls of this layout."""
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
            bare.parameters += [p for p in own if p in handle.keeper.names]
            bare.modules.setdefault(type(module), []).append(module)
    bare.tapped.plan(dict(_tapped(bare)))


def _tapped(bare: BareLayers) -> Iterator[tuple[int, Layer]]:
    """Those whose calls may be given taps, and what is known of them."""
    for number, (handle, module) in enumerate(bare.layers):
        slot = None if handle.bare is None else _slot(bare, number, python_nodes)
        weight = module._parameters.get("weight")
        if slot is None or weight is None:
            continue
        if isinstance(slot, python_nodes.Conv) and not weight.requires_grad:
            continue  # its output's size does not follow from that of its input
        bias = module._parameters.get("bias")
        yield number, Layer(number, slot, module, weight, bias, what_lists(slot), handle.key)


def _is_bare(handle: Handle, module: nn.Module, layout: BatchLayout) -> bool:
    path, keeper, place = handle.path, handle.keeper, layout.places.get(handle.path)
    placed = place is not None and place.plain and not place.axis and path in layout.met
    if handle.scopes or layout.returns or layout.by_values:
        return False
    own = [p for p in module._parameters.values() if p is not None]
    plain = all(type(p) is nn.Parameter and (p in keeper.names or not p.requires_grad) for p in own)
    return (
        plain
        and placed
        and path not in layout.open
        and module._parameters.get("weight") is not None
    )


def _slot(bare: BareLayers, number: int, nodes: Any) -> Any:
    """What calls a layer's node, of these; None of a layer that has none."""
    handle, module = bare.layers[number]
    rule, held, parameters = type(handle.rule), module.__dict__, module._parameters
    weight = parameters["weight"]
    assert weight is not None
    settings = {name: held[name] for name in _SETTINGS.get(rule, ()) if name in held}
    if len(settings) < len(_SETTINGS.get(rule, ())):
        return None
    assert bare.slots is not None
    given = bare.slots, number, parameters, settings
    # A gradient that is kept takes the place of its operands at once.
    at_once = handle.keeper.plan_log.method(handle.path) == "keep"
    if rule in LINEAR:
        return nodes.Linear(*given, at_once, LINEAR[rule])
    if rule is ConvRule and (padding := zeros_around(module)) is not None:
        geo = geometry_of(module, padding)
        return nodes.Conv(*given, geo, at_once, geo.stride, geo.padding, geo.dilation, geo.groups)
    # A kernel may serve the forward pass of GroupNorm on a GPU: its nodes are for a CPU.
    if rule in NORMS and (rule is not GroupNormRule or ops.computes_reference(weight)):
        shape, eps = settings.get("normalized_shape"), settings["eps"]
        return nodes.Norm(*given, NORMS[rule], shape or [settings["num_groups"]], eps)
    if rule is EmbeddingRule and not any(settings[name] for name in ONLY_PLAIN):
        row = padding_of(module)
        return nodes.Lookup(*given, row, -1 if row is None else row)
    return None
