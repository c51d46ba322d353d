"""CUDA C++ kernels: launchers with the signatures of fastclip.ops, over the module fastclip._C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastclip.clipping.codes import PolicyCode, clip_numbers, step_numbers
from fastclip.core.building import check_built
from fastclip.core.numerics import accumulation_dtype
from fastclip.core.system import is_plain, loop_threads, place, pointer
from fastclip.errors import ArgumentError
from fastclip.ops import dispatch
from fastclip.ops.clip import TYPES, check_std, is_per_layer, mismatch, norm_dtype, numbers_of, room
from fastclip.ops.noise import check_not_captured
from fastclip.ops.random import fresh_key

check_built("_C", "cuda", "nvcc")
from fastclip import _C  # noqa: E402  (its absence has been said by now)

# -------------------------------------------------------------------------------------------------
# Launchers of the clipping kernels: clip_accumulate.cu and clip_scale.cu of csrc/cuda.
#
# Pointers, sizes, device and stream go to `fastclip._C` as integers; device -1 runs the same source
# on the host. Nothing here reads a tensor's values.
#
# Index letters: b sample, l parameter tensor, k group.


_CODES = {dtype: code for code, dtype in enumerate(TYPES)}  # the order of Type, clip_values.cuh


# ---- clip_accumulate -----------------------------------------------------------------------------


def clip_accumulate(
    grad_samples: Sequence[Tensor], thresholds: float | Tensor | Sequence[float]
) -> tuple[list[Tensor], Tensor]:
    """fastclip.ops.clip_accumulate; each gradient is read twice, in one launch each.

    If a sample's values are dense in another order (channels last), so are the sums'.
    """
    if reason := mismatch(grad_samples, thresholds):
        raise ArgumentError(reason)
    if not all(is_plain(g) for g in grad_samples):
        return NotImplemented
    b, device = len(grad_samples[0]), grad_samples[0].device
    per_layer = is_per_layer(thresholds)
    shape = (len(grad_samples), b) if per_layer else (b,)
    norms = torch.empty(shape, dtype=norm_dtype(grad_samples), device=device)
    if not b:
        return [_empty_sum(g).zero_() for g in grad_samples], norms
    dense = [g.resolve_neg() if _is_dense(g) else g.contiguous() for g in grad_samples]
    sums = [_empty_sum(g) for g in dense]
    rows = [
        (g.data_ptr(), total.data_ptr(), total.numel(), g.stride(0), _CODES[g.dtype])
        for g, total in zip(dense, sums, strict=True)
    ]
    partial = torch.empty(b * _C.clip_accumulate_chunks(rows), dtype=torch.float64, device=device)
    scales = torch.empty(shape, dtype=torch.float64, device=device)
    dropped = torch.zeros(b, dtype=torch.int32, device=device)
    numbers: list[float] = []
    on_device = None
    if isinstance(thresholds, Tensor):
        on_device = thresholds.to(device, torch.float64, non_blocking=True).contiguous()
    else:
        numbers = [float(c) for c in numbers_of(thresholds)]
    factor, smallest = room(grad_samples)
    _C.clip_accumulate(
        rows=rows, b=b, per_layer=per_layer, thresholds=numbers,
        device_thresholds=pointer(on_device), wide=norms.dtype == torch.float64, room=factor,
        smallest=smallest, partial=partial.data_ptr(), norms=norms.data_ptr(),
        scales=scales.data_ptr(), dropped=dropped.data_ptr(), **place(device),
    )  # fmt: skip
    return sums, norms


def _is_dense(g: Tensor) -> bool:
    """Whether the values of a sample fill one block of memory, in any order."""
    if g.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(g.stride()[1:], g.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _empty_sum(g: Tensor) -> Tensor:
    """Returns memory for the sum of g [b, ...], with the strides of a sample if there is one."""
    dtype = accumulation_dtype(g.dtype)
    if not len(g) or g.is_contiguous():
        return torch.empty(g.shape[1:], dtype=dtype, device=g.device)
    return torch.empty_strided(g.shape[1:], g.stride()[1:], dtype=dtype, device=g.device)


# ---- clip_scale and threshold_step ---------------------------------------------------------------


def _is_triton_next(operation: str, device: torch.device) -> bool:
    """Whether Triton's kernel of the operation is available, and tried after this one."""
    if "triton" not in dispatch._candidates(device):  # cuda was asked for by name
        return False
    return dispatch._kernel("triton", operation) is not None


