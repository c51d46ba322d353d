"""Operations entry by entry; sums over samples, and positive factors that all samples share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastclip.core.torch_names import memory_of
from fastclip.trace import attribution as at
from fastclip.trace.memory import (
    FOREIGN,
    LEARNED,
    ORDER,
    POSITIONS,
    RANDOM,
    STICKY,
    TRAINED,
    Shadow,
)
from fastclip.trace.operation import Operation, Out, is_read

POINTWISE = frozenset((
    "_to_copy", "copy", "fill", "zero", "native_dropout", "ones_like", "full_like",
    "bernoulli", "masked_fill", "lift_fresh", "exponential", "normal", "uniform", "random",
    "log_normal", "cauchy", "geometric", "floor_divide", "_conj_physical", "isclose",
    "silu_backward", "elu_backward", "hardtanh_backward", "leaky_relu_backward",
    "softplus_backward", "log_sigmoid_forward", "log_sigmoid_backward", "hardswish",
    "hardswish_backward", "hardsigmoid_backward", "mish_backward", "expand_copy", "_assert_async",
    "rrelu_with_noise", "special_logit", "fused_dropout", "_fused_dropout", "is_same_size",
    "logaddexp", "erfinv", "set_data", "native_dropout_backward", "gelu_backward", "clamp",
    "_prelu_kernel", "_prelu_kernel_backward", "glu_jvp", "rrelu_with_noise_backward",
    "_standard_gamma", "_standard_gamma_grad", "_dirichlet_grad", "poisson", "binomial",
    "hardshrink_backward", "softshrink_backward", "infinitely_differentiable_gelu_backward",
))  # fmt: skip
"""Operators that torch does not tag as pointwise, but that are."""
_DRAWN = frozenset(
    "bernoulli exponential normal uniform random log_normal cauchy geometric".split()  # noqa: SIM905
)
_CHOOSING = {"masked_fill": 1, "where": 0}
"""They choose one of two operands per entry; the number is the operand that decides."""
_BUT_NOISE = {"rrelu_with_noise": 1, "rrelu_with_noise_backward": 2}
"""The number of operands before the random one."""
_COMPARING = frozenset(("lt", "le", "gt", "ge"))
_FILLED = frozenset(
    "fill zero zeros_like ones_like full_like rand_like randn_like".split()  # noqa: SIM905
)
_LIKE = frozenset((
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "new_empty_strided",
))  # fmt: skip
"""They do not use the values of their operand."""
_LINEAR = frozenset((
    "mul", "div", "neg", "_to_copy", "clone", "copy", "add", "sub", "expand", "view",
    "_unsafe_view", "reshape", "squeeze", "unsqueeze", "detach", "alias",
))  # fmt: skip
"""Under these a sum over samples remains one."""
_HOMOGENEOUS = frozenset((
    "mul", "div", "neg", "_to_copy", "clone", "_unsafe_view", "sum", "mean", "mm", "bmm", "expand_copy",
    "cumsum", "flip", "roll", "repeat", "index", "index_select", "gather", "tril", "triu",
    "im2col", "col2im",
))  # fmt: skip
"""A factor of their first operand (or of either one, for products) is a factor of the result."""
_PRODUCTS = frozenset(("mul", "mm", "bmm"))
ADDING = frozenset((
    "add", "sub", "cat", "stack", "where", "index_put", "index_add", "scatter_add", "copy",
    "masked_fill", "masked_scatter",
))  # fmt: skip
"""A factor of all operands is a factor of the result; zeros have any factor."""


def pointwise(call: Operation) -> list[Out]:
    """Joins operands entry by entry."""
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
    operands = call.operands[: _BUT_NOISE.get(name)]
    if name in ("eq", "ne") and outs[0].numel() > 1:
        whole = [x for x in operands if not x.is_floating_point()]
        read = [x for x in whole if is_read(call, x, "a number")]
        operands = [x for x in operands if not any(x is y for y in read)] or operands
    shadows = [call.shadow(x) for x in operands]
    values = outs[0].is_floating_point() or outs[0].dtype == torch.bool
    if values and any(s.flags & POSITIONS for s in shadows):
        return [Out(at.everywhere(at.SEVERAL, outs[0].dim()), drop=POSITIONS)] * len(outs)
    if name == "eq" and (guarded := _ignored(call)) is not None:
        return guarded
    own: at.Attribution = None
    for shadow in shadows:
        own = at.joined(own, shadow.sample)
    if name in _COMPARING and (answered := _answered(call, own)) is not None:
        return answered
    if name in _CHOOSING and own is not None:
        own = _chosen(call, own)
    if name == "add" and own is not None and own.numel() > 1 and at.is_mixed(own):
        own = _absorbed(call, operands, own)
    return [Out(own, degree=_degree(call, operands, shadows))] * len(outs)


def _absorbed(call: Operation, operands: Sequence[Tensor], own: Tensor) -> Tensor:
    """Removes the entries to which a constant -inf is added, as in masks of attention."""
    for x in operands:
        if not call.shadow(x).held and x.is_floating_point() and x.numel() > 1 and not x.is_meta:
            call.by_values = True
            gone = x.detach() == -torch.inf
            if bool(gone.any()):
                own = own.expand(call.outs[0].shape).masked_fill(gone, at.NONE)
    return own


def _chosen(call: Operation, own: Tensor) -> at.Attribution:
    """Returns the attribution if a constant mask chooses: an entry has the chosen operand's sample."""
    mask = call.args[_CHOOSING[call.name]]
    if (
        not isinstance(mask, Tensor)
        or call.shadow(mask).held
        or mask.is_meta
        or not at.is_mixed(own)
    ):
        return own
    call.by_values = True
    shape = call.outs[0].shape
    yes, no = (call.args[2], call.args[0]) if call.name == "masked_fill" else call.args[1:3]
    own_of = [call.of(x) if isinstance(x, Tensor) else None for x in (yes, no)]
    one, other = (at.expanded(at.fitted(x, len(shape)), shape) for x in own_of)
    return at.compressed(torch.where(mask.cpu().expand(shape), one, other))


