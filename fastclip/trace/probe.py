"""The local probe finds the sample of each result of one operation by changing its operands.

For every bit of a sample's number the operation runs once with that half of the samples changed, and
once with the other half: 2 log2 b runs, each with two kinds of values. A result that changes in one half
of every pair has the bits of its sample's number. One that changes in both depends on several samples.
Trained tensors get other values, none of them zero: a dependence hidden by a zero now may appear later.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastclip.core.torch_names import tree_leaves
from fastclip.trace import attribution as at
from fastclip.trace.memory import BY_VALUE, LEARNED, TRAINED, Shadow
from fastclip.trace.operation import Operation

_TRIALS = 2
_CHECKS = frozenset((
    "gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index", "index_put",
    "index_add", "index_copy", "index_fill", "embedding", "nll_loss_forward", "nll_loss2d_forward",
    "nll_loss_backward", "nll_loss2d_backward", "mul", "add", "sub", "div", "eq", "take_along_dim",
    "where", "clone", "to", "_to_copy", "sort", "pow",
))  # fmt: skip
"""Operations that check whole numbers, or use them only as values."""


def probed(
    call: Operation, tensors: Sequence[Tensor], shadows: Sequence[Shadow], flags: int,
    before: Sequence[Tensor] | None = None, *, fills: bool = True,
) -> list[Shadow]:  # fmt: skip
    """Returns shadows of the operation's outputs.

    Args:
        tensors, shadows: its operands. flags: inherited from them. before: their values, if the
            operation has written into them. fills: entries that nothing has changed belong to the
            sample that changes all others next to them.
    """
    tracer, call.by_values = call.tracer, True
    tracer.report.probed[call.name] = tracer.report.probed.get(call.name, 0) + 1
    everything = [tracer.made(at.everywhere(at.SEVERAL, x.dim()), flags) for x in call.outs]
    pairs = zip(tensors, shadows, strict=True)
    strided = all((x.layout is torch.strided or not s.held) and not x.is_meta for x, s in pairs)
    if not tracer.probes or not strided or not _is_safe(call, tensors, shadows):
        return everything
    try:
        with torch.no_grad(), _generators_kept() as put_back:
            found = _asked(call, list(before or tensors), tensors, shadows, put_back)
    except Exception:  # the operation takes no other values
        return everything
    if fills:
        found = [_filled(x) for x in found]
    return [tracer.made(at.compressed(x), flags | BY_VALUE) for x in found]


def of_other_layout(
    call: Operation, tensors: Sequence[Tensor], shadows: Sequence[Shadow], flags: int
) -> list[tuple[Tensor, Shadow]]:
    """Returns outputs of an operation on tensors without memory (sparse, nested), and their shadows.
    Constants among them (a graph) are probed, unless such tensors have held samples."""
    tracer = call.tracer
    held = [x for x, s in zip(tensors, shadows, strict=True) if s.held]
    tracer.odd |= any(x.layout is not torch.strided for x in (*held, *call.outs))
    if not tracer.odd:
        return list(zip(call.outs, probed(call, tensors, shadows, flags), strict=True))
    layout = next(x.layout for x in (*tensors, *call.outs) if x.layout is not torch.strided)
    tracer.read(f"a tensor of layout {layout}", shadows)
    outs = [x for x in call.outs if x.layout is torch.strided]
    return [(x, tracer.made(at.everywhere(at.SEVERAL, x.dim()), LEARNED)) for x in outs]


@contextmanager
def _generators_kept() -> Iterator[Callable[[], None]]:
    """Context that restores the generators of torch, Python and NumPy at its end, and at each call of
    the yielded function."""
    numpy = sys.modules.get("numpy")
    state, python = torch.get_rng_state(), random.getstate()
    array = None if numpy is None else numpy.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)

    try:
        yield put_back
    finally:
        put_back()


def _filled(found: Tensor) -> Tensor:
    """Gives entries that no sample has changed, by coincidence, to the one that changes all others."""
    none = found == at.NONE
    if found.dim() < 1 or not bool(none.any()) or bool(none.all()):
        return found
    for axis in range(found.dim()):
        others = [d for d in range(found.dim()) if d != axis]
        most = found.amax(others, keepdim=True) if others else found
        if bool(((found == most) | none).all()):
            return most.expand(found.shape)
    return found


def _is_safe(call: Operation, tensors: Sequence[Tensor], shadows: Sequence[Shadow]) -> bool:
    """Whether no whole numbers must be changed that may be positions, if kernels do not check them."""
    if call.name in _CHECKS:
        return True
    whole = [_is_whole(x) for x in tensors]
    changed = any(w and s.held for w, s in zip(whole, shadows, strict=True))
    return not changed or all(
        w or x.dtype == torch.bool for w, x in zip(whole, tensors, strict=True)
    )


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _asked(
    call: Operation, given: list[Tensor], tensors: Sequence[Tensor], shadows: Sequence[Shadow],
    put_back: Callable[[], None],
) -> list[Tensor]:  # fmt: skip
    mixed = any(s.mixed for s in shadows)
    given = [
        _changed(x, torch.tensor(True, dtype=torch.bool, device="cpu"), _TRIALS)
        if s.flags & TRAINED and x.layout is torch.strided
        else (_finite(x) if s.held else x)
        for x, s in zip(given, shadows, strict=True)
    ]

    def run(change: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        values = {
            id(x): _like(x, value if s.sample is None else change(value, s.sample))
            for x, value, s in zip(tensors, given, shadows, strict=True)
        }

        def put(value: Any) -> Any:
            if isinstance(value, Tensor):
                return values[id(value)]
            return type(value)(put(x) for x in value) if isinstance(value, (list, tuple)) else value

        put_back()
        out = call.func(*map(put, call.args), **{k: put(v) for k, v in call.kwargs.items()})
        return [x.clone() for x in tree_leaves(out) if isinstance(x, Tensor)]

    first = run(lambda x, sample: x)
    again = run(lambda x, sample: x)
    number = [torch.zeros(x.shape, dtype=at.KIND, device="cpu") for x in first]
    moved = [torch.zeros(x.shape, dtype=torch.bool, device="cpu") for x in first]
    several = [
        torch.full(x.shape, mixed, dtype=torch.bool, device="cpu") | _moves(x, y)
        for x, y in zip(first, again, strict=True)
    ]
    for bit in range(max(1, (call.tracer.memory.samples - 1).bit_length())):
        sides = []
        for side in (1, 0):
            hit = [torch.zeros(x.shape, dtype=torch.bool, device="cpu") for x in first]
            for trial in range(_TRIALS):
                now = run(partial(_half_changed, bit=bit, side=side, trial=trial))
                for seen, x, y in zip(hit, first, now, strict=True):
                    seen |= _moves(x, y)
            sides.append(hit)
        for k, (one, zero) in enumerate(zip(*sides, strict=True)):
            several[k] |= one & zero
            moved[k] |= one | zero
            number[k] |= one.to(at.KIND) << bit
    return [
        n.masked_fill(~m, at.NONE).masked_fill(s, at.SEVERAL)
        for n, m, s in zip(number, moved, several, strict=True)
    ]


def _finite(x: Tensor) -> Tensor:
    """Replaces NaN and infinite values, which would hide changes; -inf alone is a mask."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    odd = x.isnan() | (x.isinf() if x.is_complex() else x.isposinf())
    return x.nan_to_num(0.0, 0.0, 0.0) if bool(odd.any()) else x


