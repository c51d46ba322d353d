"""Per-sample recomputation, the fallback: the function's own backward, once per sample.

To get sample i's gradient, only its entries of the output's gradient are kept. This needs only the
sample of each entry. It costs one backward of the function per sample.

Random numbers are those of the first call: generators are restored. A function that is not torch's may
draw from other generators. So all of its outputs are compared with those of the first call, and the sum
of its per-sample gradients with the gradient of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip.rules.elementwise import flat_operands
from fastclip.rules.embedding import check_options
from fastclip.rules.records import KeptRecord
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward


Gradient = Callable[..., Any]
"""The same signature as torch.autograd.grad."""

_MOST_BYTES = 2**26
"""Bytes of the gradients of all samples together; larger ones are computed one sample at a time."""


class RecomputeUse(UseRule):
    """The function's own backward, for every sample."""

    name = "replay"
    routed = True
    keeps_output = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands:
        return flat_operands(name, args, kwargs)

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return [n for n, v in operands.items() if isinstance(v, Tensor) and n not in private]

    def records(self, use: UseBackward) -> None:
        wanted = [name for name in use.private if use.wants(name)]
        for name, own in zip(wanted, self._finite(use, wanted, use.sample_of_entry()), strict=True):
            use.record(name, KeptRecord(own))

    @staticmethod
    def _finite(use: UseBackward, wanted: list[str], owner: Tensor) -> list[Tensor]:
        """Returns per-sample gradients. Non-finite values of one sample do not affect the others.

        In a masked gradient, 0 times an infinite operand would be NaN for every sample.
        """
        if not use.batch:
            return [_zeros(use[name], 0) for name in wanted]
        found = _alone(use, wanted, owner, clean=False)
        lost = torch.stack([~torch.isfinite(x.reshape(len(x), -1)).all(1) for x in found]).any(0)
        if lost.device.type == "cpu" and not bool(lost.any()):
            return found
        clean = _alone(use, wanted, owner, clean=True)
        return [
            torch.where(lost.view(-1, *[1] * (x.dim() - 1)), y, x)
            for x, y in zip(found, clean, strict=True)
        ]


def _alone(use: UseBackward, wanted: list[str], owner: Tensor, *, clean: bool) -> list[Tensor]:
    leaves = [use[name].detach().requires_grad_() for name in wanted]
    out = use.replay(dict(zip(wanted, leaves, strict=True)), clean=clean)
    if not out.requires_grad:  # no derivative (a number drawn with a probability)
        return [_zeros(leaf, use.batch) for leaf in leaves]
    g = use.g.to(out.dtype)
    with use.backwards() as gradient:
        found = _each(gradient, out, leaves, g, owner, use.batch)
        if use.is_of_torch:
            return found
        whole = gradient(out, leaves, g, retain_graph=True, allow_unused=True)
    return use.compared(found, whole, clean=clean)


def _each(
    gradient: Gradient, out: Tensor, leaves: list[Tensor], g: Tensor, owner: Tensor, b: int
) -> list[Tensor]:
    if b * g.numel() * g.element_size() <= _MOST_BYTES:
        samples = torch.arange(b, dtype=owner.dtype, device=owner.device)
        mine = owner[None] == samples.view(b, *[1] * owner.dim())
        try:
            found = gradient(
                out, leaves, torch.where(mine, g, 0.0), retain_graph=True, is_grads_batched=True,
                allow_unused=True,
            )  # fmt: skip
            return [
                _zeros(leaf, b) if x is None else x for x, leaf in zip(found, leaves, strict=True)
            ]
        except RuntimeError:  # a backward that cannot be batched
            pass
    rows = []
    for i in range(b):
        own = torch.where(owner == i, g, 0.0)
        found = gradient(out, leaves, own, retain_graph=True, allow_unused=True)
        rows.append(
            [_zeros(x) if f is None else _dense(f) for x, f in zip(leaves, found, strict=True)]
        )
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _zeros(like: Tensor, *rows: int) -> Tensor:
    return _dense(like).new_zeros(*rows, *like.shape)


def _dense(x: Tensor) -> Tensor:
    """Returns a gradient or operand as dense: autograd gives sparse gradients of sparse operands."""
    return x if x.layout == torch.strided else x.to_dense()


# -------------------------------------------------------------------------------------------------
# Sums of rows of a table: F.embedding_bag and torch.embedding_bag, recomputed like any function.


_BAG = ("ids", "table", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
_TORCHS_BAG = ("table", "ids", "offsets", "scale_grad_by_freq", "mode", "sparse")


@register_use("embedding_bag")
class BagUse(RecomputeUse):
    """Sums of such entries, whose gradients depend only on their own bag."""

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands:
        whole = args and isinstance(args[0], Tensor) and not args[0].is_floating_point()
        names = _BAG if whole or "input" in kwargs else _TORCHS_BAG  # of F, or of torch itself
        check_options(name, {**dict(zip(names, args, strict=False)), **kwargs})
        return super().bind(name, args, kwargs)
