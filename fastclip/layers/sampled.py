"""Layers for whose class the user has registered a grad sampler with Opacus.

`opacus.grad_sample.register_grad_sampler(Layer)` takes a function of the layer, its inputs and its
output's gradient, which returns samples' gradients. It is honored for layers that cannot be followed, as
one with an autograd.Function of the user's own; that is not known before, so for all without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastclip import ops
from fastclip._torch import Native, saving_hooks
from fastclip.errors import GraphError, where
from fastclip.layers.customised import own_forward
from fastclip.layers.record import KeptRecord
from fastclip.layers.rule import LayerCall, LayerRule, is_registered, registered_rule

Sampler = Callable[[Any, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]
_HOW = "Return {parameter: gradients [samples, *parameter.shape]} for every trained parameter"


def find_rule(module: Any) -> LayerRule | None:
    """The rule of `module`: one that was registered, else by the grad sampler of exactly its class.

    None where it has none, or does anything in a way of its own.
    """
    if own_forward(module) is not None:
        return None
    return registered_rule(module) or _by_sampler(module)


def _by_sampler(module: nn.Module) -> SamplerRule | None:
    """None without a grad sampler, and for those that Opacus ships.

    A layer whose parts are trained, too, is followed: what they contribute the sampler does not say.
    """
    kind = type(module)
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
    if sampler is None or str(getattr(sampler, "__module__", "")).startswith("opacus."):
        return None
    own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
    trained = [p for p in module.parameters() if p.requires_grad]
    if is_registered(kind) or len({*map(id, own)}) < len(own) or len(trained) > len(own):
        return None
    return SamplerRule(sampler, tuple(module._parameters))


class _Called(NamedTuple):
    """The rest of a call.

    Attributes:
        graph: the layer's own, as its input and its output, where there is one.
    """

    args: tuple
    kwargs: dict
    graph: list[Tensor]


class SamplerRule(LayerRule):
    """Sample b's gradients are what the sampler gives of x_b and g_b.

    The layer runs as it is; the gradient of its input is of its own backward. The sampler is trusted,
    as the rule of a user is; `fastclip.testing.check_rule` compares it with autograd.
    """

    name = "grad_sampler"

    def __init__(self, sampler: Sampler, names: tuple[str, ...]) -> None:
        self._sampler, self.parameter_names = sampler, names

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        if not args or not all(isinstance(x, Tensor) for x in args):
            raise TypeError(
                "its grad sampler is given positional inputs, which must all be tensors"
            )
        return args[0], _Called(args[1:], kwargs, [])

    def forward(self, module: Any, x: Tensor, extra: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.set_grad_enabled(x.requires_grad), Native(), _kept_here():
            own = x.detach().requires_grad_(x.requires_grad)
            out = type(module).forward(module, own, *extra.args, **extra.kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"its grad sampler is given the gradient of one tensor, got {type(out).__name__}"
            )
        if out.requires_grad:
            extra.graph[:] = own, out
        return out.detach(), (x,)

    def backward(self, call: LayerCall) -> Tensor | None:
        wanted = {n: call.module._parameters[n] for n in self.parameter_names if call.wants(n)}
        if wanted:
            self._record(call, wanted)
        if not call.needs_input_grad:
            return None
        if not call.extra.graph:  # it has no derivative
            return torch.zeros_like(call.saved[0])
        own, out = call.extra.graph
        with torch.enable_grad(), Native():
            (found,) = torch.autograd.grad(out, own, call.g, retain_graph=True, allow_unused=True)
        return torch.zeros_like(own) if found is None else found

    def _record(self, call: LayerCall, wanted: dict[str, nn.Parameter]) -> None:
        (x,) = call.saved
        g, inputs = call.samples(call.g), [call.samples(x), *self._others(call, x)]
        each = g.shape[1] if g.dim() > call.g.dim() else 0
        """Rows of the layer's that are one sample's, where they are folded into one axis."""
        if each:
            g, *inputs = (rows.flatten(0, 1) for rows in (g, *inputs))
        with Native():
            found = self._sampler(call.module, [t.detach() for t in inputs], g)
        self._check(call, found, wanted, len(g))
        for name, parameter in wanted.items():
            own = found[parameter].detach()
            if each:
                own = ops.widen(own).unflatten(0, (len(own) // each, each)).sum(1)
            call.record(name, KeptRecord(own))

    @staticmethod
    def _others(call: LayerCall, x: Tensor) -> list[Tensor]:
        """Further positional inputs, which Opacus hands on as they are."""
        others = list(call.extra.args)
        if others and call.samples(x) is not x:
            raise _broken(
                call, "is called with several inputs, whose samples are not the rows of the first",
                "Write its rule with @fastclip.layers.register_rule",
            )  # fmt: skip
        return others

    @staticmethod
    def _check(call: LayerCall, found: Any, wanted: dict[str, nn.Parameter], rows: int) -> None:
        """What the sampler has returned is of the layer's parameters, and of each sample."""
        if not isinstance(found, Mapping):
            raise _broken(call, f"returned a {type(found).__name__}", _HOW)
        known = set(call.module._parameters.values())
        if any(key not in known for key in found):
            raise _broken(call, "returned gradients of what is no parameter of the layer", _HOW)
        for name, parameter in wanted.items():
            own = found.get(parameter)
            if not isinstance(own, Tensor):
                raise _broken(call, f"returned no gradients of {name}", _HOW)
            if own.shape != (rows, *parameter.shape):
                raise _broken(
                    call, f"returned gradients of {name} of shape {[*own.shape]}, where "
                    f"{[rows, *parameter.shape]} is expected", _HOW,
                )  # fmt: skip


def _kept_here() -> AbstractContextManager[Any]:
    """What the layer's own graph saves stays in it: a checkpoint runs the whole layer again."""
    if saving_hooks(False) is None:
        return nullcontext()
    return saved_tensors_hooks(Tensor.detach, lambda kept: kept)


def _broken(call: LayerCall, what: str, way_out: str) -> GraphError:
    return GraphError(f"{where(call.path, call.module)}: its grad sampler {what}. {way_out}")