def _takes(tensors: Sequence[tuple[Tensor | None, torch.dtype]], device: torch.device) -> bool:
    """Whether all given tensors have these types and are on this device."""
    return all(
        x is None or (x.dtype == dtype and x.device == device and is_plain(x))
        for x, dtype in tensors
    )


def clip_scale(
    norm_sq: Tensor, strategy: Any, state: Any, groups: Tensor | None = None,
    layers: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fastclip.ops.clip_scale for every strategy of fastclip.clipping's own parts, if Triton's kernel
    cannot be used."""
    device, wide, whole = norm_sq.device, torch.float64, torch.int64
    policy, numbers = strategy.threshold, clip_numbers(strategy)
    if numbers is None or _is_triton_next("clip_scale", device):
        return NotImplemented
    groups = groups if policy.num_groups is not None else None
    weights = state.weights if groups is not None else None
    tensors = [(norm_sq, torch.float32), (groups, whole), (layers, whole), (counts, wide)]
    tensors += [(x, wide) for x in (state.threshold, state.origin, state.bound, weights)]
    if not _takes(tensors, device) or not (counts is None or counts.is_contiguous()):
        return NotImplemented
    length, b = norm_sq.shape
    norms = norm_sq.new_empty(b)
    scales = norm_sq.new_empty((length, b) if policy.per_layer else (b,))
    if not b:
        return scales, norms
    threshold, groups, layers, weights = (
        None if x is None else x.contiguous() for x in (state.threshold, groups, layers, weights)
    )
    assert threshold is not None
    _C.clip_scale(
        **place(device),
        norm_sq=norm_sq.data_ptr(), threshold=threshold.data_ptr(), origin=pointer(state.origin),
        bound=pointer(state.bound), weights=pointer(weights), groups=pointer(groups),
        layers=pointer(layers), scales=scales.data_ptr(), norms=norms.data_ptr(),
        counts=pointer(counts), stride_l=norm_sq.stride(0), stride_b=norm_sq.stride(1), l=length,
        b=b, k=policy.num_groups or 1, all=threshold.numel() if policy.per_layer else 1,
        **numbers._asdict(),
        per_layer=policy.per_layer, per_group=groups is not None and threshold.dim() == 1,
        normalized=strategy.scale.normalized,
    )  # fmt: skip
    return scales, norms


def threshold_step(
    counts: Tensor, noise: Tensor | None, policy: Any, state: Any, batch_size: float, step: int
) -> tuple[Tensor, Any]:
    """fastclip.ops.threshold_step for the policies of fastclip.clipping that count, if Triton's kernel
    cannot be used."""
    numbers, device = step_numbers(policy), counts.device
    if numbers is None or _is_triton_next("threshold_step", device):
        return NotImplemented
    tensors = [(x, torch.float64) for x in (counts, noise, state.threshold, state.origin)]
    if not _takes(tensors, device):
        return NotImplemented
    counts, threshold = counts.contiguous(), state.threshold.contiguous()
    noise = None if noise is None else noise.contiguous()
    noisy = torch.empty_like(counts)
    reweighted = numbers.policy == PolicyCode.REWEIGHTED
    moved = torch.empty_like(state.weights if reweighted else threshold)
    _C.threshold_step(
        **place(device),
        counts=counts.data_ptr(), noise=pointer(noise), threshold=threshold.data_ptr(),
        origin=pointer(state.origin), noisy=noisy.data_ptr(), moved=moved.data_ptr(),
        k=policy.num_groups or 1, batch_size=float(batch_size),
        **numbers._asdict(), two_way=policy.num_groups is not None and not reweighted,
    )  # fmt: skip
    return noisy, replace(state, **{"weights" if reweighted else "threshold": moved})


_CLIPPING: dict[str, Callable[..., Any]] = {
    launcher.__name__: launcher for launcher in (clip_accumulate, clip_scale, threshold_step)
}
"""Operation of fastclip.ops -> launcher."""


# -------------------------------------------------------------------------------------------------
# Launchers of the noise kernels, csrc/cuda/noise*: all parameters in one launch, any source of
# bits.
#
# Pointers, sizes, device and stream go to `fastclip._C` as integers; device -1 runs the same source
# on the host, for CPU tensors if FASTCLIP_BACKEND=cuda.
#
# - Seeded noise is Philox 4x32-10. Its key and the high half of its counter, 126 random bits, are
#   drawn from the torch.Generator on the device itself. Nothing waits for the device, the same state
#   of the generator gives the same noise, and a replayed CUDA graph draws new noise.
# - Secure noise is ChaCha20 under a key of the operating system that is used for one call.


_SCALARS = {  # the order of Scalar, csrc/cuda/noise.cuh
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3,
}  # fmt: skip


def noise_finalize(
    summed: list[Tensor | None], like: list[Tensor], std: float | Tensor, divisor: float,
    source: Any,
) -> list[Tensor]:  # fmt: skip
    """fastclip.ops.noise_finalize: (sum + std * normal) / divisor, rounded once to the parameter's
    type at the end."""
    if not like:
        return []
    device = like[0].device
    if not _takes_noise([*summed, *like], device, source):
        return NotImplemented
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in like]
    totals = [
        None if total is None else _in_arithmetic_of(gradient, total)
        for total, gradient in zip(summed, gradients, strict=True)
    ]
    _draw(totals, gradients, std, divisor, source)
    return gradients


def fill_normal(out: Tensor, std: float, source: Any) -> None:
    """fastclip.ops.fill_normal."""
    if not _takes_noise([out], out.device, source):
        return NotImplemented
    target = out.detach()
    values = (
        target
        if target.is_contiguous()
        else torch.empty_like(target, memory_format=torch.contiguous_format)
    )
    _draw([None], [values], std, 1.0, source)
    if values is target:
        torch.autograd.graph.increment_version(out)  # autograd does not see what kernels write
    else:
        with torch.no_grad():
            out.copy_(values)
        if source.secure:
            values.zero_()  # later readers of this memory must not find the noise


def _takes_noise(tensors: Iterable[Tensor | None], device: torch.device, source: Any) -> bool:
    """Whether the kernels can read and write these tensors and draw from the source."""
    generator = source.generator
    if generator is not None and not source.secure and not _is_on(generator.device, device):
        return False
    # One of each kind is checked: a model has hundreds of parameters, nearly all alike.
    kinds = {(x.device, x.dtype, x.layout, type(x)): x for x in tensors if x is not None}
    return all(x.device == device and x.dtype in _SCALARS and is_plain(x) for x in kinds.values())


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device == wanted


def _in_arithmetic_of(gradient: Tensor, total: Tensor) -> Tensor:
    """Returns a sum as the kernel reads it: contiguous, float64 for float64 gradients, else float32."""
    if total.shape != gradient.shape:
        raise ArgumentError(
            f"noise_finalize expects sums of the parameters' shapes, got {list(total.shape)} for a "
            f"parameter of {list(gradient.shape)}."
        )
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    if total.dtype == wide and total.is_contiguous() and not total.is_neg():
        return total  # true for most sums; the kernel reads their memory
    return total.detach().to(wide).contiguous().resolve_neg()


def _draw(
    totals: list[Tensor | None],
    outs: list[Tensor],
    std: float | Tensor,
    divisor: float,
    source: Any,
) -> None:
    """Sets outs = (totals + N(0, std^2)) / divisor in one call, on the current stream."""
    device = outs[0].device
    rows = [
        (pointer(total), out.data_ptr(), out.numel(), _SCALARS[out.dtype])
        for total, out in zip(totals, outs, strict=True)
    ]
    here = {**place(device), "threads": loop_threads()}
    on_device = None
    if isinstance(std, Tensor):
        if std.numel() != 1:
            raise ArgumentError(f"std expects a scalar tensor, got shape {list(std.shape)}.")
        on_device = std.detach().to(device, torch.float64, non_blocking=True)
    elif check_std(std) == 0:
        _C.noise_silent(rows=rows, divisor=divisor, **here)
        return
    scale = {
        "rows": rows,
        "std": 0.0 if isinstance(std, Tensor) else std,
        "device_std": pointer(on_device),
        "divisor": divisor,
        "guarded": source.guarded,
        **here,
    }
    if not source.secure:
        words = torch.empty(2, dtype=torch.int64, device=device)
        seed = words.random_(generator=source.drawing(device))
        _C.noise_philox(seed=seed.data_ptr(), **scale)
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        check_not_captured(device)
    with fresh_key() as key:
        _C.noise_chacha20(key=key, **scale)


_NOISE: dict[str, Callable[..., Any]] = {
    launcher.__name__: launcher for launcher in (noise_finalize, fill_normal)
}


KERNELS: dict[str, Callable[..., Any]] = {**_CLIPPING, **_NOISE}
"""Operation of fastclip.ops -> launcher."""
