"""A CUDA graph's twin on a CPU: the operations of a capture, run again on the same memory.

No Python of the model, of the loss or of the engine runs in a replay, so each value that it held is
frozen, as in a graph. To look at a value is refused during a capture, as CUDA does, but for the one
look of the reference at scales that are 0 on a CPU: all are when the sums are captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

T = TypeVar("T")
_LOOKS = {"drop_zeroed", "looked_at"}


class Tape(TorchDispatchMode):
    """Hears of operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and not _allowed():
            raise RuntimeError("operation not permitted when stream is capturing")
        given = tree_map(_alias, (args, kwargs))  # some operations change a tensor's shape in place
        out = func(*args, **kwargs)
        self.operations.append((func, *given, tree_map(_alias, out)))
        return out

    def replay(self) -> None:
        """All of them, into the memory that they had written."""
        with torch.no_grad():
            for func, args, kwargs, out in self.operations:
                if func is torch.ops.aten._local_scalar_dense.default:
                    continue
                again = func(*tree_map(_alias, args), **tree_map(_alias, kwargs))
                for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _alias(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _allowed() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _LOOKS:
            return True
        frame = frame.f_back
    return False


class TapeRecorder:
    """Takes the place of CudaRecorder."""

    def __init__(self, device: torch.device) -> None:
        self.captures = 0

    def aside(self, work: Callable[[], T]) -> T:
        return work()

    def rehearse(self, work: Callable[[], T]) -> T:
        with Tape():
            return work()

    def capture(self, work: Callable[[], T]) -> tuple[Tape, T]:
        self.captures += 1
        with Tape() as tape:
            out = work()
        return tape, out

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)
