"""csrc/step in Python, used if it is not compiled: the same nodes, each an autograd function.

fastclip.backward.bare explains their purpose. A layer's rule computes forward; backward returns the
input's gradient, and lists what the clipped sums need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastclip.core.autograd import differentiable_once, private_function, takes_part
from fastclip.core.numerics import row_norm_sq, widen
from fastclip.core.torch_names import (
    dispatch_modes,
    function_modes,
    plain_apply,
    saving_hooks,
    transformed,
    version_of,
)
from fastclip.ops import full_float32
from fastclip.rules.contribution import LastCast
from fastclip.rules.conv import ConvRule
from fastclip.rules.embedding import EmbeddingRule
from fastclip.rules.linear import LinearRule, TransposedLinearRule
from fastclip.rules.norm import GroupNormRule, LayerNormRule, RMSNormRule
from fastclip.rules.protocol import LayerRule
from fastclip.rules.records import KeptRecord

# -------------------------------------------------------------------------------------------------
# How norms and clipped sums are computed, independent of the training loop's own settings.


_AS_IT_IS = nullcontext()


def uncast(g: Tensor) -> AbstractContextManager[Any]:
    """Inside, the caller's autocast (a backward pass in its block) is off where this tensor lies."""
    kind = g.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


@contextmanager
def arithmetic(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Norms and clipped sums of these parameters are computed inside."""
    # The settings of float32 products are raised once for all norms and sums of a pass.
    with torch.no_grad(), full_float32(), ExitStack() as stack:
        for device in {parameter.device.type for parameter in parameters}:
            # The caller's autocast (a backward pass inside its block) is not for norms and sums.
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


# -------------------------------------------------------------------------------------------------


NORMS: tuple[LayerRule, ...] = LayerNormRule(), RMSNormRule(), GroupNormRule()
"""Of layers that normalize, by the numbers that nodes have for them."""
_NAMES = "weight", "bias"
_USUAL = frozenset((Tensor, nn.Parameter))
Left = tuple[Tensor | None, Tensor | None]
"""Input and output's gradient, or samples' gradients of weight and bias."""
_ASKED: dict[str, Callable[..., Any]] = {}


def ask(
    refuse: Callable[..., Any], take: Callable[..., Any], tie: Callable[..., Any],
    normalize: Callable[..., Any],
) -> None:  # fmt: skip
    """As of csrc/step/module.cpp."""
    del tie, normalize  # `differentiable_once` and the rules do
    _ASKED.update(refuse=refuse, take=take)


def slots_of(node: Any) -> int:
    """The address of the slots of a node; 0 of another one."""
    slot = getattr(node, "slot", None)
    return slot.slots.address if isinstance(slot, _Slot) else 0


def single_norms(
    a: Sequence[Tensor], g: Sequence[Tensor], lost_a: Sequence[float], lost_g: Sequence[float]
) -> Tensor:
    """As of csrc/step/linear_group.hpp."""
    found: list[Tensor] = []
    last, norm_a = None, None
    for x, y, of_x, of_y in zip(a, g, lost_a, lost_g, strict=True):
        if norm_a is None or x is not last:
            last, norm_a = x, row_norm_sq(x) + of_x
        found.append(norm_a * (row_norm_sq(y) + of_y))
    return torch.stack(found)


def scaled_sums(a: Sequence[Tensor], g: Sequence[Tensor], scale: Tensor, any: bool) -> list[Tensor]:
    """As of csrc/step/linear_group.hpp."""
    scales = [scale] * len(a) if scale.dim() == 1 else scale.unbind()
    found = []
    for x, y, own in zip(map(widen, a), map(widen, g), scales, strict=True):
        factor = own.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
        if any:
            dead = factor == 0
            x, y = x.masked_fill(dead, 0), y.masked_fill(dead, 0)
        if x.shape[-1] < y.shape[-1]:
            x = x * factor
        else:
            y = y * factor
        found.append(torch.mm(y.reshape(-1, y.shape[-1]).t(), x.reshape(-1, x.shape[-1])))
    return found


class Slots:
    """What the slots of one model share."""

    def __init__(self) -> None:
        self.opened = self.paused = False
        self.cast = LastCast()
        self._running: tuple[Any, int] | None = None
        self._thread = 0
        self._listed: list[tuple] = []

    @property
    def address(self) -> int:
        """A different number for each of them."""
        return id(self)

    def begin(self, forward: Any, samples: int) -> None:
        """Begin a forward pass of this thread, in which layers may be bare."""
        self._running, self._thread = (forward, samples), get_ident()

    def end(self) -> None:
        """It is over."""
        self._running, self.cast = None, LastCast()

    def running(self) -> tuple[Any, int] | None:
        """The pass that runs on this thread, and its number of samples."""
        return self._running if self._thread == get_ident() else None

    def list(self, *left: Any) -> None:
        """What a layer leaves, as `fastclip.backward.bare.Left`."""
        self._listed.append((*left, _versions(left)))

    def take(self) -> tuple:
        """As `fastclip.backward.bare.Listed`."""
        found, self._listed = self._listed, []
        written = any(left[-1] != _versions(left) for left in found)
        columns = zip(*found, strict=True) if found else [()] * 8
        return *list(map(list, columns))[:-1], written


def _versions(left: Sequence[Any]) -> int:
    x, g = left[2], left[3]
    return version_of(g) + (0 if x is None else version_of(x))


class _Slot(ABC):
    """A layer of a private model, as the classes of csrc/step/slots.hpp."""

    rule: LayerRule
    extra: Any = None
    at_once = False

    def __init__(
        self, slots: Slots, number: int, parameters: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        self.slots, self.number = slots, number
        self._parameters, self.settings = parameters, settings
        self.weight, self.bias = parameters["weight"], parameters.get("bias")
        self._as_planned = self._now()

    def __call__(self, x: Any, module: nn.Module) -> Tensor | None:
        """The layer's output; None if the call must go through `PrivateLayer`."""
        call, slots, own = self.slots.running(), self.slots, self.weight
        if call is None or slots.paused or type(x) not in _USUAL or not self.holds(module):
            return None
        alike = x.device == own.device and x.layout == torch.strided and own.is_floating_point()
        if not alike or not x.dim() or x.shape[0] != call[1] or x.is_inference() or not _is_plain():
            return None
        if not self.takes(x):
            return None
        x, extra = self.rule.prepare(module, (x,), {})
        out: Tensor = _APPLY(self, (call[0], module, extra), x, self.weight, self.bias)
        return out

    @abstractmethod
    def takes(self, x: Tensor) -> bool:
        """Whether it may be the layer's input."""

    @abstractmethod
    def gradient(self, ctx: Any, g: Tensor, wanted: list[Any]) -> tuple[Tensor | None, Left]:
        """The input's gradient if it is needed, and what the layer leaves for weight and bias."""

    def leave(self, ctx: Any, x: Any, g: Tensor, wanted: list[Any]) -> None:
        """List these for the clipped sums."""
        if _any(wanted):
            left = self.number, ctx.called[0], x, g, *wanted, self.extra
            if self.at_once:
                _ASKED["take"](self.slots.address, left)
            else:
                self.slots.list(*left)

    def wanted(self, ctx: Any) -> list[Any]:
        """Weight and bias, each where it takes part in the pass that runs."""
        if self.slots.paused:
            return [None, None]
        edges = [*ctx.next_functions[1:], (None, 0)]
        pairs = zip((self.weight, self.bias), edges, strict=False)
        own = [p if p is not None and takes_part(node) else None for p, (node, _) in pairs]
        if _any(own) and not self.slots.opened:
            _ASKED["refuse"](self.slots.address, self.number)
        return own

    def _now(self) -> tuple:
        bias = self.bias
        return self.weight.shape, self.weight.requires_grad, bias is not None and bias.requires_grad

    def holds(self, module: nn.Module) -> bool:
        """The module is as it was when it was planned."""
        held, own = module.__dict__, self._parameters
        same = held["_parameters"] is own and "weight" not in held and "bias" not in held
        same = same and own.get("weight") is self.weight and own.get("bias") is self.bias
        settings = all(held.get(name, self) is x for name, x in self.settings.items())
        return same and settings and self._now() == self._as_planned


def _any(own: list[Any]) -> bool:
    """Weight or bias is there; == would compare their numbers."""
    return own[0] is not None or own[1] is not None


def _is_plain() -> bool:
    followed = dispatch_modes() or function_modes() or saving_hooks(False) is not None
    traced = transformed() or torch.jit.is_tracing()
    return torch.is_grad_enabled() and not followed and not traced


@private_function
class PrivateNode(Function):
    """A bare layer's call."""

    @staticmethod
    def forward(ctx: Any, slot: _Slot, call: tuple, x: Tensor, *own: Any) -> Tensor:
        _, module, extra = call
        operand = slot.slots.cast.of(x) if slot.rule.multiplies else x
        out, saved = slot.rule.forward(module, operand, extra)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.slot, ctx.called, ctx.dtype = slot, call, x.dtype
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        slot: _Slot = ctx.slot
        with uncast(g):
            wanted = slot.wanted(ctx)
            found, left = slot.gradient(ctx, g, wanted)
            if left[1] is not None:
                slot.leave(ctx, left[0], left[1], wanted)
        if found is not None and found.dtype != ctx.dtype:
            found = found.to(ctx.dtype)
        return None, None, found, None, None


_APPLY = plain_apply(PrivateNode)


class Linear(_Slot):
    """y = x W^T + b, or x W + b."""

    def __init__(
        self, slots: Slots, number: int, parameters: dict, settings: dict, at_once: bool,
        transposed: bool,
    ) -> None:  # fmt: skip
        super().__init__(slots, number, parameters, settings)
        self.at_once, self.transposed = at_once, transposed
        self.rule = TransposedLinearRule() if transposed else LinearRule()

    def takes(self, x: Tensor) -> bool:
        fits = x.dim() > 1 and x.shape[-1] == self.weight.shape[0 if self.transposed else 1]
        return fits and x.is_floating_point()

    def gradient(self, ctx: Any, g: Tensor, wanted: list[Any]) -> tuple[Tensor | None, Left]:
        x, weight = ctx.saved_tensors
        g = g.contiguous()
        if not ctx.needs_input_grad[2]:
            return None, (x, g)
        weight = weight if weight.dtype == g.dtype else weight.to(g.dtype)
        return g @ (weight.t() if self.transposed else weight), (x, g)


class Conv(_Slot):
    """A convolution with symmetric zeros around its input."""

    rule = ConvRule()

    def __init__(
        self, slots: Slots, number: int, parameters: dict, settings: dict, extra: Any, at_once: bool,
        stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    ) -> None:  # fmt: skip
        super().__init__(slots, number, parameters, settings)
        self.extra, self.at_once, self.groups = extra, at_once, groups

    def takes(self, x: Tensor) -> bool:
        fits = x.dim() == self.weight.dim() and x.shape[1] == self.weight.shape[1] * self.groups
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return (
            fits and x.is_floating_point() and len(x) > 0 and (x.device.type == "cpu" or not last)
        )

    def gradient(self, ctx: Any, g: Tensor, wanted: list[Any]) -> tuple[Tensor | None, Left]:
        x, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return None, (x, g)
        geo, kind = self.extra, g.dtype
        found: Tensor = torch.ops.aten.convolution_backward(
            g, x if x.dtype == kind else x.to(kind), weight if weight.dtype == kind else weight.to(kind),
            None, geo.stride, geo.padding, geo.dilation, False, [0] * len(geo.stride), geo.groups,
            [True, False, False],
        )[0]  # fmt: skip
        return found, (x, g)


class Norm(_Slot):
    """A layer that normalizes."""

    def __init__(
        self, slots: Slots, number: int, parameters: dict, settings: dict, kind: int,
        shape: Sequence[int], eps: float | None,
    ) -> None:  # fmt: skip
        super().__init__(slots, number, parameters, settings)
        self.rule, self._kind, self._shape = NORMS[kind], kind, tuple(shape)

    def takes(self, x: Tensor) -> bool:
        if not x.is_floating_point():
            return False
        if self._kind == 2:
            fits = x.dim() > 2 and x.shape[1] == len(self.weight) > 0
            return fits and x.device.type == "cpu"
        n = len(self._shape)
        return x.dim() > n and tuple(x.shape[-n:]) == self._shape and 0 not in self._shape

    def gradient(self, ctx: Any, g: Tensor, wanted: list[Any]) -> tuple[Tensor | None, Left]:
        call: Any = _NormCall(ctx, g, wanted)
        found = self.rule.backward(call)
        kept = [call.kept.get(name) for name in _NAMES]
        first, second = kept if kept[0] is not None else kept[::-1]
        return found, (first, first if second is None else second)


class _NormCall:
    """The interface of a norm's rule in its backward pass (`fastclip.rules.protocol.LayerCall`)."""

    def __init__(self, ctx: Any, g: Tensor, wanted: list[Any]) -> None:
        self.g, self.saved, self.needs_input_grad = g, ctx.saved_tensors, ctx.needs_input_grad[2]
        self.module = ctx.called[1]
        self._wanted = dict(zip(_NAMES, wanted, strict=True))
        self.kept: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether the parameter takes part."""
        return self._wanted[name] is not None

    def samples(self, x: Tensor) -> Tensor:
        """`x`, which has one entry per sample."""
        return x

    def record(self, name: str, record: KeptRecord) -> None:
        """Keep the per-sample gradients of a parameter."""
        self.kept[name] = record.gradients


class Lookup(_Slot):
    """A table of embeddings."""

    rule = EmbeddingRule()

    def __init__(
        self, slots: Slots, number: int, parameters: dict, settings: dict, extra: Any, padding: int
    ) -> None:
        super().__init__(slots, number, parameters, settings)
        self.extra = extra

    def takes(self, x: Tensor) -> bool:
        return x.dtype in (torch.int64, torch.int32) and self.weight.dim() == 2

    def gradient(self, ctx: Any, g: Tensor, wanted: list[Any]) -> tuple[Tensor | None, Left]:
        return None, (ctx.saved_tensors[0], g)
