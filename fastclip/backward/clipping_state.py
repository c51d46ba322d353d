"""What moves while a strategy runs: its thresholds, its counts and the number of real steps.

Raw counts accumulate over the physical batches of a logical batch. They get their noise once, and
thresholds move once, in the real step; only policies that clip a batch at its own counts
("same_step") draw the noise of the counts when that batch is clipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.accounting import NoiseLevels, remaining, split
from fastclip.accounting.epsilon import multiplier
from fastclip.clipping import Clipping, Thresholds
from fastclip.clipping.contract import check_contract
from fastclip.clipping.policy import LARGEST, SMALLEST, split_error
from fastclip.clipping.strategy import in_words
from fastclip.core.checks import whole
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError, say
from fastclip.ops.noise import NoiseSource, SeededNoise
from fastclip.ops.units import UnitSamples


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
        check_contract(strategy, self.next)
        self.current = self.next
        """Those at which the current (or last) logical batch is clipped."""
        self.paid = self.next
        """Those of the last real step; later ones may follow from counts not yet accounted for."""
        self.noisy_counts: Tensor | None = None
        """Of the last real step."""
        self.step = 0
        """Number of real steps so far."""
        self.noise: NoiseSource = SeededNoise()
        """Source of all noise of the run."""
        self.first_multiplier = 0.0
        """sigma_1, of which a schedule takes its share in every step."""
        self.expected_batch_size: float | None = None
        self._counts: Tensor | None = None
        """Raw counts of the logical batch so far. NOT private: never shown, never saved."""
        self._drawn: tuple[Tensor, float] | None = None
        """Noisy counts from before the step ("same_step"), and their sigma_count."""
        self._groups: Tensor | None = None
        self.ranks: Ranks | None = None
        """The ranks that train the same model on other samples; their counts are added up."""

    # Noise levels

    @property
    def noise_multiplier(self) -> float:
        """Total sigma of the next real step: sigma_1 times the schedule's factor."""
        return self.first_multiplier * self.strategy.noise.factor(self.step)

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        sigma = multiplier("noise_multiplier", value)
        self.first_multiplier = sigma / self.strategy.noise.factor(self.step)

    @property
    def levels(self) -> NoiseLevels:
        """How the next real step shares sigma between the gradients and the counts."""
        return split(self.noise_multiplier, self.strategy.threshold.count_noise_ratio)

    def gradient_noise(self) -> float:
        """sigma_grad of the step under way, given what its counts have already spent."""
        if self._drawn is not None:
            return remaining(self.noise_multiplier, self._drawn[1])
        return self.levels.gradients

    # Thresholds

    @property
    def max_grad_norm(self) -> float:
        """C of the next logical batch: of layers the norm of the thresholds, of groups C_0."""
        return float(self.strategy.max_grad_norm(self.next))

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | Sequence[float]) -> None:
        self.next = self.strategy.rescaled(self.next, value)

    @property
    def max_grad_norms(self) -> list[float]:
        """One per layer."""
        return self.next.threshold.reshape(-1).tolist()

    # Groups

    def set_groups(self, ids: Tensor, placeholder: bool = False) -> None:
        """Groups of the samples of the next backward pass, int64 [b]; see `engine.set_groups`."""
        if (
            not isinstance(ids, Tensor) or ids.dim() != 1 or ids.layout != torch.strided
            or ids.is_floating_point() or ids.is_complex()
        ):  # fmt: skip
            got = f"{ids.dtype}, {(*ids.shape,)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentTypeError(
                f"set_groups expects the group of each sample as an int64 tensor [b], got {got}."
            )
        groups = self.strategy.threshold.num_groups
        if groups is None:
            return
        ids = ids.detach().to(torch.int64)
        outside = (ids < 0) | (ids >= groups)
        if ids.device.type == "cpu" and not placeholder and bool(outside.any()):
            raise ArgumentError(
                f"set_groups expects groups from 0 to {groups - 1} (num_groups={groups}), got "
                "values outside. Give samples of no group a group of their own.",
                doc="groups",
            )
        self._groups = ids.masked_fill(outside, -1)

    def by_parts(self, sizes: list[int]) -> Iterator[int]:
        """The number of each part of a batch, while the groups that were set are those of the part."""
        groups = None if len(sizes) == 1 else self._groups
        if groups is not None and len(groups) != sum(sizes):
            raise StepError(
                f"engine.set_groups got {len(groups)} groups for {sum(sizes)} samples. Pass the group "
                "of every sample of this batch.",
                doc="groups",
            )
        parts = groups.split(sizes) if groups is not None else [self._groups] * len(sizes)
        for number, self._groups in enumerate(parts):
            yield number

    def _take_groups(
        self, samples: int, device: torch.device, placeholder: bool, units: UnitSamples | None
    ) -> Tensor | None:
        """The groups of this pass, used up by it: stale groups are never used for another batch."""
        if self.strategy.threshold.num_groups is None:
            return None
        groups, self._groups = self._groups, None
        if placeholder or not samples:
            return torch.full((samples,), -1, dtype=torch.int64, device=device)
        name = type(self.strategy.threshold).__name__
        if groups is None:
            raise StepError(
                f"Clipping with {name} needs the group of every sample. Call engine.set_groups(ids), "
                "with ids an int64 tensor [b], before each backward pass.",
                doc="groups",
            )
        expected = samples if units is None else len(units)
        if units is not None and len(groups) * units.views == expected:  # of samples, not of views
            groups = groups.repeat_interleave(units.views)
        if len(groups) != expected:
            raise StepError(
                f"engine.set_groups got {len(groups)} groups for a backward pass of {expected} "
                "samples. Call it with the groups of this physical batch.",
                doc="groups",
            )
        groups = groups.to(device, non_blocking=True)
        return groups if units is None else groups.index_select(0, units.firsts(device))

    # One backward pass

    def clip(
        self, norm_sq: Tensor, layers: Tensor | None, *, fresh: bool, placeholder: bool,
        units: UnitSamples | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Scales of a physical batch, [b] (or [l, b] per layer), and its raw norms [b].

        Args:
            norm_sq: squared norms of the parameters that took part, [l, b].
            layers: their rows in a per-layer state, int64 [l].
            fresh: the first physical batch of its logical batch.
            placeholder: its one sample stands for an empty sampled batch, neither counted nor summed.
            units: if samples are clipped by units, b of them. A unit is in the group of its first
                sample.
        """
        policy = self.strategy.threshold
        if policy.same_step and not fresh:
            raise StepError(split_error(type(policy).__name__))
        device, samples = norm_sq.device, norm_sq.shape[1]
        groups = self._take_groups(samples, device, placeholder, units)
        self.next = self.next.to(device)
        state, counts, drawn = self.next if fresh else self.current, self._counts, self._drawn
        counted = policy.count_noise_ratio is not None and not placeholder
        if counted:  # if a launch fails, the old ones are unchanged
            counts = self._no_counts() if counts is None else counts.clone()
        scaled = partial(ops.clip_scale, norm_sq, self.strategy)
        scales, norms = scaled(state, groups, layers, counts if counted else None)
        if policy.same_step:  # noise on the counts of this batch now, and what follows from them
            assert self.expected_batch_size is not None
            spent = self.levels.counts or 0.0
            noisy, state = self._stepped(counts, self.expected_batch_size)
            drawn = noisy, spent
            scales, _ = scaled(state, groups, layers, None)
        self.current, self._counts, self._drawn = state, counts, drawn
        return (torch.zeros_like(scales) if placeholder else scales), norms

    def _no_counts(self) -> Tensor:
        shape, device = self.strategy.threshold.count_shape, self.next.threshold.device
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def _stepped(self, counts: Tensor | None, batch_size: float) -> tuple[Tensor, Thresholds]:
        """Noisy counts, and the thresholds they lead to."""
        policy = self.strategy.threshold
        if counts is None:  # only placeholder samples
            counts = self._no_counts()
        if self.ranks is not None:
            counts = self.ranks.total(counts)
        std = (self.levels.counts or 0.0) * policy.count_sensitivity
        noise = self.noise.draw(counts, std)
        found = ops.threshold_step(counts, noise, policy, self.next, batch_size, self.step)
        return found if self.ranks is None else self._of_first(*found)

    def _of_first(self, noisy: Tensor, moved: Thresholds) -> tuple[Tensor, Thresholds]:
        """The first rank's noisy counts and new thresholds, bit for bit on all ranks."""
        assert self.ranks is not None
        noisy, *values = self.ranks.of_first([noisy, *moved.tensors().values()])
        return noisy, Thresholds(**dict(zip(moved.tensors(), values, strict=True)))

    # Between passes

    def sensitivity(self) -> Tensor:
        """S of the sums as they were clipped (not as the thresholds are set now)."""
        return self.strategy.sensitivity(self.current)

    def discard(self) -> None:
        """Clear the counts of the logical batch, and what follows from them, as its sums are."""
        self._counts = self._drawn = None
        self.current = self.paid

    def release(self, accumulated: int) -> None:
        """A real step: noise on the counts, once, and the thresholds of the next logical batch.

        Args:
            accumulated: backward passes of full batches in the step; B counts for each.
        """
        policy = self.strategy.threshold
        size = (self.expected_batch_size or 0) * accumulated
        if policy.count_noise_ratio is None:
            self.next = policy.move(self.next, None, size, self.step)
        elif self._drawn is not None:
            self.noisy_counts = self._drawn[0]
        else:
            self.noisy_counts, self.next = self._stepped(self._counts, size)
        self.paid = self.current
        self._counts = self._drawn = self._groups = None

    def advance(self) -> None:
        """Advance the schedule: the real step has been accounted for."""
        self.step += 1

    def snapshot(self) -> tuple[Any, ...]:
        """What `release` changes, for `restore` if the step turns out not to be accounted."""
        return self.next, self.paid, self.noisy_counts, self._groups

    def restore(self, before: tuple[Any, ...]) -> None:
        """Undo `release`: nothing of the step is shown, or moves a threshold."""
        self.next, self.paid, self.noisy_counts, self._groups = before
        self.discard()

    def __getstate__(self) -> dict[str, Any]:
        """Omit raw counts, groups and thresholds that are not accounted for from copies and pickles."""
        left = dict.fromkeys(("_counts", "_drawn", "_groups", "ranks"))
        return {**self.__dict__, **left, "current": self.paid}

    # Checkpoints

    def state_dict(self) -> dict[str, Any] | None:
        """Thresholds, noisy counts and the step; None if the strategy is constant.

        Neither raw counts nor anything of the noise: no generator, no multiplier.
        """
        if self.strategy.constant:
            return None
        tensors = dict(self.next.tensors())
        if self.noisy_counts is not None:
            tensors["noisy_counts"] = self.noisy_counts
        saved: dict[str, Any] = {"strategy": self.strategy.kind, "step": self.step}
        return saved | {name: value.clone() for name, value in tensors.items()}

    def load_state_dict(self, saved: Mapping[str, Any] | None, fresh: bool) -> None:
        """Continue from `state_dict` at the next logical batch; `fresh`: none is under way.

        Raises:
            ArgumentError: for the state of another strategy. Nothing is changed.
        """
        if self.strategy.constant or saved is None:
            if (saved is None) != self.strategy.constant:
                held = "no" if saved is None else "another strategy's"
                say(
                    f"The checkpoint holds {held} state of a clipping strategy, so this strategy "
                    f"({in_words(self.strategy.kind)}) keeps its current state. Load the checkpoint "
                    "into the strategy that it was saved from.",
                    doc="checkpoints",
                )
            return
        values = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
        counts = values.pop("noisy_counts", None)
        shapes = {name: tuple(value.shape) for name, value in self.next.tensors().items()}
        found = {name: tuple(value.shape) for name, value in values.items()}
        own = self.strategy.kind
        kind = saved.get("strategy", own)
        if found != shapes or kind != own:
            raise ArgumentError(
                f"The checkpoint holds the state of {in_words(str(kind))} with {found}, but this "
                f"strategy is {in_words(own)} with {shapes}. Load it into the strategy that it was "
                "saved from.",
                doc="checkpoints",
            )
        if any(not bool(((v >= SMALLEST) & (v <= LARGEST)).all()) for v in values.values()):
            raise ArgumentError(
                f"The checkpoint's thresholds are outside the range from {SMALLEST} to {LARGEST}. "
                "Load a checkpoint that is not damaged.",
                doc="checkpoints",
            )
        self.step = whole("The checkpoint's step", saved.get("step", 0), 0)
        device = self.next.threshold.device
        values = {n: v.to(device, torch.float64, copy=True) for n, v in values.items()}
        self.next = Thresholds(**values)
        if fresh:
            self.current = self.paid = self.next
        self.noisy_counts = None if counts is None else counts.to(device, copy=True)
