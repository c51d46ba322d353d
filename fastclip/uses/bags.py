"""Sums of rows of a table: F.embedding_bag and torch.embedding_bag, replayed like any other function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastclip.uses.lookup import check_options
from fastclip.uses.replay import ReplayUse
from fastclip.uses.rule import Operands, register_use

_BAG = ("ids", "table", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
_TORCHS_BAG = ("table", "ids", "offsets", "scale_grad_by_freq", "mode", "sparse")


@register_use("embedding_bag")
class BagUse(ReplayUse):
    """Sums of such entries, whose gradients follow from their own bag alone."""

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands:
        whole = args and isinstance(args[0], Tensor) and not args[0].is_floating_point()
        names = _BAG if whole or "input" in kwargs else _TORCHS_BAG  # of F, or of torch itself
        check_options(name, {**dict(zip(names, args, strict=False)), **kwargs})
        return super().bind(name, args, kwargs)