def _answered(call: Operation, own: at.Attribution) -> list[Out] | None:
    """Handles counts of several samples compared with a number. If all are below it, the question has
    one answer (no expert is full) and is noted as asked by Python.

    Later steps, which are traced, must give the same answer.
    """
    whole = not any(x.is_floating_point() for x in call.operands) and call.tracer.lines.in_model()
    out = call.outs[0]
    if own is None or not whole or out.numel() < 2 or not at.is_mixed(own) or out.is_meta:
        return None
    if not bool((out == out.reshape(-1)[0]).all()):
        return None
    tracer, answer = call.tracer, bool(out.reshape(-1)[0])
    call.by_values = True  # it is asked every time
    if tracer.numbers.answers.setdefault((call.name, tracer.lines.current()), answer) is not answer:
        return None
    tracer.read("a comparison", [call.shadow(x) for x in call.operands])
    tracer.report.counted = True
    return [Out(None)]


def _ignored(call: Operation) -> list[Out] | None:
    """Handles `labels == -100` if no label is: equal for all samples, and a guard of later steps.

    The guard watches the labels of torch's mean losses, which label smoothing reads first.
    """
    labels, value = call.args[:2]
    if not isinstance(value, int) or isinstance(value, bool) or value >= 0 or call.outs[0].is_meta:
        return None
    if memory_of(labels) not in call.tracer.guarded_labels:
        return None
    held = at.expanded(call.of(call.args[0]), call.outs[0].shape) != at.NONE
    if bool((call.outs[0] & held).any()):
        return None
    call.tracer.report.by_value.append(f"no input is {value}")
    return [Out(None)]


UNLIKE = -1000
"""The degree of combined sums of unequal degrees."""


def _degree(call: Operation, operands: Sequence[Tensor], shadows: Sequence[Shadow]) -> int | None:
    """Returns the degree of a sum over samples, or of samples' terms, under linear operations."""
    held = [s for s in shadows if s.held]
    if call.name not in _LINEAR or not held:
        return None
    if call.name in ("mul", "div"):
        return _scaled(call, held)
    mixed = [s for s in held if s.mixed]
    adds = call.name in ("add", "sub") and len(held) == 2 and all(s.degree == 0 for s in mixed)
    if adds and (mixed or not any(s.whole for s in held)):
        # A sum over samples plus terms of single samples is such a sum too.
        return 0
    degrees = {s.degree if s.mixed else s.degree or 0 for s in held}
    if None in degrees or (mixed and len(mixed) < len(held)):
        return None
    degree = next(iter(degrees)) if len(degrees) == 1 else UNLIKE
    return degree if mixed or degree else None


def _scaled(call: Operation, held: Sequence[Shadow]) -> int | None:
    """Returns the degree after a product or quotient with a number that may depend on the batch size."""
    if len(held) > 1 or (call.name == "div" and call.of(call.args[0]) is None):
        return None
    (own,) = held
    if own.mixed and own.degree is None:
        return None
    sign = 1 if call.name == "mul" else -1
    shift = sum(sign * power for power, sure in call.tracer.powers.values() if own.mixed or sure)
    if not own.mixed:  # per-sample losses
        unsure = {sign * p for p, sure in call.tracer.powers.values() if p and not sure}
        call.tracer.report.shifts |= unsure
        call.by_values = call.by_values or bool(unsure)  # noted in every step
    degree = (own.degree or 0) + shift
    return degree if own.mixed or degree else None


