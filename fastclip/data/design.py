"""The sampling design of a run, and what the accountant records of its steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.calibration import in_passes
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Entry, Protected, Rate, TruncatedPoisson, runs
from fastclip.clipping.schedules import NoiseSchedule
from fastclip.core.checks import between
from fastclip.data.draws import SampledBatches
from fastclip.data.samplers import Canaries
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError, say

POISSON = "Poisson"
"""Every unit is in a sampled batch independently of all others."""
TRUNCATED = "truncated Poisson"
"""Poisson sampling, and a batch of more than max_batch_size units is cut to a random subset."""
ALLOCATED = "random allocation"
"""Every unit is in one batch of a pass, or in k, chosen uniformly and independently of all others."""
CYCLIC = "cyclic Poisson"
"""Poisson sampling from one of b groups of units, in turn."""
SHUFFLED = "shuffled"
"""A random order, cut into batches. No unit is drawn independently of the others."""
GIVEN_ORDER = "given order"
"""An order that fastclip does not draw, from the loader's own sampler, a sequence or a list."""
STREAM = "stream"
"""It is unknown which samples come, and how often in a pass. The source is an IterableDataset, or a
user's Poisson sampler."""

ENDLESS = sys.maxsize
"""Number of batches in a pass over a stream without a length. No run has as many."""


def epochs_of(steps: int, a_pass: int) -> float:
    """Number of epochs for which `steps` steps are planned, if a pass has `a_pass` steps.

    `steps / a_pass` may be one step too long, by rounding (7 / 25 of 25 steps are 8).
    """
    return max(0.0, (steps - 0.5) / a_pass)


@dataclass(frozen=True)
class SamplingDesign:
    """How the samples of a step are drawn.

    Privacy is stated for privacy units. A unit is a sample, or several samples (of a patient).

    Formal guarantee: if `poisson`, every unit is in a sampled batch independently of all others and of
    earlier batches, with a probability of at most `rate` (`rates[i]` for unit i). If `public`, neither
    `rate` nor `expected_batch_size` depends on the number of units, and neighbors may differ in one unit
    that was added or removed. Otherwise both depend on that number. Neighbors are then data sets of the
    same, public number, one unit of which contributes nothing (zero-out). Truncated batches are those of
    "Tighter Privacy Analysis for Truncated Poisson Sampling" (arXiv 2508.15089), Poisson batches that
    are cut to a uniformly random subset. Their privacy cost depends on `units`, too. If the sampler is
    ALLOCATED, every unit is in exactly `times` of the `steps` batches of a pass, chosen uniformly and
    independently of all others and of other passes. If the sampler is CYCLIC, a unit is in every
    `groups`-th batch of a pass with probability `rate`, as if `poisson`, and in no other one.
    """

    sampler: str
    """POISSON, TRUNCATED, ALLOCATED, CYCLIC, SHUFFLED, GIVEN_ORDER or STREAM."""
    rate: float
    """q, the largest probability to be in a batch: 1 / steps in an order, times / steps if ALLOCATED."""
    expected_batch_size: float
    """B, the divisor of the noisy sums, in units."""
    steps: int
    """Batches in one pass over the data. ENDLESS for a stream without a length."""
    units: int
    """N, the number of units that may be drawn. 0 for a stream without a length."""
    rates: Tensor | None = field(default=None, compare=False)
    """Probability of each sample, float64 [n], if they differ."""
    public: bool = False
    """q and B were given. Neither depends on N."""
    max_batch_size: int | None = None
    """Largest number of units in a truncated batch."""
    unit: str = "row"
    """The privacy unit, drawn and clipped as one: "row" (a sample), or "unit" of several samples."""
    max_samples_per_unit: int | None = None
    """Largest number of samples of a unit in one batch, chosen anew each time."""
    unit_reduction: str | None = None
    """A unit's gradient is the "mean" or the "sum" of its samples' gradients."""
    secure: bool = False
    """Drawn from cryptographic randomness."""
    readers: int = 1
    """Number of workers that read a stream in parallel. Each may bring every sample."""
    times: int = 1
    """Number of batches of a pass that a unit is in, if ALLOCATED."""
    groups: int = 1
    """Number of groups of units, if CYCLIC."""
    canaries: Canaries | None = None
    """Samples of an audit that are in the data set."""

    @property
    def protected(self) -> Protected:
        """Whom the steps protect. N is secret if q and B were given and no batch is truncated.

        The privacy cost of truncated batches depends on N.
        """
        return Protected(frozenset({self.unit}), self.public and self.max_batch_size is None)

    @property
    def poisson(self) -> bool:
        """Whether units are drawn independently. Amplification by sampling holds then."""
        return self.sampler in (POISSON, TRUNCATED)

    @property
    def recorded_steps(self) -> int:
        """Number of steps that are recorded as one: a pass, b, or 1 if a unit may be in every step."""
        if self.sampler == CYCLIC:
            return self.groups
        return self.steps if self.sampler in (ALLOCATED, SHUFFLED, GIVEN_ORDER) else 1

    def described(self) -> str:
        """Describes the design, with all rates, to compare it with another process' design."""
        rates = None if self.rates is None else hash(tuple(self.rates.tolist()))
        return f"{replace(self, rates=None)}, rates {rates}"

    def steps_in(self, epochs: float) -> int:
        """Number of steps in `epochs` passes. It is `steps_of(rate, epochs)` if a pass has 1 / q steps.

        Raises:
            ArgumentError: a stream has no length.
        """
        if self.steps == ENDLESS:
            raise ArgumentError(
                "epochs expects a data set with a length, got an IterableDataset without one. Give it a "
                "__len__, or pass noise_multiplier to make_private."
            )
        return in_passes(self.steps, epochs)


