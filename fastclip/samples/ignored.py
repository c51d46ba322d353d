"""Labels that count for nothing, and the first that counts: where a loss is divided by how many do, the
labels of a first batch may hide it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastclip._torch import TorchDispatchMode, tree_leaves
from fastclip.samples.selected import Shorter, counts

IGNORED = -100
"""The label that losses of torch leave out."""
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_BY_NUMBER = (
    "aten::embedding", "aten::_embedding_bag", "aten::index", "aten::index_put", "aten::index_select",
    "aten::gather", "aten::scatter", "aten::scatter_add", "aten::take", *_LOSSES,
)  # fmt: skip


def labels(inputs: list[Any]) -> list[Shorter]:
    """Whole numbers may be labels that are left out; masks and labels of nothing but 0 may hold a 1.

    Args:
        inputs: of the model; None for those without rows.
    """
    found = []
    for number, x in enumerate(inputs):
        if not isinstance(x, Tensor) or not x.numel() or not counts(x):
            continue
        if x.dtype in (torch.int64, torch.int32):
            found.append(Shorter(IGNORED, number))
        if not bool((x != 0).any()):
            found.append(Shorter(1, number))
    return found


class Numbers(TorchDispatchMode):
    """Inside, a label that is left out is no number of a row: a device would end the process for it.

    Raises:
        IndexError: it is used as one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func._schema.name
        if name.rstrip("_") in _BY_NUMBER and not (name in _LOSSES and args[4] == IGNORED):
            for x in tree_leaves(args):
                whole = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
                if whole and bool((x == IGNORED).any()):
                    raise IndexError(f"{name}: {IGNORED} is no number of a row")
        return func(*args, **(kwargs or {}))
