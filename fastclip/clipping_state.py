"""What moves while a strategy runs: its thresholds, its counts and the number of real steps.

Raw counts accumulate over the physical batches of a logical batch. They get their noise once, and
thresholds move once, in the real step; only policies that clip a batch at its own counts
("same_step") draw the noise of the counts when that batch is clipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastclip.accounting import NoiseLevels, remaining, split
from fastclip.clipping import Clipping, Thresholds
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from fastclip.noise import NoiseSource


class ClippingState:
    """State of one strategy in one run.

    Args:
        strategy: what it is the state of.
        max_grad_norm: C_0, a number, or a list for per-layer strategies.
        parameters: number of private parameter tensors.
    """

    def __init__(
        self, strategy: Clipping, max_grad_norm: float | Sequence[float], parameters: int
    ) -> None:
        self.strategy = strategy
        self.next = strategy.initial(max_grad_norm, parameters)
        """Thresholds of the next logical batch."""
        self.current = self.next
        """Those at which the current (or last) logical batch is clipped."""
        self.noisy_counts: Tensor | None = None
        """Of the last real step."""
        self.step = 0
        """Number of real steps so far."""
        self.noise = NoiseSource(0.0)
        self.expected_batch_size: float | None = None
        self._counts: Tensor | None = None
        """Raw counts of the logical batch so far. NOT private: never shown, never saved."""
        self._drawn: tuple[Tensor, float] | None = None
        """Noisy counts drawn ahead of the step ("same_step"), and their sigma_count."""
        self._groups: Tensor | None = None

    # Noise levels

    @property
    def noise_multiplier(self) -> float:
        """Total sigma of the next real step: sigma_1 times the schedule's factor."""
        return self.noise.multiplier * self.strategy.noise.factor(self.step)

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self.noise.multiplier = value / self.strategy.noise.factor(self.step)

    @property
    def levels(self) -> NoiseLevels:
        """How the next real step shares sigma between the gradients and the counts."""
        return split(self.noise_multiplier, self.strategy.threshold.count_noise_ratio)

    def gradient_noise(self) -> float:
        """sigma_grad of the step under way, given what its counts have already spent."""
        if self._drawn is not None:
            return remaining(self.noise_multiplier, self._drawn[1])
        return self.levels.gradients

    # Groups

    def set_groups(self, ids: Tensor, made_up: bool = False) -> None:
        """Groups of the rows of the next backward pass, int64 [b]; see `engine.set_groups`."""
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point():
            got = f"shape {tuple(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else repr(ids)
            raise ArgumentTypeError(
                f"set_groups expects the group of each row as an int64 tensor [b], got {got}"
            )
        groups = self.strategy.threshold.num_groups
        if groups is None:
            return
        ids = ids.detach().to(torch.int64)
        if ids.device.type == "cpu" and not made_up:
            wrong = ids[(ids < 0) | (ids >= groups)]
            if len(wrong):
                raise ArgumentError(
                    f"set_groups expects groups from 0 to {groups - 1} (num_groups={groups}), got "
                    f"{wrong[0].item()}; rows of no group need one of their own"
                )
        self._groups = ids.masked_fill((ids < 0) | (ids >= groups), -1)

    def _take_groups(self, rows: int, device: torch.device, made_up: bool) -> Tensor | None:
        """The groups of this pass, used up by it: a stale one must never serve another batch."""
        if self.strategy.threshold.num_groups is None:
            return None
        groups, self._groups = self._groups, None
        if made_up or not rows:
            return torch.full((rows,), -1, device=device)
        name = type(self.strategy.threshold).__name__
        if groups is None:
            raise StepError(
                f"clipping with {name} needs the group of every row: call engine.set_groups(ids), "
                "ids an int64 tensor [b], before each backward pass"
            )
        if len(groups) != rows:
            raise StepError(
                f"engine.set_groups got {len(groups)} groups for a backward pass of {rows} samples; "
                "call it with the ids of this very (physical) batch"
            )
        return groups.to(device, non_blocking=True)

    # One backward pass

    def clip(
        self, norm_sq: Tensor, layers: Tensor | None, *, fresh: bool, made_up: bool
    ) -> tuple[Tensor, Tensor]:
        """Scales of a physical batch, [b] (or [l, b] per layer), and its raw norms [b].

        Args:
            norm_sq: squared norms of the parameters that took part, [l, b].
            layers: their rows in a per-layer state, int64 [l].
            fresh: the first physical batch of its logical batch.
            made_up: its one row was invented: it is neither counted nor summed.
        """
        policy = self.strategy.threshold
        if policy.same_step and not fresh:
            raise StepError(split_refused(type(policy).__name__))
        norms = norm_sq.sum(0).sqrt()  # [b]
        groups = self._take_groups(len(norms), norms.device, made_up)
        self.next = self.next.to(norms.device)
        if fresh:
            self.current, self._counts, self._drawn = self.next, None, None
        if policy.count_noise_ratio is not None:
            counted = norms[:0] if made_up else norms
            members = groups[:0] if made_up and groups is not None else groups
            counts = policy.count(counted, self.current, members)
            self._counts = counts if self._counts is None else self._counts + counts
            if policy.same_step:
                self._draw_ahead()
        layer_norms = norm_sq.sqrt() if policy.per_layer else None
        scales = self.strategy.scales(norms, self.current, groups, layer_norms, layers)
        return (torch.zeros_like(scales) if made_up else scales), norms

    def _draw_ahead(self) -> None:
        """Noise on the counts of this batch now, and the thresholds that follow from them."""
        noisy = self._perturbed()
        self._drawn = noisy, self.levels.counts or 0.0
        assert self.expected_batch_size is not None
        self.current = self.strategy.threshold.move(
            self.next, noisy, self.expected_batch_size, self.step
        )

    def _perturbed(self) -> Tensor:
        policy = self.strategy.threshold
        assert self._counts is not None
        std = (self.levels.counts or 0.0) * policy.count_sensitivity
        return self.noise.perturb(self._counts, std)

    # Between passes

    def sensitivity(self) -> Tensor:
        """S of the sums as they were clipped (not as the thresholds are set now)."""
        return self.strategy.sensitivity(self.current)

    def discard(self) -> None:
        """The sums of the logical batch were cleared: so are its counts."""
        self._counts = self._drawn = None

    def release(self, accumulated: int) -> None:
        """A real step: noise on the counts, once, and the thresholds of the next logical batch.

        Args:
            accumulated: backward passes of full batches in the step; B counts for each.
        """
        policy = self.strategy.threshold
        if policy.count_noise_ratio is not None:
            self.noisy_counts = self._perturbed() if self._drawn is None else self._drawn[0]
        if not policy.same_step:
            size = (self.expected_batch_size or 0) * accumulated
            self.next = policy.move(self.next, self.noisy_counts, size, self.step)
        self._counts = self._drawn = None

    def advance(self) -> None:
        """The real step has been accounted; the schedule goes on."""
        self.step += 1

    # Checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """Thresholds, noisy counts and the step; None where nothing ever changes.

        Neither raw counts nor anything of the noise: no generator, no multiplier.
        """
        if self.strategy.constant:
            return None
        tensors = dict(self.next.tensors())
        if self.noisy_counts is not None:
            tensors["noisy_counts"] = self.noisy_counts
        return {"step": self.step} | {name: value.clone() for name, value in tensors.items()}

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from `state_dict`; takes effect at the next logical batch.

        Raises:
            ArgumentError: for the state of another strategy. Nothing is changed.
        """
        if saved is None:
            return
        if self.strategy.constant:
            warnings.warn(
                "the checkpoint holds thresholds of another strategy, which this constant one does "
                "not use",
                stacklevel=3,
            )
            return
        values = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
        counts = values.pop("noisy_counts", None)
        expected = self.next.tensors()
        shapes = {name: tuple(value.shape) for name, value in expected.items()}
        found = {name: tuple(value.shape) for name, value in values.items()}
        if found != shapes:
            raise ArgumentError(
                f"the checkpoint holds clipping thresholds {found}, this strategy expects {shapes}; "
                "load it into the strategy it was saved from"
            )
        if any(not bool(((v > 0) & torch.isfinite(v)).all()) for v in values.values()):
            raise ArgumentError("the checkpoint's thresholds expect positive finite numbers")
        device = self.next.threshold.device
        self.next = Thresholds(**{n: v.to(device, torch.float64) for n, v in values.items()})
        self.noisy_counts = None if counts is None else counts.to(device)
        self.step = int(saved["step"])


def split_refused(policy: str) -> str:
    """What is said where a logical batch of a "same_step" policy is split."""
    return (
        f'{policy} with thresholds="same_step" needs the norms of the whole logical batch before it '
        "clips, so the batch cannot be split into physical batches; use "
        'thresholds="previous_step" (the last step\'s noisy counts), or batches that fit in one'
    )