# -------------------------------------------------------------------------------------------------
# Streams that are read in parallel. Each worker of a loader reads an IterableDataset of its own.


SHARDED = "sharded_by_worker"
"""Attribute of a data set. True states that no two workers bring the same sample."""
TWICE = (
    "This step joins {joined} batches of a stream that {readers} workers read in parallel, so a sample "
    "may be in it {most} times. Call optimizer.step() after every batch, or set "
    f"{SHARDED} = True if the workers share the samples out."
)


def readers_of(loader: DataLoader) -> int:
    """Number of times that a pass may bring a sample of a stream. 1 for other data sets."""
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset) or _sharded(dataset):
        return 1
    return max(1, loader.num_workers)


def _sharded(dataset: Any) -> bool:
    if isinstance(dataset, ChainDataset):
        return all(_sharded(each) for each in dataset.datasets)
    if type(dataset).__module__.startswith("datasets."):  # each worker reads files of its own there
        return True
    return getattr(dataset, SHARDED, False) is True


# -------------------------------------------------------------------------------------------------
# What an accountant records of steps of one sampling design.


def accounted_rate(design: SamplingDesign) -> Rate:
    """Returns what an accountant records as the rate of `recorded_steps` steps.

    It is q of Poisson sampling, the law of truncated batches or of a random allocation, or else 1.
    """
    if design.max_batch_size is not None:
        return TruncatedPoisson(design.rate, design.units, design.max_batch_size)
    if design.sampler == ALLOCATED:
        return RandomAllocation(design.steps, design.times)
    return design.rate if design.sampler in (POISSON, CYCLIC) else 1.0


def planned_history(
    design: SamplingDesign, schedule: NoiseSchedule, noise_multiplier: float, epochs: float
) -> list[Entry]:
    """Returns what an accountant holds after `epochs` passes.

    Args:
        design: the sampling design.
        schedule: schedule of the noise.
        noise_multiplier: sigma_1, of the first step.

    Returns:
        (sigma, q, steps) in order, as `Releases` records it.
    """
    stages = schedule.runs(design.steps_in(epochs))
    if design.recorded_steps == 1:  # there may be many steps
        rate = accounted_rate(design)
        return runs((noise_multiplier * factor, rate, length) for factor, length in stages)
    return records(design, [noise_multiplier * f for f, length in stages for _ in range(length)])


