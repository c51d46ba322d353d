"""Operations entry by entry; sums over samples, and positive factors that all samples share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip.trace import attribution as at
from fastclip.trace.operation import Operation, Out
from fastclip.trace.shadow import LEARNED, POSITIONS, RANDOM, STICKY, Shadow

POINTWISE = frozenset(
    [
        "_to_copy",
        "copy",
        "fill",
        "zero",
        "tril",
        "triu",
        "native_dropout",
        "ones_like",
        "full_like",
        "bernoulli",
        "masked_fill",
        "lift_fresh",
        "exponential",
        "normal",
        "uniform",
        "random",
        "log_normal",
        "cauchy",
        "geometric",
        "floor_divide",
        "_conj_physical",
        "isclose",
        "silu_backward",
        "elu_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "softplus_backward",
        "log_sigmoid_forward",
        "log_sigmoid_backward",
        "hardswish",
        "hardswish_backward",
        "hardsigmoid_backward",
        "mish_backward",
        "expand_copy",
        "_assert_async",
        "rrelu_with_noise",
        "special_logit",
        "fused_dropout",
        "_fused_dropout",
        "is_same_size",
        "logaddexp",
        "erfinv",
        "set_data",
        "native_dropout_backward",
        "gelu_backward",
        "clamp",
    ]
)
"""Operators that torch does not tag as pointwise, but that are."""
_DRAWN = frozenset(
    ["bernoulli", "exponential", "normal", "uniform", "random", "log_normal", "cauchy", "geometric"]
)
_FILLED = frozenset(
    ["fill", "zero", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"]
)
_LINEAR = frozenset(
    [
        "mul",
        "div",
        "neg",
        "_to_copy",
        "clone",
        "copy",
        "add",
        "sub",
        "expand",
        "view",
        "_unsafe_view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "detach",
        "alias",
    ]
)
"""A sum over samples stays one under these."""
_HOMOGENEOUS = _LINEAR | frozenset(
    [
        "sum",
        "mean",
        "mm",
        "bmm",
        "addmm",
        "t",
        "transpose",
        "permute",
        "slice",
        "select",
        "cat",
        "stack",
        "slice_backward",
        "select_backward",
        "constant_pad_nd",
        "masked_fill",
        "index",
        "index_select",
        "index_put",
        "scatter",
        "scatter_add",
        "index_add",
        "unbind",
        "split",
        "split_with_sizes",
        "expand_copy",
        "cumsum",
        "flip",
        "roll",
        "repeat",
        "as_strided",
        "diagonal",
        "diagonal_backward",
        "unfold",
        "unfold_backward",
        "zero",
        "fill",
        "where",
        "embedding_dense_backward",
        "convolution_backward",
        "convolution",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "threshold_backward",
        "tanh_backward",
        "sigmoid_backward",
        "gelu_backward",
        "silu_backward",
        "native_dropout_backward",
        "nll_loss_backward",
        "nll_loss2d_backward",
        "mse_loss_backward",
        "binary_cross_entropy_with_logits_backward",
        "avg_pool2d_backward",
        "max_pool2d_with_indices_backward",
        "_adaptive_avg_pool2d_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ]
)
"""Operations in which a factor of one operand is a factor of the result, if no other has one."""
_NONLINEAR_IN_OTHERS = frozenset(("mul", "div"))


def pointwise(call: Operation) -> list[Out]:
    """Joined entry by entry."""
    name, args, outs = call.name, call.args, call.outs
    if name in _DRAWN and call.kind.writes:
        return [Out(None, RANDOM)]
    if name in _FILLED:
        value = args[1] if name == "fill" and len(args) > 1 else None
        return [Out(call.of(value))] * len(outs)
    if name == "copy":
        shadow = call.shadow(args[1])
        sample = shadow.sample if shadow.held else at.everywhere(at.NONE, outs[0].dim())
        return [Out(sample, degree=shadow.degree)]
    operands = call.operands
    shadows = [call.shadow(x) for x in operands]
    values = outs[0].is_floating_point() or outs[0].dtype == torch.bool
    if values and any(s.flags & POSITIONS for s in shadows):
        return [Out(at.everywhere(at.SEVERAL, outs[0].dim()), drop=POSITIONS)] * len(outs)
    if name == "eq" and (guarded := _ignored(call)) is not None:
        return guarded
    own: at.Attribution = None
    for shadow in shadows:
        own = at.joined(own, shadow.sample)
    return [Out(own, degree=_degree(call, operands, shadows))] * len(outs)


def _ignored(call: Operation) -> list[Out] | None:
    """`labels == -100` where no label is: the same for all samples, as a guard of later steps says."""
    value = call.args[1]
    if not isinstance(value, int) or isinstance(value, bool) or value >= 0 or call.outs[0].is_meta:
        return None
    held = at.expanded(call.of(call.args[0]), call.outs[0].shape) != at.NONE
    if bool((call.outs[0] & held).any()):
        return None
    call.tracer.report.by_value.append(f"no input is {value}")
    return [Out(None)]


def _degree(call: Operation, operands: Sequence[Tensor], shadows: Sequence[Shadow]) -> int | None:
    """Of a sum over samples, under operations that are linear in it."""
    held = [s for s in shadows if s.held]
    if call.name not in _LINEAR or not held:
        return None
    degrees = [s.degree for s in held]
    if call.name in ("add", "sub") and len(held) == 2:
        # A sum over samples, and terms of which each is one sample's: the sum is such a sum as well.
        mixed = [s for s in held if s.mixed]
        if mixed and all(s.degree == 0 for s in mixed):
            return 0
    if None in degrees or len(set(degrees)) != 1:
        return None
    if len(held) > 1 and call.name not in ("add", "sub"):
        return None
    degree, other = degrees[0], call.args[1] if len(call.args) > 1 else None
    assert degree is not None
    if call.name not in ("mul", "div"):
        return degree
    if isinstance(other, Tensor):
        if call.name == "div" and call.shadow(other).held:
            return None
        second = other if not call.shadow(other).held else call.args[0]
        number = float(second) if isinstance(second, Tensor) and second.numel() == 1 else second
    else:
        number = other
    if isinstance(number, (int, float)) and number == call.tracer.memory.samples > 1:
        return degree - 1 if call.name == "div" else degree + 1
    return degree


def factored(
    call: Operation, operands: Sequence[Tensor], shadows: Sequence[Shadow]
) -> list[Shadow] | None:
    """Of an operation with a positive number that all samples share and that takes no gradient.

    Returns:
        None: there is no such number in it, and the rule decides.
    """
    made = call.tracer.made
    factors = {s.factor for s in shadows if s.held or s.factor is not None}
    if call.name in ("mul", "div") and len(operands) == 2:
        x, y = shadows
        own = _shared(call, 1)
        if own is None and call.name == "mul":
            own, (x, y) = _shared(call, 0), (y, x)
        if own is not None and not (x.mixed and x.factor is None and x.degree is None):
            combined = hash((x.factor, own, call.name))
            return [made(x.sample, x.flags & STICKY, factor=combined)]
    if factors <= {None}:
        return None
    carriers = [s for s in shadows if s.factor is not None]
    if call.name in _HOMOGENEOUS:
        of_sum = call.name in (
            "add",
            "sub",
            "cat",
            "stack",
            "where",
            "index_put",
            "scatter_add",
            "index_add",
        )
        if of_sum and len({s.factor for s in shadows if s.held or s.factor is not None}) == 1:
            return _with_factor(call, carriers[0].factor)
        if (
            not of_sum
            and len(carriers) == 1
            and not (call.name == "div" and shadows[-1] is carriers[0])
        ):
            return _with_factor(call, carriers[0].factor)
    return [made(at.everywhere(at.SEVERAL, x.dim()), _sticky(shadows)) for x in call.outs]


def _sticky(shadows: Sequence[Shadow]) -> int:
    flags = 0
    for shadow in shadows:
        flags |= shadow.flags & STICKY
    return flags


def _with_factor(call: Operation, factor: int | None) -> list[Shadow]:
    """What the rule says of the operation, each result with that factor."""
    tracer, held = call.tracer, [x for x in call._shadows.values() if x.held]
    told = (
        None
        if call.kind.rule is None
        else call.kind.rule(call)
        if held
        else [None] * len(call.outs)
    )
    if told is None:
        return [tracer.made(at.everywhere(at.SEVERAL, x.dim())) for x in call.outs]
    kept = _sticky(held)
    found = [tracer._shadow(x, out, kept) for x, out in zip(call.outs, told, strict=True)]
    return [
        tracer.made(f.sample, f.flags, degree=f.degree, part=f.part, factor=factor) for f in found
    ]


def _shared(call: Operation, k: int) -> int | None:
    """Identifies operand k if it is one positive number of several samples, without gradient."""
    x = call.args[k] if len(call.args) > k else None
    if not isinstance(x, Tensor) or x.numel() != 1 or x.is_meta:
        return None
    shadow = call.shadow(x)
    if not shadow.mixed or shadow.flags & LEARNED or not bool((shadow.sample == at.SEVERAL).all()):  # type: ignore[union-attr]
        return None
    value = x.detach()
    if not bool(torch.isfinite(value.float()).all()) or not bool((value > 0).all()):
        return None
    return hash(("factor", call.tracer.memory.serial(x)))
