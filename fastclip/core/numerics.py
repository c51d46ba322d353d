"""Accumulation types, rounding margins, and products in full float32.

Index letters: b sample, t position, d input feature, p output feature.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from fastclip.core.torch_names import base_of, followed, precision_of, set_precision

_ROW_CHUNK = 1024
_ALIVE: ContextVar[Tensor | None] = ContextVar("alive", default=None)
"""Scales that are known to have no 0."""
GRAM_ERROR_FACTOR = 2.0
"""c of a Gram norm's rounding bound c * u * ||A||^2 * ||G||^2, if little cancels."""
CANCELED_ERROR_FACTOR = 6.0
"""The same if nearly all cancels: 3.98 is the largest measured value, at two nearly parallel positions
of 64 features (256: 1.5, 2048: 2.3)."""
CANCELLATION = 30.0
"""||A||^2 ||G||^2 over t times the squared norm, at which c is halfway between the two. For t unrelated
positions it is about 1, and a bound of c = 6 would raise their norms by 3 u t without need."""
PRODUCT_ERROR_FACTOR = 1.0
"""c of a product's rounding bound c * u * ||A|| * ||G|| (0.006 is the largest measured value)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the accumulation type: unchanged for float64 and complex numbers, else float32."""
    return dtype if dtype == torch.float64 or dtype.is_complex else torch.float32


def widen(x: Tensor) -> Tensor:
    """Returns `x` in its accumulation type: itself, if it already is."""
    dtype = x.dtype
    return x if dtype is torch.float32 else x.to(accumulation_dtype(dtype))


def wide_sum(x: Tensor, dim: int) -> Tensor:
    """Sums along `dim` in the accumulation type, without a copy of `x` in it."""
    return x.sum(dim, dtype=accumulation_dtype(x.dtype))


def shaped(x: Tensor, *shape: int) -> Tensor:
    """Returns `x` in this shape. Most have it already, and a check is faster than a view."""
    return x if x.shape == shape else x.reshape(shape)


