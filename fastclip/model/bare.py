"""Which layers of a model are bare."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fastclip.backward.bare import BareLayers
from fastclip.model.interception import Handle
from fastclip.model.listed import LINEAR, settle
from fastclip.samples.layout import BatchLayout


def may_be_bare(bare: BareLayers, handles: Mapping[nn.Module, Handle]) -> None:
    """The model's layers with rules may be bare."""
    bare.layers = [
        (handle, module) for module, handle in handles.items() if handle.rule is not None
    ]
    bare.plans, bare.settles = plan, settle


def plan(bare: BareLayers, layout: BatchLayout) -> None:
    """Choose the layers that are bare in calls of this layout."""
    assert bare.slots is not None
    from fastclip import _step

    bare.paths, bare.parameters, bare.modules = [], [], {}
    for number, (handle, module) in enumerate(bare.layers):
        handle.bare = None
        if _is_bare(handle, module, layout):
            transposed = LINEAR[type(handle.rule)]
            handle.bare = _step.Linear(bare.slots, number, module._parameters, transposed)
            bare.paths.append(handle.path)
            bare.parameters += handle.parameters(module).values()
            bare.modules.setdefault(type(module), []).append(module)


def _is_bare(handle: Handle, module: nn.Module, layout: BatchLayout) -> bool:
    path, keeper, place = handle.path, handle.keeper, layout.places.get(handle.path)
    placed = place is not None and place.plain and not place.axis and path in layout.met
    if type(handle.rule) not in LINEAR or handle.scopes or layout.returns or layout.by_values:
        return False
    if keeper.plan_log.method(path) not in ("", "ghost"):
        return False  # a gradient that is kept takes the place of its operands at once
    own = [p for p in module._parameters.values() if p is not None]
    plain = all(type(p) is nn.Parameter and (p in keeper.names or not p.requires_grad) for p in own)
    return plain and placed and path not in layout.open
