"""The operations as torch custom ops, `torch.ops.fastclip.*`, with fake implementations.

They are for graphs of a compiler (torch.compile, torch.export, `engine.make_step(compile=True)`). There
they are opaque calls, whose backend is chosen when they run. The engine itself calls fastclip.ops
directly, which costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.core.numerics import accumulation_dtype
from fastclip.ops.conv import ConvGeometry, conv_ghost_norm, conv_norm
from fastclip.ops.dispatch import CALLS, OPERATIONS
from fastclip.ops.embedding import lookup_norm
from fastclip.ops.grams import gram_dots, wide_gram
from fastclip.ops.linear import ghost_norm, instantiated_norm, scaled_sum
from fastclip.ops.norms import group_norm_backward, layer_norm_backward, rms_norm_backward


def _custom(name: str):  # type: ignore[no-untyped-def]
    return torch.library.custom_op(f"fastclip::{name}", mutates_args=())


def _vector(like: Tensor, length: int | torch.SymInt) -> Tensor:
    return like.new_empty((length,), dtype=accumulation_dtype(like.dtype))


@_custom("ghost_norm")
def _ghost_norm(a: Tensor, g: Tensor) -> Tensor:
    return ghost_norm(a, g)


@_ghost_norm.register_fake
def _(a: Tensor, g: Tensor) -> Tensor:
    return _vector(a, a.shape[0])


@_custom("instantiated_norm")
def _instantiated_norm(a: Tensor, g: Tensor) -> Tensor:
    norm = instantiated_norm(a, g)
    assert isinstance(norm, Tensor)
    return norm


@_instantiated_norm.register_fake
def _(a: Tensor, g: Tensor) -> Tensor:
    return _vector(a, a.shape[0])


@_custom("scaled_sum")
def _scaled_sum(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    return scaled_sum(a, g, scale)


@_scaled_sum.register_fake
def _(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    return a.new_empty((g.shape[2], a.shape[2]), dtype=accumulation_dtype(a.dtype))


@_custom("lookup_norm")
def _lookup_norm(
    ids: Tensor, sample: Tensor, g: Tensor, batch_size: int, num_embeddings: int, padding_idx: int
) -> Tensor:
    return lookup_norm(
        ids, sample, g, batch_size, num_embeddings, None if padding_idx < 0 else padding_idx
    )


@_lookup_norm.register_fake
def _(
    ids: Tensor, sample: Tensor, g: Tensor, batch_size: int, num_embeddings: int, padding_idx: int
) -> Tensor:
    return _vector(g, batch_size)


@_custom("half_gram")
def _half_gram(x: Tensor) -> Tensor:
    return wide_gram(x)


@_half_gram.register_fake
def _(x: Tensor) -> Tensor:
    b, t, _ = x.shape
    return x.new_empty((b, t, t))


@_custom("gram_dots")
def _gram_dots(gram_a: Tensor, g: Tensor) -> Tensor:
    return torch.stack(gram_dots(gram_a, g))


@_gram_dots.register_fake
def _(gram_a: Tensor, g: Tensor) -> Tensor:
    return g.new_empty((4, g.shape[0]))


def _geometry(
    weight_shape: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> ConvGeometry:  # fmt: skip
    return ConvGeometry(tuple(weight_shape), tuple(stride), tuple(padding), tuple(dilation), groups)


@_custom("conv_norm")
def _conv_norm(
    x: Tensor, g: Tensor, weight_shape: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, ghost: bool,
) -> Tensor:  # fmt: skip
    norm = conv_ghost_norm if ghost else conv_norm
    found = norm(x, g, _geometry(weight_shape, stride, padding, dilation, groups))
    assert isinstance(found, Tensor)
    return found


@_conv_norm.register_fake
def _(
    x: Tensor, g: Tensor, weight_shape: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, ghost: bool,
) -> Tensor:  # fmt: skip
    return _vector(x, x.shape[0])


@_custom("layer_norm_backward")
def _layer_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, dw, db = layer_norm_backward(x, g, mean, rstd, weight, True)
    assert grad is not None
    return grad, dw, db.clone()  # a custom op returns no views


@_layer_norm_backward.register_fake
def _(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty((x.shape[0], x.shape[2]), dtype=accumulation_dtype(x.dtype))
    return torch.empty_like(x), rows, torch.empty_like(rows)


@_custom("rms_norm_backward")
def _rms_norm_backward(x: Tensor, g: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad, dw = rms_norm_backward(x, g, rstd, weight, True)
    assert grad is not None
    return grad, dw


@_rms_norm_backward.register_fake
def _(x: Tensor, g: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.new_empty((x.shape[0], x.shape[2]), dtype=accumulation_dtype(x.dtype))
    return torch.empty_like(x), rows


@_custom("group_norm_backward")
def _group_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, dw, db = group_norm_backward(x, g, mean, rstd, weight, True)
    assert grad is not None
    return grad, dw, db.clone()  # its results share no memory


@_group_norm_backward.register_fake
def _(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty((x.shape[0], x.shape[1]), dtype=accumulation_dtype(x.dtype))
    return torch.empty_like(x), rows, torch.empty_like(rows)


_WORTH_IT = 1 << 22
"""Multiplications of an operation from which a call of it costs less than it saves."""


def _large(call: Callable[..., Any], operation: Any) -> Callable[..., Any]:
    """Uses the call if the first operand [b, t, d] is large enough, else the operation's reference."""

    def either(x: Tensor, *others: Any) -> Any:
        size = x.numel() * min(x.shape[1:])
        return (call if size >= _WORTH_IT else operation.reference)(x, *others)

    return either


def _normalized(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """Makes the backward pass of a normalization, which always gives the input's gradient."""
    call: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.fastclip, name)

    def both(*operands: Any) -> tuple[Tensor | None, ...]:
        *given, weight, _ = operands
        x = given[0]
        if x.numel() < _NORM_WORTH_IT:
            return OPERATIONS[name](*operands)  # type: ignore[no-any-return]
        c = x.shape[1 if name.startswith("group") else 2]
        return call(*given, x.new_ones(c) if weight is None else weight)

    return both


_NORM_WORTH_IT = 1 << 17
"""The same for the numbers of a normalized input."""
CALLS["wide_gram"] = _large(_half_gram, wide_gram)
CALLS["gram_dots"] = _large(lambda *given: _gram_dots(*given).unbind(), gram_dots)
CALLS["scaled_sum"] = _large(_scaled_sum, scaled_sum)
for _name in ("layer_norm_backward", "rms_norm_backward", "group_norm_backward"):
    CALLS[_name] = _normalized(_name)