def records(design: SamplingDesign, sigmas: Sequence[float]) -> list[Entry]:
    """Returns what an accountant holds after steps of these noise multipliers.

    Args:
        sigmas: noise multipliers of the steps, in order. The first begins a pass over the data.
    """
    rate, length = accounted_rate(design), design.recorded_steps
    starts = range(0, len(sigmas), length)
    return runs((min(sigmas[start : start + length]), rate, 1) for start in starts)


@dataclass(frozen=True)
class AsPlanned:
    """A noise schedule whose stages are the accountant's records, as in `planned_history`."""

    design: SamplingDesign
    schedule: NoiseSchedule
    epochs: float

    def factor(self, step: int) -> float:
        """Factor of the noise in a step."""
        return self.schedule.factor(step)

    def runs(self, length: int) -> list[tuple[float, int]]:
        """Returns (factor, number of records) of the whole run, which must have `length` records."""
        entries = planned_history(self.design, self.schedule, 1.0, self.epochs)
        assert sum(count for *_, count in entries) == length
        return [(factor, count) for factor, _, count in entries]


class Releases:
    """Records each real step of one model, according to how its samples were drawn.

    Formal guarantee: Poisson steps are subsampled Gaussian mechanisms at the design's rate. In a
    shuffled or given order a sample is in one step of each pass, and its content does not influence
    which one. For neighbors in which a sample is zeroed out, a pass is therefore one Gaussian mechanism
    of q = 1 with the noise of that step (parallel composition). It is recorded before its first step, at
    the least noise that the schedule has in the pass. Noise that falls further is recorded as another
    pass. A random allocation is recorded in the same way, and so is each turn of a CYCLIC sampler
    through its groups. If a pass ends early, what was released is post-processing of the whole. A step
    that may hold samples of another step of the pass (`Pace`) is a mechanism of its own. So is every
    step on a stream, and every step on batches of an unknown source, whose noise multiplier is divided
    by their number (`UnknownPasses`).

    Args:
        design: the sampling design.
        draws: the sampled batches of the loader.
        accountant: returns the ledger that records a step.
        ranks: the ranks that take each step together. None: one process.
    """

    def __init__(
        self, design: SamplingDesign, draws: SampledBatches, accountant: Callable[[], Ledger],
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.design, self.draws, self._accountant = design, draws, accountant
        self._of_ranks = ranks is not None
        self._rate: Any = accounted_rate(design)
        self._amplified = design.poisson or design.sampler in (ALLOCATED, CYCLIC)
        self._taken: Counter[float] = Counter()
        """Number of steps of one Poisson batch each, by noise multiplier."""
        self.steps = 0
        """Number of recorded steps of this model."""
        self.valid_until_release: list[Path] = []
        """Files that would repeat batches after the next step, and are deleted before it."""
        self.planned: int | None = None
        """Number of steps of the ledger that a budget covers, counts and the steps of a checkpoint
        included. None: there is no budget, or a step has passed it."""

    @property
    def ledger(self) -> Ledger:
        """The ledger that records steps from now on."""
        return self._accountant()

    def __call__(self, optimizer: DPOptimizer) -> None:
        """Records a step that is about to be released, and warns of the first one beyond the plan.

        Raises:
            fastclip.errors.*: as `_record`. Nothing is released.
        """
        while self.valid_until_release:
            self.valid_until_release.pop().unlink(missing_ok=True)
        self._record(optimizer)
        if self.planned is None:
            return
        if self.ledger.total > self.planned:
            say(
                "This run takes more steps than planned for target_epsilon, so its epsilon exceeds "
                "target_epsilon. Stop, or plan more epochs before training.",
                doc="privacy-budget",
            )
            self.planned = None

    def _record(self, optimizer: DPOptimizer) -> None:
        """Records a step according to how its batches were drawn.

        Raises:
            StepError: the step joins more batches than one pass has, or batches that may hold the same
                samples.
            ArgumentError: the step protects another unit than the recorded steps.
        """
        joined = optimizer.accumulated_iterations
        if joined > self.design.steps:
            raise StepError(
                f"This step joins {joined} batches, more than the {self.design.steps} of one pass over "
                "the data, so it holds samples twice. Call optimizer.step() more often."
            )
        if joined > 1 and (readers := self.design.readers) > 1:
            most = min(joined, readers)
            twice = TWICE.format(joined=joined, readers=readers, most=most)
            raise StepError(twice, doc="sampling")
        accountant, sigma = self._accountant(), optimizer.noise_multiplier
        accountant.protected = accountant.protected.beside(self.design.protected)
        accountant.taken_by(ranks=self._of_ranks)
        releasing = getattr(optimizer, "releasing", True)
        shares = self._unknown(joined, releasing)
        if shares > (not self._amplified):  # in an order, a single one is a normal step
            self.draws.unknown.say(self.design.rate if self._amplified else None)
            with accountant.on_all_ranks():
                accountant.step(noise_multiplier=sigma / shares, sample_rate=1.0)
            self.steps += 1
            return
        if self.design.poisson:
            with accountant.on_all_ranks():
                accountant.get_optimizer_hook_fn(sample_rate=self._rate)(optimizer)
            self._taken[sigma] += joined == 1
            self.steps += 1
            return
        known = self.design.sampler != STREAM and releasing
        passes = self.draws.released if known else []
        cuts = accountant.check_cuts()
        for each in passes:
            each.enter(self.design.recorded_steps)
        costly = [each for each in passes if sigma < each.recorded or each.cuts != cuts]
        rate = self._rate if passes else 1.0  # its samples may be unknown
        if costly:
            sigma = self._least(optimizer, min(each.left for each in costly))
        with accountant.on_all_ranks():
            for _ in range(len(costly) if passes else 1):
                accountant.step(noise_multiplier=sigma, sample_rate=rate)
        for each in costly:
            each.recorded, each.cuts = sigma, accountant.check_cuts()
        self.steps += 1

    def _least(self, optimizer: DPOptimizer, steps: int) -> float:
        """The least noise multiplier of this step and the next `steps` ones, by the schedule."""
        sigma = optimizer.noise_multiplier
        state = getattr(getattr(optimizer, "grad_state", None), "clipping", None)
        if state is None:
            return sigma
        schedule, first = state.strategy.noise, state.first_multiplier
        ahead = (first * schedule.factor(state.step + k) for k in range(1, steps + 1))
        return min(sigma, min(ahead, default=sigma))

    def _unknown(self, joined: int, releasing: bool) -> int:
        """Times that a sample may be in a release with batches of unknown source. 0: there are none."""
        draws = self.draws
        if not releasing:  # `add_noise` was called by hand
            return 0 if draws.watching and self.design.poisson else joined
        unknown = draws.unknown.released
        return unknown and unknown + bool(draws.released)

    def at_rate(self, history: Sequence[Entry], rate: Any) -> list[Entry]:
        """Returns the history for a sample that the steps taken here drew with a rate of its own.

        Args:
            history: the accountant's history.
            rate: q_i, at most the design's rate, at which all steps were recorded.

        Raises:
            ArgumentError: no sample can have this rate.
        """
        if not self.design.poisson or self.design.max_batch_size is not None:
            raise ArgumentError(
                "rate expects samples drawn by Poisson sampling without max_batch_size, got "
                f"{self.design.sampler!r}. Call get_epsilon instead.",
                doc="privacy-budget",
            )
        try:
            number = between("rate", rate, 0, self.design.rate, closed=True)
        except (ArgumentError, ArgumentTypeError) as error:
            raise ArgumentError(
                "rate expects that of a sample of this loader, above 0 and at most "
                f"{self.design.rate:.6g}, got {rate!r}."
            ) from error
        left = Counter(self._taken)
        found: list[Entry] = []
        for sigma, q, steps in history:
            own = min(steps, left[sigma]) if q == self.design.rate else 0
            left[sigma] -= own
            found += [(sigma, number, own)] * bool(own) + [(sigma, q, steps - own)] * (own < steps)
        return runs(found)
