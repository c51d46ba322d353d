"""Launchers of the noise kernels, csrc/cuda/noise*: all parameters in one launch, any source of bits.

Pointers, sizes, device and stream go to `fastclip._C` as integers; device -1 runs the same source on
the host, which is how CPU tensors are served where FASTCLIP_BACKEND=cuda asks for it.

- Seeded noise is Philox 4x32-10. Its key and the high half of its counter, 126 random bits, are
  drawn from the torch.Generator on the device itself: nothing is waited for, the same state of the
  generator gives the same noise, and a CUDA graph that is replayed draws anew.
- Secure noise is ChaCha20 under a key of the operating system that serves one call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastclip import _C
from fastclip.errors import ArgumentError
from fastclip.memory import is_plain, loop_threads, place, pointer
from fastclip.noise import refuse_capture
from fastclip.noise.keystream import fresh_key
from fastclip.ops.finalize import check_std

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
    if not _takes([*summed, *like], device, source):
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
    if not _takes([out], out.device, source):
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
            values.zero_()  # whoever reads this memory later must not find the noise


def _takes(tensors: Iterable[Tensor | None], device: torch.device, source: Any) -> bool:
    """Whether the kernels can read and write these tensors and draw from the source."""
    generator = source.generator
    if generator is not None and not source.secure and not _is_on(generator.device, device):
        return False
    # One of each kind is looked at: a model has hundreds of parameters, nearly all alike.
    kinds = {(x.device, x.dtype, x.layout, type(x)): x for x in tensors if x is not None}
    return all(x.device == device and x.dtype in _SCALARS and is_plain(x) for x in kinds.values())


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device == wanted


def _in_arithmetic_of(gradient: Tensor, total: Tensor) -> Tensor:
    """A sum as the kernel reads it: contiguous, float64 for float64 gradients, else float32."""
    if total.shape != gradient.shape:
        raise ArgumentError(
            f"noise_finalize expects sums of the parameters' shapes, got {list(total.shape)} for a "
            f"parameter of {list(gradient.shape)}"
        )
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    if total.dtype == wide and total.is_contiguous() and not total.is_neg():
        return total  # of most, and what is read is their memory
    return total.detach().to(wide).contiguous().resolve_neg()


def _draw(
    totals: list[Tensor | None],
    outs: list[Tensor],
    std: float | Tensor,
    divisor: float,
    source: Any,
) -> None:
    """outs = (totals + N(0, std^2)) / divisor: one call of the extension, on the current stream."""
    device = outs[0].device
    rows = [
        (pointer(total), out.data_ptr(), out.numel(), _SCALARS[out.dtype])
        for total, out in zip(totals, outs, strict=True)
    ]
    here = {**place(device), "threads": loop_threads()}
    on_device = None
    if isinstance(std, Tensor):
        if std.numel() != 1:
            raise ArgumentError(f"std expects a scalar tensor, got the shape {list(std.shape)}")
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
        refuse_capture(device)
    with fresh_key() as key:
        _C.noise_chacha20(key=key, **scale)


KERNELS: dict[str, Callable[..., Any]] = {
    launcher.__name__: launcher for launcher in (noise_finalize, fill_normal)
}
