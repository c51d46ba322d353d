"""What a threshold policy is: the state of the thresholds, and how noisy counts move it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from fastclip.core.checks import positive
from fastclip.errors import ArgumentError

SMALLEST = 1e-12
"""Of a threshold: squared norms near it underflow in float32."""
LARGEST = 1e30
"""Of a threshold: multiples of it must stay finite in float32."""


@dataclass(frozen=True)
class Thresholds:
    """What one logical batch is clipped at: float64 tensors, on the device of the norms.

    It holds public numbers and noisy counts' post-processing only, never anything of raw data.
    """

    threshold: Tensor
    """What norms are compared with: C, or Z of a global function. A scalar, [k] or [l]."""
    origin: Tensor
    """C_0 (or z): what make_private was given, and thresholds of groups are multiples of."""
    bound: Tensor | None = None
    """C of a global function, a scalar; None for the others, whose sensitivity is C itself."""
    weights: Tensor | None = None
    """Factors of the groups' scales, [k]; None where all are 1."""

    def to(self, device: torch.device) -> Thresholds:
        """On another device; the host does not wait."""
        if self.threshold.device == device:
            return self
        return Thresholds(
            **{name: value.to(device, non_blocking=True) for name, value in self.tensors().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class ThresholdPolicy:
    """How C is set, and moved once a logical batch from noisy counts, never from raw ones.

    This class is the policy that does nothing; the others are frozen dataclasses that say more.
    """

    per_layer: ClassVar[bool] = False
    """One threshold a parameter tensor instead of one for the whole gradient."""
    num_groups: int | None = None
    """K, where samples belong to groups (engine.set_groups)."""
    count_noise_ratio: float | None = None
    """r = sigma_count / sigma_grad of the count queries; None where nothing is counted."""
    count_shape: tuple[int, ...] = ()
    """Shape of the counts."""
    count_sensitivity: float = 1.0
    """L2 distance by which one sample changes the vector of counts."""
    total_steps: int | None = None
    """Planned real steps of a policy that follows a plan."""
    same_step: bool = False
    """Thresholds come from the counts of the very batch that is clipped at them."""
    moves: bool = False
    """The threshold changes while training runs."""

    def initial(self, value: float | Sequence[float], parameters: int) -> Thresholds:
        """The state at the first step, from make_private's max_grad_norm (or z)."""
        origin = torch.tensor(threshold(value), dtype=torch.float64, device="cpu")
        return Thresholds(self._spread(origin), origin)

    def _spread(self, origin: Tensor) -> Tensor:
        """The first thresholds, from C_0."""
        return origin

    def rescaled(self, state: Thresholds, value: float | Sequence[float]) -> Thresholds:
        """The state after the user has set max_grad_norm to `value`."""
        new = self.initial(value, state.origin.numel())
        return replace(new, weights=state.weights).to(state.threshold.device)

    def reading(self, state: Thresholds) -> Tensor:
        """What `optimizer.max_grad_norm` shows, a scalar."""
        return state.threshold

    def count(self, norms: Tensor, state: Thresholds, groups: Tensor | None) -> Tensor:
        """Raw counts of a physical batch: not private before noise is added.

        Args:
            norms: [b], NaN or inf for a sample that is not finite (counted as clipped).
            groups: int64 [b], -1 for a sample that does not count; None without groups.
        """
        raise NotImplementedError

    def move(
        self, state: Thresholds, noisy_counts: Tensor | None, batch_size: float, step: int
    ) -> Thresholds:
        """The state after a real step: post-processing of noisy counts and public numbers.

        Args:
            noisy_counts: of the logical batch.
            batch_size: the public expected one, B.
            step: the number of real steps before this one.
        """
        return state


def threshold(value: object, name: str = "max_grad_norm") -> float:
    """`value` as a threshold, or an error that names it."""
    number = positive(name, value)
    if not SMALLEST <= number <= LARGEST:
        raise ArgumentError(
            f"{name} expects a number from {SMALLEST} to {LARGEST} (the range of squared norms in "
            f"float32), got {value!r}. Scale the loss instead."
        )
    return number


def clamp(thresholds: Tensor, lower: float | None = None, upper: float | None = None) -> Tensor:
    """Thresholds within the user's bounds and those of float32."""
    return thresholds.clamp(min=lower or SMALLEST, max=upper or LARGEST)


def split_error(policy: str) -> str:
    """What is said where a logical batch of a "same_step" policy is split."""
    return (
        f'{policy} with thresholds="same_step" needs the norms of the whole logical batch before it '
        "clips, so the batch cannot be split into physical batches. Use "
        'thresholds="previous_step", or logical batches that fit in one physical batch.'
    )
