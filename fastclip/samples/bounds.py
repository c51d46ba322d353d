"""Numbers of rows out of bounds are an error of this run, not of the process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastclip._torch import TorchDispatchMode

_ROWS = ("aten::embedding", "aten::_embedding_bag")
_ALONG = (
    "aten::index_select", "aten::gather", "aten::scatter", "aten::scatter_add", "aten::index_add",
    "aten::index_copy", "aten::index_fill", "aten::scatter_reduce",
)  # fmt: skip
_EACH = ("aten::index", "aten::index_put", "aten::_index_put_impl")
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")


class InBounds(TorchDispatchMode):
    """Inside, numbers of rows are looked at first: a device would end the process for wrong ones.

    Raises:
        IndexError: they are out of bounds.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func._schema.name.rstrip("_")
        if name in _ROWS:
            _check(name, args[1], args[0].shape[0])
        elif name in _ALONG:
            _check(name, args[2], args[0].shape[args[1]] if args[0].dim() else 1)
        elif name in _EACH:
            for axis, x in enumerate(args[1]):
                if isinstance(x, Tensor) and x.dtype.itemsize != 1:  # masks
                    _check(name, x, args[0].shape[axis])
        elif name == "aten::take":
            _check(name, args[1], args[0].numel())
        elif name in _LOSSES:
            _check(name, args[1][args[1] != args[4]], args[0].shape[-1 if args[0].dim() < 3 else 1])
        return func(*args, **(kwargs or {}))


def _check(name: str, numbers: Tensor, size: int) -> None:
    if numbers.numel() and bool(((numbers < -size) | (numbers >= size)).any()):
        raise IndexError(f"{name}: numbers of rows are out of bounds")
