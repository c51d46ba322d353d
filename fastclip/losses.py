"""Losses in which no sample depends on another.

The guarantee bounds the contribution of a sample through *its own* gradient. A loss that averages over
all tokens of a batch divides sample i's gradient by the token counts of the other samples before it is
clipped. See docs/losses.md.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastclip.errors import ArgumentError, ArgumentTypeError


def per_sample_cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, *, shift: bool = False,
    weight: Tensor | None = None, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the cross entropy of each sample over its own tokens, for a `.mean()` or `.sum()`.

    Args:
        logits: [b, t, k], or [b, k] for one label per sample. Computed in float32 at least.
        labels: int64 [b, t], or [b].
        ignore_index: labels that do not count (padding, prompts, unmasked tokens).
        shift: position t predicts the label at t + 1 (causal language models).
        weight: weight of each class, [k]. It multiplies a token's loss. Unlike the mean of
            CrossEntropyLoss(weight=...), the result is not divided by the weights of the batch.
        label_smoothing: as in torch.nn.functional.cross_entropy.

    Returns:
        [b], the mean over the sample's tokens that count. If none counts, 0 with gradient 0.

    Raises:
        ArgumentError, ArgumentTypeError: for shapes or types that do not fit.

    Formal guarantee: entry i and its gradient depend on sample i alone.
    """
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)):
        raise ArgumentTypeError(
            "per_sample_cross_entropy expects two tensors, got "
            f"{type(logits).__name__} and {type(labels).__name__}."
        )
    if labels.dim() == 0 or logits.shape[:-1] != labels.shape:
        raise ArgumentError(
            "per_sample_cross_entropy expects logits [b, t, k] and labels [b, t], or [b, k] and [b], "
            f"got {list(logits.shape)} and {list(labels.shape)}."
        )
    if labels.is_floating_point():
        raise ArgumentTypeError(
            f"per_sample_cross_entropy expects labels as class numbers, got {labels.dtype}."
        )
    if shift:
        if labels.dim() < 2:
            raise ArgumentError("shift=True expects labels of several positions, [b, t], got [b].")
        logits, labels = logits[:, :-1], labels[:, 1:]
    b, classes = len(labels), logits.shape[-1]
    if not logits.dtype.itemsize >= 4:
        logits = logits.float()
    if weight is not None:
        weight = weight.to(logits)
    losses = F.cross_entropy(
        logits.reshape(-1, classes), labels.reshape(-1).long(), weight, ignore_index=ignore_index,
        reduction="none", label_smoothing=label_smoothing,
    )  # fmt: skip
    counted = (labels != ignore_index).reshape(b, labels.numel() // b if b else 0)
    return losses.view(counted.shape).sum(1) / counted.sum(1).clamp(min=1)
