"""How samples are drawn, said once, and what the accountant records of such steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from fastclip.accounting.calibration import in_passes
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Entry, Protected, Rate, TruncatedPoisson, runs
from fastclip.clipping.schedules import NoiseSchedule
from fastclip.core.checks import between
from fastclip.data.draws import SampledBatches
from fastclip.data.samplers import Canaries
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError

POISSON = "Poisson"
"""Every unit is in a draw independently of all others."""
TRUNCATED = "truncated Poisson"
"""The same, and a draw of more than max_batch_size units is cut to a uniformly random subset."""
SHUFFLED = "shuffled"
"""A random order, cut into batches: no unit is drawn independently of the others."""
GIVEN_ORDER = "given order"
"""An order that is not drawn here: the loader's own sampler, a sequence, a list of batches."""
STREAM = "stream"
"""Nobody knows which samples come, and how often in a pass: an IterableDataset, a Poisson sampler of the
user's own."""

ENDLESS = sys.maxsize
"""Draws in a pass over a stream that has no length: no run has as many."""


def epochs_of(steps: int, a_pass: int) -> float:
    """A number of epochs e for which `steps` steps are planned, where a pass has `a_pass`.

    `steps / a_pass` may come out one step too long, by rounding (7 / 25 of 25 steps are 8).
    """
    return max(0.0, (steps - 0.5) / a_pass)


