"""Full float32 for norms and clipped sums, whatever precision the user allows float32 products.

PyTorch may round the operands of a float32 product to tf32 (10 bits) or bfloat16 (7 bits): cuDNN does
by default, cuBLAS and oneDNN where a flag allows it. That is the user's choice for forward and
backward passes. But a norm and a clipped sum that round by 2^-11 bound nothing: the scales leave 2^-18
for rounding. So the flags are raised while such a product is launched and put back at once; they are
read when an operation is launched, not when it runs.

Flags are the process's. Passes of several devices run on threads of their own: the first to come in
raises them, the last to leave puts them back, and what somebody has set meanwhile stays.

16-bit flags (`allow_bf16_reduced_precision_reduction` and its like) change nothing: operands are
widened to float32 before they are multiplied, or multiplied by kernels that read no flag.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from fastclip._torch import precision_of, set_precision

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FINE = precision_of is not None
"""torch 2.9 has a tree of settings, of which an operation's own may inherit from those above."""
_TREE = {"cuda": ("matmul", "conv"), "mkldnn": ("matmul", "conv")}
_FULL = ("ieee", "none")


class _FullFloat32:
    """Context inside which float32 products keep float32; may be nested and entered by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._allowed = False
        self._undo: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        """Of each flag that was raised: whether it still is, and what puts it back."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._allowed = _matmul_allows_tf32()
                self._undo = _raise_tree() if _FINE else _raise_pair()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            undo, self._undo = self._undo, []
            for ours, put_back in undo:
                if ours():
                    put_back()

    def user_allows_tf32(self) -> bool:
        """Whether the user lets cuBLAS round float32 operands to tf32."""
        with self._lock:
            return self._allowed if self._inside else _matmul_allows_tf32()


_GUARD = _FullFloat32()


def full_float32() -> _FullFloat32:
    """Context manager: the float32 products launched inside round as float32 does."""
    return _GUARD


def in_full_float32(function: _Function) -> _Function:
    """The function runs inside `full_float32`."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _GUARD:
            return function(*args, **kwargs)

    return guarded  # type: ignore[return-value]


def user_allows_tf32() -> bool:
    """Whether the user lets float32 products of a GPU round their operands to tf32.

    torch.backends.cuda.matmul.allow_tf32 raises where `fp32_precision` has been set as well.
    """
    return _GUARD.user_allows_tf32()


def _matmul_allows_tf32() -> bool:
    if _FINE:
        return _get("cuda", "matmul") == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


def _get(backend: str, operator: str) -> str:
    assert precision_of is not None
    return precision_of(backend, operator)


def _set(backend: str, operator: str, value: str) -> None:
    assert set_precision is not None
    set_precision(backend, operator, value)


def _raise_tree() -> list[tuple[Callable[[], bool], Callable[[], None]]]:
    """Raise what is below full precision, from the root downwards.

    What a node reads may be its own or inherited. Once those above it say "ieee", whatever it still
    reads is its own: that is noted and raised; the rest inherits "ieee", and inherits again what it did
    as soon as those above are put back. (cuDNN's default of tf32 is of this kind since torch 2.13:
    it yields to a setting above it, and could not be set back.)
    """
    undo: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def own(backend: str, operator: str, value: str) -> None:
        _set(backend, operator, "ieee")
        undo.append(
            (
                lambda: _get(backend, operator) == "ieee",
                functools.partial(_set, backend, operator, value),
            )
        )

    lowered = [
        (backend, operator)
        for backend, operators in _TREE.items()
        for operator in operators
        if _get(backend, operator) not in _FULL
    ]
    if not lowered:
        return undo
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
    return undo


def _raise_pair() -> list[tuple[Callable[[], bool], Callable[[], None]]]:
    """Before torch 2.9: one setting for products, one for cuDNN."""
    undo: list[tuple[Callable[[], bool], Callable[[], None]]] = []
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if products != "highest":
        torch.set_float32_matmul_precision("highest")
        undo.append(
            (
                lambda: torch.get_float32_matmul_precision() == "highest",
                functools.partial(torch.set_float32_matmul_precision, products),
            )
        )
    if cudnn:
        torch.backends.cudnn.allow_tf32 = False

        def put_back() -> None:
            torch.backends.cudnn.allow_tf32 = True

        undo.append((lambda: not torch.backends.cudnn.allow_tf32, put_back))
    return undo
