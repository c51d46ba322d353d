"""Random allocation: each sample is in a fixed number of batches of an epoch, at random steps."""

from __future__ import annotations

from dataclasses import dataclass

from fastclip.core.checks import keep, whole
from fastclip.errors import ArgumentError, StepError


@dataclass(frozen=True)
class RandomAllocation:
    """Sampling of one epoch: each sample is in exactly `times` of its `steps` batches.

    Every set of `times` steps is equally likely, independently of the other samples and of other
    epochs. Pass it instead of a sample rate anywhere in fastclip.accounting. One entry
    (sigma, RandomAllocation(t, k), n) of a history is n whole epochs of t steps each, and sigma is the
    least noise multiplier of their steps. An epoch counts in full, even if it was interrupted.

    It is deliberately not a number, so an accountant that does not support it fails.

    Args:
        steps: t, the number of batches of an epoch, at least 1.
        times: k, how many of them contain a given sample, from 1 to t.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, or of another type.
    """

    steps: int
    times: int = 1

    def __post_init__(self) -> None:
        keep(self, steps=whole("steps", self.steps, 1), times=whole("times", self.times, 1))
        if self.times > self.steps:
            raise ArgumentError(
                f"times expects at most steps={self.steps}, got {self.times}. A sample can be in each "
                "batch of an epoch once."
            )

    def __mul__(self, joined: object) -> RandomAllocation:
        """Return itself for one epoch. Opacus multiplies a rate by the batches of a step.

        Raises:
            StepError: for several sampled batches in one step, for which no accounting is known.
        """
        if type(joined) is not int:
            return NotImplemented
        if joined != 1:
            raise StepError(
                f"This step joins {joined} batches of a random allocation, and no accounting is known "
                "for that. Call optimizer.step() after every sampled batch.",
                doc="privacy-budget",
            )
        return self

    def blocks(self) -> dict[int, int]:
        """Return the blocks of steps of which each contains a sample once, {steps: blocks}.

        Formal guarantee: `times` of `steps` is at most as revealing as independent allocations to one
        step of each block. A uniformly random partition of the steps into blocks of these sizes, and
        one uniformly random step of each, is a uniformly random set of steps. Given the partition,
        which does not depend on the data, the epoch is a composition of the blocks. The divergences of
        neighbors are jointly convex, so the average over partitions is not larger.

        Source: Feldman and Shenfeld 2025 (arXiv 2502.08202).
        """
        size, larger = divmod(self.steps, self.times)
        found = {size: self.times - larger}
        return found | ({size + 1: larger} if larger else {})