@dataclass(frozen=True)
class SamplingDesign:
    """All about how the samples of a step are drawn.

    Privacy is stated for units: samples, or what several samples have in common (a patient).

    Formal guarantee: where `poisson`, every unit is in a draw independently of all others and of the
    draws before, with a probability of at most `rate` (of `rates[i]`, unit i). Where `public` neither
    `rate` nor `expected_batch_size` depends on the number of units, so that neighbors may differ in
    one that was added or removed. Else they follow from that number, and neighbors are data sets of
    the same, public number, one unit of which contributes nothing (zero-out). Truncated draws are those
    of "Tighter Privacy Analysis for Truncated Poisson Sampling" (arXiv 2508.15089): a Poisson draw
    first, then a uniformly random subset; their price depends on `units`, too.
    """

    sampler: str
    """POISSON, TRUNCATED, SHUFFLED, GIVEN_ORDER or STREAM."""
    rate: float
    """q, the largest probability to be in a draw; of what is not Poisson, 1 / steps."""
    expected_batch_size: float
    """B, the divisor of the noisy sums, in units."""
    steps: int
    """Draws in one pass over the data; ENDLESS of a stream without a length."""
    units: int
    """N, how many may be drawn; 0 of a stream without a length."""
    rates: Tensor | None = field(default=None, compare=False)
    """Sample-wise probabilities, float64 [n], where they differ."""
    public: bool = False
    """q and B were given, so that neither depends on N."""
    max_batch_size: int | None = None
    """Most units of a truncated draw."""
    unit: str = "row"
    """What is drawn, clipped and protected as one: "sample", or "unit" of several samples."""
    max_samples_per_unit: int | None = None
    """Samples of a unit that one draw takes at most, chosen anew each time."""
    unit_reduction: str | None = None
    """A unit's gradient is the "mean" or the "sum" of its samples' gradients."""
    secure: bool = False
    """Drawn from cryptographic randomness."""
    readers: int = 1
    """Workers that read a stream side by side, each of which may bring every sample."""
    canaries: Canaries | None = None
    """Samples of an audit that are among those of the data set."""

    @property
    def protected(self) -> Protected:
        """Whom steps of such draws protect; N stays secret where q and B were given, and no draw is cut,
        whose price depends on N."""
        return Protected(frozenset({self.unit}), self.public and self.max_batch_size is None)

    @property
    def poisson(self) -> bool:
        """Units are drawn independently, so that amplification by sampling holds."""
        return self.sampler in (POISSON, TRUNCATED)

    def described(self) -> str:
        """All of it in words, rates by sample included, to be held against another process' design."""
        rates = None if self.rates is None else hash(tuple(self.rates.tolist()))
        return f"{replace(self, rates=None)}, rates {rates}"

    def steps_in(self, epochs: float) -> int:
        """Steps in `epochs` passes; `steps_of(rate, epochs)` wherever 1 / q is the length of a pass.

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
# Streams that are read side by side: each worker of a loader reads an IterableDataset of its own.


SHARDED = "sharded_by_worker"
"""An attribute of a data set: True says that no two workers bring the same sample."""
TWICE = (
    "This step joins {joined} batches of a stream that {readers} workers read in parallel, so a sample "
    "may be in it {most} times. Call optimizer.step() after every batch, or set "
    f"{SHARDED} = True if the workers share the samples out."
)


def readers_of(loader: DataLoader) -> int:
    """How many times a pass may bring a sample of a stream; 1 for data sets whose samples are drawn."""
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
# What an accountant records of steps whose samples are drawn in one design.


def accounted_rate(design: SamplingDesign) -> Rate:
    """What an accountant is told in the place of q: a truncated draw as what it is."""
    if design.max_batch_size is None:
        return design.rate
    return TruncatedPoisson(design.rate, design.units, design.max_batch_size)


def planned_history(
    design: SamplingDesign, schedule: NoiseSchedule, noise_multiplier: float, epochs: float
) -> list[Entry]:
    """What an accountant holds after `epochs` passes.

    Args:
        design: how samples are drawn. schedule: of the noise. noise_multiplier: sigma_1, of the
        first step.

    Returns:
        (sigma, q, steps) in order, as `Releases` records it.
    """
    stages = schedule.runs(design.steps_in(epochs))
    if design.poisson:  # of which there may be many
        rate = accounted_rate(design)
        return runs((noise_multiplier * factor, rate, length) for factor, length in stages)
    return records(design, [noise_multiplier * f for f, length in stages for _ in range(length)])


def records(design: SamplingDesign, sigmas: Sequence[float]) -> list[Entry]:
    """What an accountant holds after steps of these noise multipliers.

    Args:
        sigmas: of steps in their order; the first begins a pass over the data.
    """
    if design.poisson or design.sampler == STREAM:
        rate = accounted_rate(design) if design.poisson else 1.0
        return runs((sigma, rate, 1) for sigma in sigmas)
    found: list[Entry] = []
    for start in range(0, len(sigmas), design.steps):
        least = float("inf")
        for sigma in sigmas[start : start + design.steps]:
            if sigma < least:
                found.append((sigma, 1.0, 1))
                least = sigma
    return runs(found)


@dataclass(frozen=True)
class AsPlanned:
    """A noise schedule whose stages are what an accountant records, not steps; see `planned_history`."""

    design: SamplingDesign
    schedule: NoiseSchedule
    epochs: float

    def factor(self, step: int) -> float:
        """Of the noise itself."""
        return self.schedule.factor(step)

    def runs(self, length: int) -> list[tuple[float, int]]:
        """(factor, number of records) of the whole run; its number of records must be `length`."""
        entries = planned_history(self.design, self.schedule, 1.0, self.epochs)
        assert sum(count for *_, count in entries) == length
        return [(factor, count) for factor, _, count in entries]


class Releases:
    """Records each real step of one model, as its samples were drawn.

    Formal guarantee: Poisson steps are subsampled Gaussian mechanisms at the design's rate. Of a
    shuffled or given order a sample is in one step of each pass, and which one does not depend on
    what it
    holds: for neighbors in which a sample is zeroed out, a pass is one Gaussian mechanism of q = 1 with
    the noise of that step (parallel composition), recorded at the least noise of the pass. A step that
    may be on samples of another one of the pass (`Pace`) is a mechanism of its own, and so is every
    step on a stream, or on batches that no loader has told of, with the noise over their number
    (`UnknownPasses`).

    Args:
        design: how samples are drawn. draws: of the loader. accountant: who records, when a step is
        taken.
        ranks: who take each step together, where several train.
    """

    def __init__(
        self, design: SamplingDesign, draws: SampledBatches, accountant: Callable[[], Ledger],
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.design, self._draws, self._accountant = design, draws, accountant
        self._of_ranks = ranks is not None
        self._rate: Any = accounted_rate(design)
        self._taken: Counter[float] = Counter()
        """Steps of one Poisson draw each, by their noise multiplier."""
        self.steps = 0
        """That were recorded, of this model."""

    @property
    def ledger(self) -> Ledger:
        """Where steps are recorded from now on."""
        return self._accountant()

    def __call__(self, optimizer: DPOptimizer) -> None:
        """A step is about to be released.

        Raises:
            StepError: it joins more batches than one pass has, or batches that may hold the same
            samples.
            ArgumentError: it protects another unit than the steps that the accountant knows.
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
        if shares > (not self.design.poisson):  # one alone is a step like any other there
            self._draws.unknown.say(self.design.rate if self.design.poisson else None)
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
        told = self.design.sampler != STREAM and releasing
        passes = self._draws.released if told else []
        cuts = accountant.check_cuts()
        costly = [each for each in passes if sigma < each.recorded or each.cuts != cuts]
        with accountant.on_all_ranks():
            for _ in range(len(costly) if passes else 1):  # nothing may tell which samples it holds
                accountant.step(noise_multiplier=sigma, sample_rate=1.0)
        for each in costly:
            each.recorded, each.cuts = sigma, accountant.check_cuts()
        self.steps += 1

    def _unknown(self, joined: int, releasing: bool) -> int:
        """How often a sample may be in a release with batches that no loader has told of; 0: none is."""
        draws = self._draws
        if not releasing:  # `add_noise` was called by hand
            return 0 if draws.watching and self.design.poisson else joined
        unknown = draws.unknown.released
        return unknown and unknown + bool(draws.released)

    def at_rate(self, history: Sequence[Entry], rate: Any) -> list[Entry]:
        """What a whole history is for a sample that the steps taken here have drawn with another rate.

        Args:
            history: of the accountant. rate: q_i, at most the design's, which all were recorded at.

        Raises:
            ArgumentError: for a rate that no sample can have.
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
