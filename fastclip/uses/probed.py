"""What the probe learns of functions that are called with a parameter: which are uses, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastclip._torch import Native
from fastclip.errors import UnsupportedLayerError
from fastclip.samples.chosen import Rows
from fastclip.samples.layout import BatchLayout
from fastclip.samples.probing import Opened, Probe
from fastclip.uses.arguments import leaves_of, mapped, outputs
from fastclip.uses.chance import check_repeats, is_of_torch
from fastclip.uses.derived import DerivedGraph
from fastclip.uses.equations import Product
from fastclip.uses.keeper import Intercepts
from fastclip.uses.key import Key
from fastclip.uses.proxy import Derived, detached, is_private, parameters_of
from fastclip.uses.rule import Operands, in_place, plain_name, rules_of


def probed(
    interceptor: Intercepts, probe: Probe, key: Key, func: Callable, args: tuple, kwargs: dict,
    private: list[Any], plain: list[Tensor],
) -> Any:  # fmt: skip
    """What a call returns while the model is probed.

    Args:
        private, plain: the tensors among its arguments.
    """
    layout = probe.layout
    layout.met.add(key)
    layout.users.update(probe.inside[-1:])
    # what has a gradient stands in a sample's place, if only constants stand there
    used = layout.uses.get(key)
    data = [x for x in plain if probe.holds(x) or x.requires_grad]
    if not used:  # a loop may begin with zeros
        used = bool(data)
        if used or plain:
            layout.uses[key] = used
    # what a rule refuses, it refuses before anything has run
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
    """A tensor that parameters were written into takes values of the batch: they were uses.

    Raises:
        Opened: so that the run is made again. UnsupportedLayerError: it was no such tensor.
    """
    written = target.source.written if type(target) is Derived else []
    if not written:
        raise UnsupportedLayerError(
            f"{key.label}: a value of parameters is changed in place by values of the batch; "
            "use the function that returns a new tensor"
        )
    layout.uses |= dict.fromkeys(written, True)
    raise Opened


def _rows_met(bound: list[Operands], private: list[Any]) -> set[Rows]:
    """The constants whose rows are those of the values of parameters that a function gives."""
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
    """Of these values, the rows that are still there."""
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