def laid_out_as(x: Tensor, parameter: Tensor) -> Tensor:
    """Returns `x` with the strides of a parameter of its shape, as autograd lays out gradients.

    Fused optimizers walk through the memory of a parameter and its gradient in parallel. If a
    parameter's elements share memory, or leave gaps in it, autograd's gradient is dense, and so is this.

    Returns:
        `x` itself if it has these strides.
    """
    if x.stride() == parameter.stride():
        return x
    out = torch.empty_like(parameter.detach(), dtype=x.dtype, device=x.device)
    return out.copy_(x)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns the unit roundoff u of the accumulation type of `dtype`."""
    return torch.finfo(accumulation_dtype(dtype)).eps / 2


def margin(dtype: torch.dtype) -> float:
    """Returns the relative rounding margin below the threshold for norms, products and sums.

    float32 norms err by about 1e-7 on typical data. If all terms are equal, roundings have one sign: a
    norm was too low by up to 3.4e-6 (measured at t = 64, d = p = 768), which 2^-18 covers. Inputs in
    half precision are accumulated in float32, so the margin covers them too.
    """
    return 2.0**-40 if dtype == torch.float64 else 2.0**-18


def lost_squares(entries: int, dtype: torch.dtype) -> float:
    """Returns how much underflow of squares (and products) can hide of a sum of `entries` terms.

    A sample of tiny inputs and huge output gradients would otherwise have a norm of 0.
    """
    return entries * torch.finfo(accumulation_dtype(dtype)).tiny


@functools.lru_cache(maxsize=1024)
def _chunk(length: int) -> int:
    """Returns the size of a row's chunks, without a rest if possible."""
    divisors = (n for n in range(_ROW_CHUNK, _ROW_CHUNK // 8, -1) if length % n == 0)
    return next(divisors, _ROW_CHUNK)


def samples_at_once(entries: int, device: torch.device) -> int:
    """Returns for how many samples at a time gradients of so many entries are computed, if not kept."""
    scratch = (8 if device.type == "cpu" else 128) << 18
    return max(1, scratch // max(1, entries))


def row_norm_sq(x: Tensor) -> Tensor:
    """Returns the squared Euclidean norm of each row, ||x_b||^2, for x [b, ...]: [b].

    Long rows are reduced in chunks. A plain float32 reduction over millions of entries errs by 1e-4 to
    1e-3, this one by 1e-7. Non-adjacent entries would be added in sequence: 1,024 equal ones give a sum
    too low by 2^-17, which is more than `margin`.
    """
    x = widen(x).reshape(x.shape[0], -1) if x.numel() else widen(x).reshape(x.shape[0], 0)
    length = x.shape[1]
    if length > 1 and x.stride(1) != 1:
        x = x.contiguous()
    if length <= _ROW_CHUNK:
        return torch.linalg.vector_norm(x, dim=1).square()
    chunk = _chunk(length)
    whole = length - length % chunk
    chunks = x[:, :whole].unflatten(1, (-1, chunk))
    total = torch.linalg.vector_norm(chunks, dim=2).square().sum(1)
    if whole < length:
        total = total + torch.linalg.vector_norm(x[:, whole:], dim=1).square()
    return total


def drop_zeroed(scale: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """Zeroes the rows [b, ...] of `operands` whose scale is 0, because 0 * inf would be NaN.

    On the CPU the pass over the operands is skipped if no scale is 0. On other devices it is always
    made, because reading the scales would synchronize.
    """
    if not may_be_zero(scale):
        return operands
    dead = scale == 0
    return tuple(x.masked_fill(dead.view(-1, *[1] * (x.dim() - 1)), 0) for x in operands)


def may_be_zero(scale: Tensor) -> bool:
    """Whether one of these scales may be 0; scales are read only on the CPU, outside graphs."""
    alive = _ALIVE.get()
    if alive is not None and (scale is alive or base_of(scale) is alive):
        return False
    return scale.device.type != "cpu" or followed() or bool((scale == 0).any())


@contextmanager
def looked_at(scales: Tensor) -> Iterator[None]:
    """Context in which `drop_zeroed` does not read these scales, or slices of them, again.

    It is for the CPU: elsewhere they are never read.
    """
    looks = scales.device.type == "cpu" and not followed()
    alive = looks and not bool((scales == 0).any())
    before = _ALIVE.set(scales if alive else None)
    try:
        yield
    finally:
        _ALIVE.reset(before)


# -------------------------------------------------------------------------------------------------
# Full float32 for norms and clipped sums, independent of the user's precision for float32 products.
#
# PyTorch may round the operands of a float32 product to tf32 (10 bits) or bfloat16 (7 bits): cuDNN
# by default, cuBLAS and oneDNN if a flag allows it. That is the user's choice for forward and
# backward passes. But norms and clipped sums that round by 2^-11 bound nothing: the scales leave
# 2^-18 for rounding. So the flags are raised while such a product is launched, and restored at once.
# An operation reads them when it is launched, not when it runs.
#
# Flags belong to the process, and passes of several devices run in separate threads. A thread that
# enters raises flags that are not raised, the last to leave restores all of them, and values set by
# others meanwhile are unchanged. Python may raise KeyboardInterrupt at the end of a block, before our
# code runs. So an object that ends with its block marks a thread as inside, and no thread stays inside
# forever.
#
# 16-bit flags (such as `allow_bf16_reduced_precision_reduction`) have no effect: operands are widened
# to float32 before they are multiplied, or multiplied by kernels that read no flag.


_Function = TypeVar("_Function", bound=Callable[..., Any])
_FINE = precision_of is not None
"""torch 2.9 has a tree of settings, where an operation's setting may inherit from its parents."""
_TREE = {"cuda": ("matmul", "conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
_PRODUCTS = [(backend, operator) for backend, named in _TREE.items() for operator in named]
_FULL = {"ieee", "none"}


_Undo = list[tuple[Callable[[], bool], Callable[[], None]]]
"""For each raised flag: whether it is still raised, and a function that restores it."""


class _Flags:
    """The precision flags, raised while any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an entry may be collected in the middle of another's
        self._inside: set[int] = set()
        self._allowed = False
        self._undo: list[_Undo] = []

    def enter(self, entry: int) -> None:
        """Raises all flags to float32."""
        with self._lock:
            self._inside.add(
                entry
            )  # first: a thread that leaves meanwhile does not change the flags
            if _is_lowered():
                raised = bool(self._undo)
                self._allowed = _matmul_allows_tf32() or (raised and self._allowed)
                undo: _Undo = []
                self._undo.append(undo)
                _raise_tree(undo) if _FINE else _raise_pair(undo)
            elif not self._undo:
                self._allowed = False

    def leave(self, entry: int) -> None:
        """Restores flags that are still raised when the last thread leaves, the latest first."""
        with self._lock:
            self._inside.discard(entry)
            while self._undo and not self._inside:
                for ours, put_back in self._undo[-1]:
                    if ours():
                        put_back()
                self._undo.pop()

    def user_allows_tf32(self) -> bool:
        """Whether the user lets cuBLAS round float32 operands to tf32."""
        with self._lock:
            return self._allowed if self._inside else _matmul_allows_tf32()


_FLAGS = _Flags()


class _Thread(threading.local):
    """The innermost block of this thread; an interrupted one is gone."""

    block: Callable[[], _FullFloat32 | None] = staticmethod(lambda: None)


_THREAD = _Thread()


class _FullFloat32:
    """A block in which float32 products keep float32; blocks may be nested, and in any thread."""

    _inside = False

    def __enter__(self) -> None:
        self._inside = True
        _FLAGS.enter(id(self))
        self._around, _THREAD.block = _THREAD.block, ref(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        _THREAD.block = self._around
        _FLAGS.leave(id(self))
        self._inside = False

    def __del__(self) -> None:
        if self._inside:  # an interrupted block
            _FLAGS.leave(id(self))


def full_float32() -> _FullFloat32:
    """Context in which launched float32 products round as float32 does."""
    return _FullFloat32()


def in_full_float32(function: _Function) -> _Function:
    """Runs the function inside `full_float32`, without another check if the whole pass does."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _THREAD.block() is not None:
            return function(*args, **kwargs)
        with _FullFloat32():
            return function(*args, **kwargs)

    return guarded  # type: ignore[return-value]


def user_allows_tf32() -> bool:
    """Whether the user lets float32 products of a GPU round their operands to tf32.

    torch.backends.cuda.matmul.allow_tf32 raises an error if `fp32_precision` was set too.
    """
    return _FLAGS.user_allows_tf32()


def gpu_products() -> tuple[str, ...]:
    """Returns the user's precision of a GPU's float32 products, for every kind."""
    if _FINE:
        return tuple(_get("cuda", operator) for operator in ("matmul", "conv", "rnn"))
    return torch.get_float32_matmul_precision(), str(torch.backends.cudnn.allow_tf32)


def _matmul_allows_tf32() -> bool:
    if _FINE:
        return _get("cuda", "matmul") == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


def _is_lowered() -> bool:
    """Whether some product may round its operands."""
    if not _FINE:
        return torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    return not {_get(backend, operator) for backend, operator in _PRODUCTS} <= _FULL


def _get(backend: str, operator: str) -> str:
    assert precision_of is not None
    return precision_of(backend, operator)


def _set(backend: str, operator: str, value: str) -> None:
    assert set_precision is not None
    set_precision(backend, operator, value)


def _raise_tree(undo: _Undo) -> None:
    """Raises settings below full precision, from the root down.

    The value of a node may be its own or inherited. After its parents are set to "ieee", any other value
    is its own: this is noted and raised. The other nodes inherit "ieee", and inherit their old values
    again when the parents are restored. (cuDNN's default of tf32 is such a value since torch 2.13: it
    yields to a setting above it, and could not be restored.)
    """

    def own(backend: str, operator: str, value: str) -> None:
        undo.append(
            (
                lambda: _get(backend, operator) == "ieee",
                functools.partial(_set, backend, operator, value),
            )
        )
        _set(backend, operator, "ieee")

    lowered = [product for product in _PRODUCTS if _get(*product) not in _FULL]
    root = _get("generic", "all")
    if root not in _FULL:
        own("generic", "all", root)
    for backend in dict(lowered):
        trunk = _get(backend, "all")
        if trunk != "ieee":
            own(backend, "all", trunk)
    for backend, operator in lowered:
        value = _get(backend, operator)
        if value not in _FULL:
            own(backend, operator, value)


def _raise_pair(undo: _Undo) -> None:
    """Before torch 2.9: one setting for products, one for cuDNN."""
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if products != "highest":
        undo.append(
            (
                lambda: torch.get_float32_matmul_precision() == "highest",
                functools.partial(torch.set_float32_matmul_precision, products),
            )
        )
        torch.set_float32_matmul_precision("highest")
    if cudnn:

        def put_back() -> None:
            torch.backends.cudnn.allow_tf32 = True

        undo.append((lambda: not torch.backends.cudnn.allow_tf32, put_back))
        torch.backends.cudnn.allow_tf32 = False
