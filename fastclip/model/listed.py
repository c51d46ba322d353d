"""What bare layers have listed in a backward pass becomes records, when the pass ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.backward.bare import Listed
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.linear_stack import LinearStack
from fastclip.backward.private_layer import Call, LayerBackward
from fastclip.errors import GraphError
from fastclip.layers.linear import LinearRule, TransposedLinearRule
from fastclip.layers.record import KeptRecord, written_to
from fastclip.layers.records import BiasRecord, LinearRecord
from fastclip.model.interception import Handle
from fastclip.samples.place import Place

_ROWS = Place(0)
LINEAR: dict[Any, bool] = {LinearRule: False, TransposedLinearRule: True}
"""Rules whose layers may be bare, and whether their weights are transposed."""


def settle(keeper: BookKeeper, listed: list[Listed]) -> None:
    """Take what nodes have listed in the pass that ends; nothing is left in the list.

    Raises:
        GraphError: layers, or what they were given, have changed since.
    """
    bare, current = keeper.bare, keeper.current
    bare.check_hooks(keeper.check_hooks)
    if not bare.are_as_they_were():
        raise GraphError(
            "a layer's methods were replaced between the model's forward pass and the end of the "
            "backward pass. Replace them before the forward pass, and call make_private again"
        )
    for number, forward, _, g, *_ in {id(one[1]): one for one in listed}.values():
        keeper.admit(bare.layers[number][0].path, forward, len(g))
    uses = Counter(id(weight) for *_, weight, _, _ in listed)
    by_units, kinds = keeper.units is not None, dict[Hashable, _Kind]()
    listed.reverse()
    while listed:
        number, forward, x, g, weight, bias, written = listed.pop()
        handle, module = bare.layers[number]
        if written:
            raise written_to()
        wanted = {n: p for n, p in (("weight", weight), ("bias", bias)) if p is not None}
        alone = weight is not None and not by_units and uses[id(weight)] == 1
        if alone and not any(map(current.has_other, wanted.values())):
            key = type(handle.rule), x.shape, g.shape, g.dtype, g.device
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _Kind(keeper, handle, x, g)
            if kind.ghost:
                kind.take(handle.path, weight, bias, x, g)
                continue
        call = Call(handle, module, forward, _ROWS, None, wanted)
        LayerBackward(call, (x, None), g, False, wanted).run()
    for kind in kinds.values():
        kind.finish()


class _Kind:
    """Linear layers of one shape, each used once: how their norms are computed is decided once.

    Attributes:
        ghost: from their inputs and output gradients, which are both held.
    """

    def __init__(self, keeper: BookKeeper, handle: Handle, x: Tensor, g: Tensor) -> None:
        self._keeper, self._paths = keeper, list[str]()
        self._transposed = LINEAR[type(handle.rule)]
        b, t = x.shape[0], torch.Size(x.shape[1:-1]).numel()
        self._shape = b, t, x.shape[-1]
        self._choice = keeper.planner.linear(
            *self._shape, g.shape[-1], x.element_size(), True, x.device
        )
        self.ghost = self._choice.ghost
        joined = t == 1 and ops.computes_reference(x)
        self._stack = LinearStack(self._transposed) if joined else None

    def take(self, path: str, weight: Any, bias: Any, x: Tensor, g: Tensor) -> None:
        """One of them, whose weight takes part; its bias may."""
        self._paths.append(path)
        if self._stack is not None:  # a sample's gradient of the bias is its g
            x, g = x.reshape(self._shape[::2]), g.reshape(len(g), g.shape[-1])
            self._stack.add(weight, x, g)
            if bias is not None:
                self._keeper.record(bias, KeptRecord(g))
            return
        rows = g.reshape(*self._shape[:2], g.shape[-1])
        record = LinearRecord(x.reshape(self._shape), rows, transposed=self._transposed)
        if bias is not None:
            together = record.together
            of_bias = BiasRecord(record) if together else KeptRecord(ops.wide_sum(rows, 1))
            self._keeper.record(bias, of_bias)
        self._keeper.record(weight, record)

    def finish(self) -> None:
        """All of them are there."""
        if self.ghost:
            name = TransposedLinearRule.name if self._transposed else LinearRule.name
            self._keeper.plan_log.note_all(self._paths, name, self._shape, self._choice)
        if self._stack is not None and self.ghost:
            self._keeper.current.take_together(self._stack, self._stack.norms())
