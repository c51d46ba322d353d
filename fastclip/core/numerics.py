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
"""Scales of which none is 0."""
GRAM_ERROR_FACTOR = 2.0
"""c of a Gram norm's rounding bound c * u * ||A||^2 * ||G||^2, where little cancels."""
CANCELED_ERROR_FACTOR = 6.0
"""The same where nearly all cancels: 3.98 is the most that was measured, at two nearly parallel
positions of 64 features (256: 1.5, 2048: 2.3)."""
CANCELLATION = 30.0
"""||A||^2 ||G||^2 over t times the squared norm, at which c is halfway between the two. Of t unrelated
positions it is about 1, and a bound of c = 6 would raise their norms by 3 u t for nothing."""
PRODUCT_ERROR_FACTOR = 1.0
"""c of a product's rounding bound c * u * ||A|| * ||G|| (0.006 is the most that was measured)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 and complex numbers stay as they are; everything else accumulates in float32."""
    return dtype if dtype == torch.float64 or dtype.is_complex else torch.float32


def widen(x: Tensor) -> Tensor:
    """`x` in its accumulation type: itself, where it is already."""
    dtype = x.dtype
    return x if dtype is torch.float32 else x.to(accumulation_dtype(dtype))


def wide_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim` in the accumulation type, without a copy of `x` in it."""
    return x.sum(dim, dtype=accumulation_dtype(x.dtype))


def shaped(x: Tensor, *shape: int) -> Tensor:
    """`x` in this shape; most are in it, and a view takes longer than a look."""
    return x if x.shape == shape else x.reshape(shape)


def laid_out_as(x: Tensor, parameter: Tensor) -> Tensor:
    """`x` with the strides of a parameter of its shape, as autograd lays out gradients.

    Fused optimizers walk through the memory of a parameter and of its gradient side by side. Of a
    parameter whose elements share memory, or leave gaps in it, autograd's gradient is dense, and so is
    this.

    Returns:
        `x` itself where it has these strides.
    """
    if x.stride() == parameter.stride():
        return x
    out = torch.empty_like(parameter.detach(), dtype=x.dtype, device=x.device)
    return out.copy_(x)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff u of the accumulation type of `dtype`."""
    return torch.finfo(accumulation_dtype(dtype)).eps / 2


def margin(dtype: torch.dtype) -> float:
    """Relative room left below the threshold for the rounding of norms, products and sums.

    float32 norms err by about 1e-7 on ordinary data; where all terms are equal, roundings agree in
    sign and a norm came out low by up to 3.4e-6 (measured at t = 64, d = p = 768), which 2^-18
    covers. Half-precision inputs are accumulated in float32, so it serves them too.
    """
    return 2.0**-40 if dtype == torch.float64 else 2.0**-18


def lost_squares(entries: int, dtype: torch.dtype) -> float:
    """The most that squares (and products) which underflow can hide of a sum of `entries` terms.

    A sample of tiny inputs and huge output gradients would otherwise have a norm of 0.
    """
    return entries * torch.finfo(accumulation_dtype(dtype)).tiny


@functools.lru_cache(maxsize=1024)
def _chunk(length: int) -> int:
    """Into which a row is cut: without a rest, if it can be."""
    divisors = (n for n in range(_ROW_CHUNK, _ROW_CHUNK // 8, -1) if length % n == 0)
    return next(divisors, _ROW_CHUNK)


def samples_at_once(entries: int, device: torch.device) -> int:
    """Of how many samples gradients of so many entries are computed at a time, if not kept."""
    scratch = (8 if device.type == "cpu" else 128) << 18
    return max(1, scratch // max(1, entries))


def row_norm_sq(x: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, ||x_b||^2, for x [b, ...]; returns [b].

    Long rows are reduced in chunks: a plain float32 reduction over millions of entries errs by
    1e-4 to 1e-3, this one by 1e-7. Entries that do not lie side by side would be added one after the
    other: 1,024 that are equal come out low by 2^-17, which is more than `margin`.
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
    """Zero the rows [b, ...] of `operands` whose scale is 0, so that 0 * inf cannot become NaN.

    On the CPU the pass over the operands is skipped when no scale is 0; on other devices it is
    always made, because looking would synchronize.
    """
    if not may_be_zero(scale):
        return operands
    dead = scale == 0
    return tuple(x.masked_fill(dead.view(-1, *[1] * (x.dim() - 1)), 0) for x in operands)


def may_be_zero(scale: Tensor) -> bool:
    """Whether one of these scales may be 0; on devices but the CPU, and in a graph, nobody looks."""
    alive = _ALIVE.get()
    if alive is not None and (scale is alive or base_of(scale) is alive):
        return False
    return scale.device.type != "cpu" or followed() or bool((scale == 0).any())


@contextmanager
def looked_at(scales: Tensor) -> Iterator[None]:
    """Inside, `drop_zeroed` need not look at these scales, or at rows of them, again.

    Only on the CPU: elsewhere it never looks.
    """
    looks = scales.device.type == "cpu" and not followed()
    alive = looks and not bool((scales == 0).any())
    before = _ALIVE.set(scales if alive else None)
    try:
        yield
    finally:
        _ALIVE.reset(before)


# -------------------------------------------------------------------------------------------------
# Full float32 for norms and clipped sums, whatever precision the user allows float32 products.
#
# PyTorch may round the operands of a float32 product to tf32 (10 bits) or bfloat16 (7 bits): cuDNN
# does by default, cuBLAS and oneDNN where a flag allows it. That is the user's choice for forward
# and backward passes. But a norm and a clipped sum that round by 2^-11 bound nothing: the scales
# leave 2^-18 for rounding. So the flags are raised while such a product is launched and put back at
# once; they are read when an operation is launched, not when it runs.
#
# Flags are the process's. Passes of several devices run on threads of their own: whoever comes in
# raises what is not raised, the last to leave puts all of it back, and what somebody has set
# meanwhile stays. Python may raise KeyboardInterrupt on the way out of a block, before anything of
# ours runs: whoever was inside is told by an object that ends with its block, so that nobody stays
# inside for ever.
#
# 16-bit flags (`allow_bf16_reduced_precision_reduction` and its like) change nothing: operands are
# widened to float32 before they are multiplied, or multiplied by kernels that read no flag.


_Function = TypeVar("_Function", bound=Callable[..., Any])
_FINE = precision_of is not None
"""torch 2.9 has a tree of settings, of which an operation's own may inherit from those above."""
_TREE = {"cuda": ("matmul", "conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
_PRODUCTS = [(backend, operator) for backend, named in _TREE.items() for operator in named]
_FULL = {"ieee", "none"}


_Undo = list[tuple[Callable[[], bool], Callable[[], None]]]
"""Of each flag that was raised: whether it still is, and what puts it back."""


class _Flags:
    """Raised while anybody is inside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an entry may be collected in the middle of another's
        self._inside: set[int] = set()
        self._allowed = False
        self._undo: list[_Undo] = []

    def enter(self, entry: int) -> None:
        """Nothing is below float32 from here on."""
        with self._lock:
            self._inside.add(entry)  # first: who leaves meanwhile leaves the flags as they are
            if _is_lowered():
                raised = bool(self._undo)
                self._allowed = _matmul_allows_tf32() or (raised and self._allowed)
                undo: _Undo = []
                self._undo.append(undo)
                _raise_tree(undo) if _FINE else _raise_pair(undo)
            elif not self._undo:
                self._allowed = False

    def leave(self, entry: int) -> None:
        """The last one puts back what is still as it was raised, the latest first."""
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
    """The innermost block that this thread is in; one that was interrupted is gone."""

    block: Callable[[], _FullFloat32 | None] = staticmethod(lambda: None)


_THREAD = _Thread()


class _FullFloat32:
    """One block inside which float32 products keep float32; blocks may be nested, and of any thread."""

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
    """Context manager: the float32 products launched inside round as float32 does."""
    return _FullFloat32()


def in_full_float32(function: _Function) -> _Function:
    """The function runs inside `full_float32`; where all of a pass does, nothing is asked again."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _THREAD.block() is not None:
            return function(*args, **kwargs)
        with _FullFloat32():
            return function(*args, **kwargs)

    return guarded  # type: ignore[return-value]


def user_allows_tf32() -> bool:
    """Whether the user lets float32 products of a GPU round their operands to tf32.

    torch.backends.cuda.matmul.allow_tf32 raises where `fp32_precision` has been set as well.
    """
    return _FLAGS.user_allows_tf32()


def gpu_products() -> tuple[str, ...]:
    """To what the user lets float32 products of a GPU be rounded, of every kind."""
    if _FINE:
        return tuple(_get("cuda", operator) for operator in ("matmul", "conv", "rnn"))
    return torch.get_float32_matmul_precision(), str(torch.backends.cudnn.allow_tf32)


def _matmul_allows_tf32() -> bool:
    if _FINE:
        return _get("cuda", "matmul") == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


def _is_lowered() -> bool:
    """Some product may round its operands."""
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
    """Raise what is below full precision, from the root downwards.

    What a node reads may be its own or inherited. Once those above it say "ieee", whatever it still
    reads is its own: that is noted and raised; the rest inherits "ieee", and inherits again what it did
    as soon as those above are put back. (cuDNN's default of tf32 is of this kind since torch 2.13:
    it yields to a setting above it, and could not be set back.)
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
