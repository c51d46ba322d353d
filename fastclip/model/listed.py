"""What bare layers have listed in a backward pass becomes records, when the pass ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward import python_nodes
from fastclip.backward.bare import BareLayers, Left, Listed
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.linear_stack import LinearStack
from fastclip.backward.private_layer import Call, LayerBackward
from fastclip.layers.linear import LinearRule, TransposedLinearRule, by_position
from fastclip.layers.record import KeptRecord, written_to
from fastclip.layers.records import BiasRecord, LinearRecord
from fastclip.planner import Choice
from fastclip.samples.place import Place

_ROWS = Place(0)
_MOST = 32
"""Endings that are remembered."""
_KIND = attrgetter("shape", "dtype", "device")
NORMS: dict[Any, int] = {type(rule): k for k, rule in enumerate(python_nodes.NORMS)}
"""Rules of layers that normalise, and the numbers that nodes have for them."""
LINEAR: dict[Any, bool] = {LinearRule: False, TransposedLinearRule: True}
"""Rules of linear layers that may be bare, and whether their weights are transposed."""


def settle(keeper: BookKeeper, listed: Listed) -> None:
    """Take what nodes have listed in the pass that ends.

    Raises:
        GraphError: what layers were given has changed since.
    """
    bare = keeper.bare
    numbers, forwards, inputs, gradients, weights, biases, _, written = listed
    if written:
        raise written_to()
    firsts = {own: k for k, own in reversed([*enumerate(map(id, forwards))])}
    for k in sorted(firsts.values()):
        keeper.admit(bare.layers[numbers[k]][0].path, forwards[k], len(gradients[k]))
    others = frozenset(keeper.current.others())
    kinds = [None if x is None else _KIND(x) for x in inputs]  # none where its weight is frozen
    key = (
        tuple(numbers), tuple(kinds), tuple(map(_KIND, gradients)),
        tuple(map(id, weights)), tuple(map(id, biases)), keeper.units is None, others,
        ops.computes_reference(gradients[0]),
    )  # fmt: skip
    ending = bare.endings.get(key)
    if ending is None:
        if len(bare.endings) == _MOST:
            bare.endings.clear()
        ending = bare.endings[key] = _Ending(keeper, listed, others)
    ending.run(keeper, listed)


@dataclass
class _Group:
    """Linear layers whose norms follow from inputs and output gradients, both of which are held.

    Attributes:
        single: they have one position each. stacked: a CPU takes their norms at once; on a GPU
            kernels take those of all records. layers: which of those that are listed.
    """

    single: bool
    stacked: bool
    layers: list[int] = field(default_factory=list)
    transposed: list[bool] = field(default_factory=list)


class _Ending:
    """How a pass ends that has listed certain layers, of tensors of certain kinds.

    Args:
        others: ids of parameters to which something else contributes.
    """

    def __init__(self, keeper: BookKeeper, listed: Listed, others: frozenset[int]) -> None:
        numbers, _, inputs, gradients, weights, biases, *_ = listed
        self._groups: dict[Hashable, _Group] = {}
        self._rest: list[int] = []
        """What is taken one by one, in this order."""
        self._alone: set[int] = set()
        """Whose parameters have no other use."""
        noted: dict[tuple[str, tuple, Choice], list[str]] = {}
        uses = Counter(id(p) for p in (*weights, *biases) if p is not None)
        uses.update(others)
        for k, number in enumerate(numbers):
            handle, _ = keeper.bare.layers[number]
            rule, x, g = handle.rule, inputs[k], gradients[k]
            own = [uses[id(p)] for p in (weights[k], biases[k]) if p is not None]
            alone = keeper.units is None and set(own) == {1} and weights[k] is not None
            if alone:
                self._alone.add(k)
            if type(rule) not in LINEAR or not alone:
                self._rest.append(k)
                continue
            b, t, d = x.shape[0], torch.Size(x.shape[1:-1]).numel(), x.shape[-1]
            choice = keeper.planner.linear(
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

    def run(self, keeper: BookKeeper, listed: Listed) -> None:
        """Make records of what was listed."""
        numbers, forwards, inputs, gradients, weights, biases, extras, _ = listed
        for (name, shape, choice), paths in self._noted.items():
            keeper.plan_log.note_all(paths, name, shape, choice)
        keep = keeper.current.keep
        for k in self._rest:
            left = (
                numbers[k], forwards[k], inputs[k], gradients[k], weights[k], biases[k], extras[k],
            )  # fmt: skip
            _record(keeper, left, keep if k in self._alone else partial(_keep, keeper))
        for group in self._groups.values():
            a, g = ([_flattened(side[k]) for k in group.layers] for side in (inputs, gradients))
            own, biases_of = ([side[k] for k in group.layers] for side in (weights, biases))
            if group.stacked:
                stack = LinearStack(group.single, own, a, g, group.transposed)
                keeper.current.take_together(stack, stack.norms())
                for bias, rows in zip(biases_of, g, strict=True):
                    if bias is not None:
                        keep(bias, rows if rows.dim() == 2 else ops.wide_sum(rows, 1))
                continue
            for weight, bias, *pair, turned in zip(
                own, biases_of, a, g, group.transposed, strict=True
            ):
                record = LinearRecord(*map(by_position, pair), transposed=turned)
                if bias is not None:
                    keeper.record(bias, BiasRecord(record))
                keeper.record(weight, record)


def _keep(keeper: BookKeeper, parameter: nn.Parameter, gradients: Tensor) -> None:
    keeper.record(parameter, KeptRecord(gradients))


def _flattened(x: Tensor) -> Tensor:
    """x [b, ..., n] as [b, t, n], or as it is if it is [b, n]."""
    return x if x.dim() <= 3 else x.flatten(1, -2)


def _record(keeper: BookKeeper, left: Left, keep: Callable[[nn.Parameter, Tensor], None]) -> None:
    """Take what one layer has left.

    Args:
        keep: takes gradients of samples.
    """
    number, _, x, g, weight, bias, _ = left
    if type(keeper.bare.layers[number][0].rule) not in NORMS:
        take(keeper.bare, left)
        return
    for parameter, gradients in ((weight, x), (bias, g)):
        if parameter is not None:
            keep(parameter, gradients)


def take(bare: BareLayers, left: Left) -> None:
    """Let a layer's rule make records of what it has left."""
    number, forward, x, g, weight, bias, extra = left
    handle, module = bare.layers[number]
    wanted = {n: p for n, p in (("weight", weight), ("bias", bias)) if p is not None}
    call = Call(handle, module, forward, _ROWS, extra, wanted)
    LayerBackward(call, (x, None), g, False, wanted).run()