def _half_changed(x: Tensor, sample: Tensor, bit: int, side: int, trial: int) -> Tensor:
    return _changed(x, _half(sample, bit, side), trial)


def _half(sample: Tensor, bit: int, side: int) -> Tensor:
    return (sample >= 0) & (sample < at.SEVERAL) & ((sample >> bit & 1) == side)


def _like(x: Tensor, value: Tensor) -> Tensor:
    """Returns a copy with the strides of `x`."""
    if x.layout is not torch.strided:
        return value
    if any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True)):
        return value.clone()
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.copy_(value)


def _moves(x: Tensor, y: Tensor) -> Tensor:
    """Returns where results differ by more than rounding; everywhere if the shapes differ."""
    if x.shape != y.shape:
        return torch.ones(x.shape, dtype=torch.bool, device="cpu")
    if not (x.is_floating_point() or x.is_complex()):
        return x != y
    precision = torch.finfo(x.dtype).eps
    scale = torch.maximum(x.abs(), y.abs())
    equal = ((x - y).abs() <= 8 * precision * scale) | (x == y) | (x.isnan() & y.isnan())
    return ~equal


def _changed(x: Tensor, where: Tensor, trial: int) -> Tensor:
    """Returns other values there; whole numbers get those of other entries."""
    if not bool(where.any()):
        return x
    generator = torch.Generator().manual_seed(77 + trial)
    if x.dtype == torch.bool:
        new = ~x
    elif x.is_floating_point() or x.is_complex():
        size = x.abs().max().clamp(min=0.1) if x.numel() else 1
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        new = x + (drawn.to(x.device) * size).to(x.dtype)
    else:
        flat = x.reshape(-1)
        new = flat[
            torch.randperm(flat.numel(), generator=generator, device="cpu").to(x.device)
        ].view(x.shape)
    return torch.where(where.to(x.device).expand(x.shape), new, x)