def factored(call: Operation, shadows: Sequence[Shadow]) -> list[Shadow] | None:
    """Handles an operation with a positive number shared by all samples, without gradient.

    Returns:
        None: it has no such number, and the rule decides.
    """
    if call.name in _LIKE or call.name == "zero":
        return None
    found = _times_shared(call)
    if found is not None or call.name.endswith("_like") or all(s.factor is None for s in shadows):
        return found
    factor = _kept_factor(call)
    described = None if factor is None else _by_rule(call)
    if described is None:
        flags = LEARNED
        for shadow in shadows:
            flags |= shadow.flags & STICKY
        return [call.tracer.made(at.everywhere(at.SEVERAL, x.dim()), flags) for x in call.outs]
    return [
        call.tracer.made(
            s.sample, s.flags, degree=s.degree, part=s.part,
            factor=factor if s.factor is None else hash((s.factor, factor)),
        )
        for s in described
    ]  # fmt: skip


def _times_shared(call: Operation) -> list[Shadow] | None:
    """Handles a product or quotient with such a number."""
    if call.name not in ("mul", "div") or len(call.operands) != 2 or call.kwargs:
        return None
    for k in (1, 0) if call.name == "mul" else (1,):
        own, x = shared(call, call.args[k]), call.shadow(call.args[1 - k])
        if own is not None and not (x.mixed and x.factor is None and x.degree is None):
            call.by_values = True  # the number differs from call to call
            factor = hash((x.factor, own, call.name))
            flags = x.flags & (STICKY | TRAINED | FOREIGN) | call.flags(call.args[k]) & ORDER
            return [call.tracer.made(x.sample, flags, factor=factor)]
    return None


def _kept_factor(call: Operation) -> int | None:
    """Returns the factor of an operation's result, if it has one."""
    name, first, operands = call.name, call.args[0], call.operands
    if name in ("cat", "stack"):
        first, operands = first[0], list(first)
    if any(not x.is_floating_point() for x in call.outs) or not isinstance(first, Tensor):
        return None
    carriers = [x for x in operands if call.shadow(x).factor is not None]
    if name in _HOMOGENEOUS or _is_linear(call):
        alone = len(carriers) == 1 and (carriers[0] is first or name in _PRODUCTS)
        if name in ("mul", "div") and isinstance(call.kwargs.get("rounding_mode"), str):
            alone = False
        return call.shadow(carriers[0]).factor if alone else None
    if name not in ADDING:
        return None
    number = None if isinstance(call.args[-1], Tensor) else call.args[-1]
    if name in ("add", "sub", "masked_fill") and number not in (None, 0):
        return None
    chosen = {
        "where": [0],
        "index_put": [],
        "masked_fill": [1],
        "masked_scatter": [1],
        "index_add": [2],
        "scatter_add": [2],
    }
    aside = [call.args[k] for k in chosen.get(name, [])]
    if name == "copy":
        aside = [first]
    factors = set()
    for x in operands:
        if any(x is y for y in aside):
            if call.shadow(x).factor is not None and name != "copy":
                return None
        elif call.shadow(x).factor is not None or call.shadow(x).held or bool(x.any()):
            factors.add(call.shadow(x).factor)
    return next(iter(factors)) if len(factors) == 1 else None


def _is_linear(call: Operation) -> bool:
    """Whether scaling its first operand scales its result: views, zero padding, and gradients computed
    from a result's gradient.
    """
    kind = call.kind
    if kind.name == "constant_pad_nd":
        return not call.given["value"]
    if kind.aliases and not kind.writes:
        return True
    backward = kind.name.endswith(("_backward", "_backward_data"))
    return backward and call.func._schema.arguments[0].name.startswith("grad")


def _by_rule(call: Operation) -> list[Shadow] | None:
    """Returns the rule's result for the operation."""
    held = [x for x in call._shadows.values() if x.held]
    if not held:
        flags = 0
        for shadow in call._shadows.values():
            flags |= shadow.flags & (TRAINED | FOREIGN)
        return [call.tracer.shadows.of_no_sample(flags)] * len(call.outs)
    described = None if call.kind.rule is None else call.kind.rule(call)
    if described is None:
        return None
    kept = 0
    for shadow in call._shadows.values():
        kept |= shadow.flags & STICKY | (LEARNED if shadow.flags & TRAINED else 0)
    return [call.tracer._shadow(x, out, kept) for x, out in zip(call.outs, described, strict=True)]


def shared(call: Operation, x: object) -> int | None:
    """Returns an id if the operand is one positive number of several samples, without gradient."""
    if not isinstance(x, Tensor) or x.numel() != 1 or x.is_meta:
        return None
    shadow = call.shadow(x)
    if (
        shadow.sample is None
        or shadow.flags & LEARNED
        or not bool((shadow.sample == at.SEVERAL).all())
    ):
        return None
    value = x.detach()
    if not bool(torch.isfinite(value.double()).all()) or not bool((value > 0).all()):
        return None
    call.tracer.report.guards.add("positive factor")
    return hash(("factor", call.tracer.memory.formula(x)))
