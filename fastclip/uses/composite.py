"""Functions of torch that are made of others, so that each function inside is seen by itself.

Those that ask themselves whether an argument is overridden run as they are, others as `composite` says.
Those that take the shape or the type of a tensor alone do not meet its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.uses.proxy import APART, is_private

_COMPOSITE = (F.multi_head_attention_forward,)


def _never(*args: Any) -> bool:
    return False


def _body(func: Any) -> FunctionType:
    asked = {n: _never for n in func.__globals__ if n.startswith("has_torch_function")}
    body = FunctionType(
        func.__code__, {**func.__globals__, **asked}, func.__name__, func.__defaults__,
        func.__closure__,
    )  # fmt: skip
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    other, *rest = args or (kwargs.pop("other", None),)
    if not isinstance(other, Tensor):
        return NotImplemented
    return x.to(other.device, other.dtype, *rest, **kwargs)


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


_BODIES: dict[Any, Callable[..., Any]] = {
    **{func: _body(func) for func in _COMPOSITE},
    Tensor.to: _to,
    Tensor.type_as: lambda x, other: x.to(other.device, other.dtype),
    Tensor.expand_as: lambda x, other: x.expand(other.shape),
    Tensor.view_as: lambda x, other: x.view(other.shape),
    Tensor.reshape_as: lambda x, other: x.reshape(other.shape),
    torch.broadcast_tensors: _broadcast,
}


def composite(func: Any, body: Callable[..., Any]) -> None:
    """Run `body` for this function.

    Without a graph, too: a checkpoint that computes it again must draw the same random numbers.

    Args:
        body: returns NotImplemented for a call that it does not take apart.
    """
    _BODIES[func] = body
    APART.add(func)


def opened(func: Any, args: tuple, kwargs: dict) -> Callable[..., Any] | None:
    """The body of a composite function; None for any other."""
    if func is F.scaled_dot_product_attention:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        return _attention if is_private(mask) else None
    return _BODIES.get(func)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with a trained bias, whose gradient is that of the scores: no fused one tells it."""
    if is_causal:
        raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1) + attn_mask
    return torch.dropout(scores.softmax(-1), dropout_p, train=True) @ value
