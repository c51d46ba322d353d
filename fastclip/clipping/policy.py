"""The protocol of threshold policies: the state of the thresholds, and how noisy counts move it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from fastclip.core.checks import positive
from fastclip.errors import ArgumentError

SMALLEST = 1e-12
"""Smallest threshold. Squared norms near it underflow in float32."""
LARGEST = 1e30
"""Largest threshold. Multiples of it must stay finite in float32."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of one logical batch, float64 tensors on the device of the norms.

    They are public numbers and post-processing of noisy counts only, and never depend on raw data.
    """

    threshold: Tensor
    """Norms are compared with it. It is C, or Z of a global function; a scalar, [k] or [l]."""
    origin: Tensor
    """C_0 (or z), the argument of make_private. Thresholds of groups are multiples of it."""
    bound: Tensor | None = None
    """C of a global function, a scalar. None for the others, whose sensitivity is C itself."""
    weights: Tensor | None = None
    """Factors of the groups' scales, [k]. None if all are 1."""

    def to(self, device: torch.device) -> Thresholds:
        """Copy the thresholds to another device, without waiting on the host."""
        if self.threshold.device == device:
            return self
        return Thresholds(
            **{name: value.to(device, non_blocking=True) for name, value in self.tensors().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class ThresholdPolicy:
    """Sets C, and moves it once per logical batch from noisy counts, never from raw ones.

    This base class leaves C unchanged. The other policies are frozen dataclasses derived from it.
    """

    per_layer: ClassVar[bool] = False
    """One threshold per parameter tensor instead of one for the whole gradient."""
    num_groups: int | None = None
    """K, if samples belong to groups (engine.set_groups)."""
    count_noise_ratio: float | None = None
    """r = sigma_count / sigma_grad of the count queries. None if nothing is counted."""
    count_shape: tuple[int, ...] = ()
    """Shape of the counts."""
    count_sensitivity: float = 1.0
    """L2 distance by which one sample changes the vector of counts."""
    total_steps: int | None = None
    """Planned real steps of a policy that follows a plan."""
    same_step: bool = False
    """Whether a batch is clipped at thresholds from its own counts."""
    moves: bool = False
    """Whether the threshold changes during training."""

    def initial(self, value: float | Sequence[float], parameters: int) -> Thresholds:
        """Return the state at the first step, from make_private's max_grad_norm (or z)."""
        origin = torch.tensor(threshold(value), dtype=torch.float64, device="cpu")
        return Thresholds(self._spread(origin), origin)

    def _spread(self, origin: Tensor) -> Tensor:
        """Return the first thresholds, from C_0."""
        return origin

    def rescaled(self, state: Thresholds, value: float | Sequence[float]) -> Thresholds:
        """Return the state after the user has set max_grad_norm to `value`."""
        new = self.initial(value, state.origin.numel())
        return replace(new, weights=state.weights).to(state.threshold.device)

    def reading(self, state: Thresholds) -> Tensor:
        """Return the value of `optimizer.max_grad_norm`, a scalar."""
        return state.threshold

    def count(self, norms: Tensor, state: Thresholds, groups: Tensor | None) -> Tensor:
        """Return the raw counts of a physical batch, which are not private before noise is added.

        Args:
            norms: [b], NaN or inf for a sample that is not finite (counted as clipped).
            state: the thresholds of the logical batch.
            groups: int64 [b], -1 for a sample that does not count. None without groups.

        Returns:
            float64, of shape `count_shape`.
        """
        raise NotImplementedError

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        """Return the state after a real step, from noisy counts and public numbers only.

        Args:
            state: the thresholds of this step.
            noisy_counts: counts of the logical batch, or None if nothing is counted.
            batch_size: the public expected batch size B.
            step: the number of real steps before this one.
        """
        return state


def threshold(value: object, name: str = "max_grad_norm") -> float:
    """Return `value` as a threshold, or raise an error that names it."""
    number = positive(name, value)
    if not SMALLEST <= number <= LARGEST:
        raise ArgumentError(
            f"{name} expects a number from {SMALLEST} to {LARGEST} (the range of squared norms in "
            f"float32), got {value!r}. Scale the loss instead."
        )
    return number


def clamp(thresholds: Tensor, lower: float | None = None, upper: float | None = None) -> Tensor:
    """Limit thresholds to the user's bounds and those of float32."""
    return thresholds.clamp(min=lower or SMALLEST, max=upper or LARGEST)


def split_error(policy: str) -> str:
    """Return the message for a logical batch of a "same_step" policy that is split."""
    return (
        f'{policy} with thresholds="same_step" needs the norms of the whole logical batch before it '
        "clips, so the batch cannot be split into physical batches. Use "
        'thresholds="previous_step", or logical batches that fit in one physical batch.'
    )
