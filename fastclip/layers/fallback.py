"""Any other layer: vmap of the layer's own forward and backward, one sample at a time in effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves

from fastclip import ops
from fastclip.errors import ParameterLeakError, UnsupportedLayerError, where
from fastclip.layers.functional import (
    Foreigners,
    foreign_leaf,
    nothing_left_behind,
    plain_forward,
    where_from,
)
from fastclip.layers.independence import Independence, rows_agree
from fastclip.layers.records import KeptRecord
from fastclip.layers.rule import LayerRule

if TYPE_CHECKING:
    from fastclip.private_layer import LayerBackward

HOW_TO_REGISTER = (
    "write its rule with @fastclip.layers.register_rule (examples/custom_layer.py), freeze it, or "
    "replace it"
)


class FallbackRule(LayerRule):
    """Exact but slow: the forward pass is computed again inside the backward pass.

    The module's own forward runs once, in the hooks that are on it, over stand-ins for its
    parameters and its input: whatever else its output depends on shows in the graph or in the
    operations, and is refused or checked, since vmap would drop its gradient or take its first row
    for all.
    """

    name = "vmap"

    def __init__(self) -> None:
        self._independence = Independence()

    def __reduce__(self) -> Any:
        return FallbackRule, ()  # what has been compared is of modules that live

    def axis(self, module: Any) -> int | None:
        return 0

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        others = (*args[1:], *kwargs.values())
        if not args or not isinstance(args[0], Tensor) or _any_tensor(others):
            raise TypeError("its forward must take one tensor, first, and no other")
        return args[0], (args[1:], kwargs, _autocast(args[0].device.type))

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        args, kwargs, autocast = extra
        stand_ins = {name: _stand_in(p, module) for name, p in module.named_parameters()}
        argument = _stand_in(x, module)
        inside = argument.clone()  # no leaf: a change in place is noticed below
        before = _random_states()
        buffers = {name: (b, b._version) for name, b in module.named_buffers()}
        foreigners = Foreigners(module, inside, *stand_ins.values())
        with torch.enable_grad(), autocast(), foreigners:
            out = plain_forward(module, stand_ins, inside, args, kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
            raise TypeError("it draws random numbers in forward, which a second pass cannot repeat")
        if any(b is not buffers[n][0] or b._version != buffers[n][1] for n, b in _buffers(module)):
            raise TypeError("it changes its buffers in forward, so samples depend on each other")
        if inside._version:
            raise TypeError("it changes its input in place, which a second pass would do again")
        if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[0] != x.shape[0]:
            raise TypeError("its output must be one tensor with one row a sample")
        if foreign_leaf(out, [argument, *stand_ins.values()]) is not None:
            raise TypeError(
                f"{where_from(module)} that requires a gradient reaches its forward by another way "
                "than its argument and its own parameters, and would get none; pass it through "
                "the model's layers, make its layer a child of this module, or detach it"
            )
        with torch.no_grad(), nothing_left_behind(module):
            self._independence.check(module, x, extra, list(foreigners.found.values()))
        out = out.detach()
        return out, (x, out.clone() if out.device.type == "cpu" else None)

    def backward(self, call: LayerBackward) -> Tensor | None:
        x, out = call.saved
        module, (args, kwargs, autocast) = call.module, call.extra
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        trained = {name: p for name, p in parameters.items() if call.wants(name)}
        differentiable = x.is_floating_point()

        def gradients(row: Tensor, g: Tensor) -> Any:
            def run(own: dict[str, Tensor], row: Tensor) -> Tensor:
                return plain_forward(module, {**parameters, **own}, row[None], args, kwargs)[0]

            inputs = (trained, row) if differentiable else (trained,)
            value, pull, *_ = vjp(lambda own, x=row: run(own, x), *inputs)
            return value, pull(g)

        try:
            with autocast(), nothing_left_behind(module):  # as in forward, computed again
                alone, results = vmap(gradients)(x, call.g)
                apart = out is None or rows_agree(alone, out)  # on a GPU it would wait
        except Exception as error:
            raise UnsupportedLayerError(
                f"{where(call.path, module)} has no per-sample rule, and vmap of its "
                f"backward failed ({type(error).__name__}: {error}); {HOW_TO_REGISTER}"
            ) from error
        if not apart:
            raise UnsupportedLayerError(
                f"{where(call.path, module)}: its output for one sample depends on the "
                f"other samples of the batch, or has changed since the forward pass; "
                f"{HOW_TO_REGISTER}"
            )
        for name in trained:
            call.record(name, KeptRecord(ops.widen(results[0][name])))
        return results[1] if differentiable and call.needs_input_grad else None


def _stand_in(value: Tensor, module: Any) -> Tensor:
    """A leaf of the same numbers, whose gradient would be that of something kept aside."""
    if not value.is_floating_point():
        return value.detach()
    leaf = value.detach().requires_grad_()
    leaf.register_hook(partial(_refuse, type(module).__name__))
    return leaf


def _refuse(module: str, gradient: Tensor) -> None:
    raise ParameterLeakError(
        f"a tensor that a {module} set aside in its forward (an attribute, a list) is part of the "
        "loss, but only what the module returns has a per-sample gradient; return it as part of "
        f"the output, detach it, or {HOW_TO_REGISTER}"
    )


def _buffers(module: Any) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers())


def _autocast(device: str) -> Callable[[], AbstractContextManager]:
    """Brings back the autocast state of now; without its cache, which a transform must not fill."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype=dtype, cache_enabled=False)


def _any_tensor(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(values))


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
