"""Which sampled batch a backward pass trains on, and how many samples it holds.

Epsilon assumes that each sample that the loader draws contributes once to the one release of its batch.
The loader's sampler therefore reports every batch that it draws (`fastclip.data.loader`), and the
samples of a backward pass are compared with it. Loader workers draw ahead, so a batch is identified by
its position. The DataLoader's iterator knows the position of the batch that it draws, and how many it
has handed out.

A batch that was handed out and not used was skipped by the loop, or waits in a prefetcher
(Accelerate's, a list). The numbers of samples and the order of draws and uses decide which.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastclip.data.iteration import (
    AHEAD,
    ANOTHER,
    BORDER,
    EMPTY,
    REST,
    UNCLEAR,
    UNCLEAR_UNITS,
    UNDRAWN,
    UNKNOWN_CUT,
    Filling,
    Iteration,
    PhysicalBatch,
    SampledBatch,
    leaves_empty,
    place_of,
    reading,
)
from fastclip.data.units import UnitBatch, cut_between_units
from fastclip.errors import BatchSizeError, StepError, say
from fastclip.ops.units import UnitSamples

# -------------------------------------------------------------------------------------------------
# Whether a loop uses each batch that it is handed out once, or may use some of them again.


class Pace:
    """The pace of a loop without Poisson sampling, in which a pass over the data costs one step.

    It is unknown which of the handed-out batches a step has used. A plain loop and a prefetcher use each
    once. They get another batch for every step, until a prefetcher uses up those that it is ahead by.
    Any further step may be on a batch that another step of the pass was on.
    """

    def __init__(self) -> None:
        self.ahead = inf
        """Fewest batches of this pass that were out in addition to those in use."""
        self._steady = 0
        """Steps of this pass with a batch of their own, while more were to come."""
        self._behind = 0
        """Steps without a batch of their own, minus the batches that came later."""
        self._new: int | None = None
        """Batches handed out after the last step. None: none that was out has been used."""
        self._newest: Any = None
        """Newest batch that was out at the last use."""
        self._more = False
        """Whether more were to come at the last use."""
        self._said = False

    def begin(self) -> None:
        """Begins another pass."""
        self.ahead, self._steady = inf, 0

    def see(self, ahead: int) -> None:
        """Notes the number of batches that are out in addition to those in use."""
        self.ahead = min(self.ahead, max(ahead, 0))

    def use(self, out: Sequence[Any], *, more: bool) -> None:
        """Notes the use of one of the batches that are out, in order.

        Args:
            more: more batches of this pass are to come.
        """
        known = out.index(self._newest) + 1 if self._newest in out else 0
        self._new = (self._new or 0) + len(out) - known
        self._newest, self._more = out[-1], more
        if more:
            self.see(len(out) - 1)

    def step(self) -> bool:
        """Notes a release. Returns whether no other step of the pass used its batches."""
        new, self._new = self._new, None
        if new is None:
            return True  # steps without a known batch are counted elsewhere
        self._behind = max(0, self._behind + 1 - new)
        if new:
            self._steady += self._more
            return True
        if not self._more and self._behind <= min(self.ahead, self._steady):
            return True
        self._behind -= 1
        if not self._said:
            self._said = True
            say(
                "Steps reuse batches that were kept, so each such step is recorded at a sampling rate "
                "of 1. Iterate over the data loader that make_private returned in every pass, and use "
                "each batch as it comes.",
                doc="sampling",
            )
        return False


# -------------------------------------------------------------------------------------------------
# Backward passes over batches of an unknown source, whose samples are not known.
#
# The fast mode raises an error for them under Poisson sampling. Opacus' modes accept them, as Opacus
# does (batches of the loader that was given to make_private, made by hand, kept). Without Poisson
# sampling every mode accepts them as long as the returned loader was never iterated over. Their
# releases are recorded without amplification.


class UnknownPasses:
    """Passes of one private model over batches of an unknown source.

    Formal guarantee: a sample is at most once in a pass, and clipped at C in each. A release of n such
    passes is therefore a Gaussian mechanism of q = 1 whose noise multiplier is divided by n. With
    batches of the loader in addition it is divided by n + 1. Nothing is amplified, because a sample may
    be in every pass.
    """

    def __init__(self) -> None:
        self.gathered = 0
        """Number of passes in the logical batch that is being gathered."""
        self.released = 0
        """Number of passes in the last released one."""
        self._said = False

    def release(self) -> None:
        """Ends the logical batch after a real step."""
        self.released, self.gathered = self.gathered, 0

    def say(self, rate: float | None) -> None:
        """Warns once why epsilon is larger than for sampled batches, with the suggested fix.

        Args:
            rate: rate of Poisson sampling. None: without it, for a step that joins several passes.
        """
        if self._said:
            return
        self._said = True
        why = (
            "with their noise multiplier divided by the batches of a step"
            if rate is None
            else f"at a sampling rate of 1 instead of {rate:.4g}"
        )
        say(
            "Steps use batches that the data loader returned by make_private has not drawn, so they are "
            f"recorded {why}, and epsilon is far larger. Iterate over the returned data loader, and use "
            "each batch once.",
            doc="sampling",
        )


# -------------------------------------------------------------------------------------------------
# The units of the samples of a backward pass, which must be exactly those drawn, in their order.
#
# For single samples only their number matters. A unit's samples are clipped as one, so a pass must hold
# all samples of a physical batch and no others. If it holds fewer, it is unknown which were left out.


class PassedOver:
    """Batches of units that were handed out and that the loop has passed over.

    The loop may have kept them (a shuffled buffer, a list of several passes). The batch of a later
    backward pass may be one of them.
    """

    def __init__(self) -> None:
        self._batches: list[PhysicalBatch] = []

    def add(self, batches: Iterable[PhysicalBatch]) -> None:
        """Adds batches that were unused when a later one was used, or when another pass began."""
        self._batches += [b for b in batches if b.draw.units is not None and b.draw.size]
        del self._batches[:-_MOST]

    def new_pass(
        self, before: Iteration | None, left: Iterable[PhysicalBatch], direct: bool
    ) -> None:
        """Begins a pass over the data.

        Args:
            before: the pass before.
            left: its batches that are left.
            direct: every batch was used as soon as it was handed out, or never.
        """
        if self._batches or not direct:
            self._batches = [b for b in self._batches if b.draw.iteration is before]
            self.add(left)

    def candidates(self, out: list[PhysicalBatch], batch: PhysicalBatch) -> list[PhysicalBatch]:
        """Returns all batches that a backward pass over `batch` may use, if `out` are out."""
        if len(out) == 1:  # used as soon as handed out, so a pass without a use is over
            now = batch.draw.iteration
            self._batches = [
                b for b in self._batches if b.draw.iteration.used or b.draw.iteration is now
            ]
        return [*out, *self._batches]


def unit_samples(
    batch: PhysicalBatch, out: Sequence[PhysicalBatch], samples: int, most: int | None, *, again: bool,
    views: int = 1,
) -> UnitSamples:  # fmt: skip
    """Returns the units of the `samples` samples of a backward pass over `batch`.

    Args:
        out: all batches that are out or were passed over. `batch` is inferred from the loop so far,
            which suffices for numbers of samples. Here the batch in hand may be any of them.
        most: samples of the physical batches into which the loop splits a batch. None: it does not.
        again: the batch has had its pass.
        views: number of views of each sample in the model's batch.

    Raises:
        BatchSizeError: the samples are not those drawn.
        StepError: it may be another batch.
    """
    units = batch.draw.units
    assert units is not None
    if not batch.draw.size:  # a placeholder, which contributes nothing
        if samples > 1 and any(
            other.draw.size for other in out
        ):  # possibly another batch, which would be lost
            raise StepError(UNCLEAR_UNITS, doc="privacy-units")
        return UnitSamples(
            torch.zeros(samples, dtype=torch.int64, device="cpu"), 0, 0, units.reduction
        )
    part = _next_part(batch, most)
    samples_of_units = units.samples_of(part)
    if views > 1 and (again or samples != len(part)):
        raise BatchSizeError(
            f"views={views} expects {views} views of each of the {0 if again else len(part)} samples "
            f"that the loader drew, got {views * samples} entries. Pass every view of every sample to "
            "the model in one call, and each batch once."
        )
    if samples_of_units is None or again or samples != len(part):
        raise BatchSizeError(
            f"Expected all {0 if again else len(part)} samples that the loader drew of its units, "
            f"each once and in order, got {samples}. Do not filter, add or split samples in "
            "collate_fn or in the loop (BatchMemoryManager splits between units).",
            doc="privacy-units",
        )
    for other in out:
        if other is not batch and other.draw.size and other.draw.units is not None:
            theirs = _next_part(other, most)
            same = other.draw.units.samples_of(theirs)
            if len(theirs) == samples and (
                same is None or not same.owner.equal(samples_of_units.owner)
            ):
                raise StepError(UNCLEAR_UNITS, doc="privacy-units")
    return samples_of_units


def _next_part(batch: PhysicalBatch, most: int | None) -> range:
    """Returns the samples of the batch that its next pass must hold."""
    draw = batch.draw
    assert draw.units is not None
    if batch.number is not None:
        if draw.units.cuts is None:
            raise StepError(UNKNOWN_CUT, doc="privacy-units")
        return draw.units.cuts[batch.number]
    parts = cut_between_units(draw.units.sizes, most)
    done = draw.credited
    return next((part for part in parts if part.start == done), range(done, draw.size))


# -------------------------------------------------------------------------------------------------


_MOST = 2**16
"""Largest number of batches that wait."""


class SampledBatches:
    """The sampled batches of one data loader that one private model is trained on.

    Args:
        independent: batches are sampled independently (Poisson), and no two may be joined.
        required: a backward pass without a sampled batch raises an error. If False, only after the
            loader was iterated.
        placeholders: an empty batch is handed out as one placeholder sample.
    """

    def __init__(self, *, independent: bool, required: bool, placeholders: bool = False) -> None:
        self.independent, self.required, self.placeholders = independent, required, placeholders
        self.watching, self.unknown = required, UnknownPasses()
        self._waiting: list[PhysicalBatch] = []
        """Batches drawn and not used, in order."""
        self._used: list[PhysicalBatch] = []
        """Parts of the logical batch that is being gathered."""
        self._rest: tuple[int, int] | None = None
        """Samples that contributed to the last release, and samples of its batch, if it had more."""
        self.released: list[Iteration] = []
        """Passes over the data that the last step belongs to. Empty if they are not known."""
        self._newest: PhysicalBatch | None = None
        self._read_by: WeakKeyDictionary[Any, weakref.ref[Iteration]] = WeakKeyDictionary()
        self._largest = 0
        self._lags: bool | None = None
        """Whether batches are handed out before earlier ones are used. None: not known yet."""
        self._last_out: PhysicalBatch | None = None
        """Newest batch that was out at the last use."""
        self._pace = Pace()
        self._locked = ""
        """Message that says why the physical batch in hand is unknown for the rest of this iteration."""
        self.by_units = False
        """Whether units are drawn, each with several samples."""
        self._passed = PassedOver()
        self.physical_samples: int | None = None
        """Samples of the physical batches into which the training loop itself splits units."""
        self.filling: Filling | None = None
        """Makes all ranks hand out equally many physical batches, if they must."""
        self.at_once = False
        """Whether the data set is asked for all samples of a batch at once (`SampledBatch.at_once`)."""
        self.resumed: tuple[int, float, int] | None = None
        """Of the next pass: batches used before this run, the noise that was recorded, and cuts."""
        self._before = 0
        self.stream = False
        """Whether the samples come from a stream, which may give fewer than were drawn."""

    def __reduce__(self) -> Any:
        """Makes a copy that hears of no batches, because loaders report to the original."""
        kind = {"independent": self.independent, "required": self.required}
        return partial(SampledBatches, placeholders=self.placeholders, **kind), ()

    # The data loader's side

    def drawn(
        self, iteration: Iteration, size: int, units: UnitBatch | None, released_by: list[Any],
        *, at_once: bool = False,
    ) -> None:  # fmt: skip
        """Notes that the batch sampler has drawn `size` samples of these units.

        Args:
            released_by: the models that release this batch.
            at_once: as in `SampledBatch`.
        """
        self.by_units |= units is not None
        if not iteration.drawn:
            self._begin(iteration)
        who = reading()
        if who is not None:
            iteration.read_by(who)
            self._read_by[who] = weakref.ref(iteration)
        place = iteration.next_place(who)
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last.draw.iteration is iteration and last.place == place:
            self._waiting.pop()  # a sampler around this one skipped it, or reading it failed
        self._largest = max(self._largest, size)
        draw = SampledBatch(
            size, iteration, units, released_by=released_by, at_once=at_once,
            number=self._before + iteration.drawn,
        )  # fmt: skip
        self._add(PhysicalBatch(draw, place))

    def exhausted(self, iteration: Iteration) -> None:
        """Notes that the batch sampler has no more batches."""
        iteration.over = True
        iteration.update()

    def announce(self, skip: bool) -> bool:
        """Notes that a splitting sampler draws a part of the newest batch. False if no loader draws."""
        who = reading()
        known = None if who is None else self._read_by.get(who)
        iteration = None if known is None else known()
        if iteration is None or iteration.newest is None:
            return False
        iteration.update()
        newest = iteration.newest
        if newest.place == place_of(who) and newest.skip is None:
            newest.skip, newest.number = skip, 0
        else:
            number = 1 + (newest.number or 0)
            self._add(PhysicalBatch(newest.draw, place_of(who), skip, number))
        return True

    def _begin(self, iteration: Iteration) -> None:
        who = reading()
        for batch in self._waiting:
            batch.draw.iteration.end_of(who)
        out = self._out()
        before = None if self._newest is None else self._newest.draw.iteration
        # A prefetcher still holds what is out. A loop that only iterated (an evaluation) does not.
        held = self.independent and len(out) == 1 if self._lags is None else self._lags
        gone = {b for b in out if not held or b.skip is not None or b.draw.iteration is not before}
        if before is not None and before.alive and not before.over and out:
            gone.discard(out[-1])  # in hand in a pass around this one
        self._waiting = [b for b in self._waiting if b not in gone]
        self._passed.new_pass(before, [b for b in out if b in gone], self._lags is False)
        self.watching, self._lags, self._locked = True, None, ""
        self._pace.begin()
        self._before, iteration.recorded, iteration.cuts = self.resumed or (0, inf, 0)
        iteration.done, self.resumed = self._before, None
        if before is not None and before.used and before.over:
            self._check_empty([*gone], before)

    def _add(self, batch: PhysicalBatch) -> None:
        self._waiting.append(batch)
        if len(self._waiting) > _MOST:  # the loop trains elsewhere, as with a captured graph
            del self._waiting[: _MOST // 2]
        self._newest = batch.draw.iteration.newest = batch

    def _out(self) -> list[PhysicalBatch]:
        """Returns the batches handed out and not used, in order. Forgets those that never will be."""
        out, waiting = [], []
        for batch in self._waiting:
            iteration = batch.draw.iteration
            handed = batch.place < iteration.update()
            if handed:
                out.append(batch)
            if handed or iteration.alive:
                waiting.append(batch)
        self._waiting = waiting
        return out

    # The engine's side

    def reads(self, who: Any) -> bool:
        """Whether this iterator of a DataLoader has drawn from the sampler."""
        return who in self._read_by

    @property
    def newest(self) -> Iteration | None:
        """The newest pass over the data. None before the first."""
        return None if self._newest is None else self._newest.draw.iteration

    @property
    def in_hand(self) -> frozenset[int]:
        """Sizes of the batches that may be in hand. 0 alone if they are split, or come from a stream."""
        return PhysicalBatch.sizes_of(self._out())

    @property
    def joined(self) -> int:
        """Number of sampled batches in the logical batch."""
        return len({id(b.draw) for b in self._used})

    @property
    def last(self) -> PhysicalBatch | None:
        """The last used batch of the logical batch that is being gathered."""
        return self._used[-1] if self._used else None

    def find(self, samples: int) -> PhysicalBatch | None:
        """Returns the batch that a backward pass over `samples` samples trains on. None: not known.

        Raises:
            StepError: no sampled batch matches, or it may not be joined with the held ones.
            BatchSizeError: there are more samples than were drawn.
        """
        if not self.watching:
            return None
        out = self._out()
        batch = self._part_of_the_last(out, samples) or self._choose(out, samples)
        if batch in out:
            self._check_empty(out[: out.index(batch)], batch.draw.iteration)
        others = [b for b in self._used if b.draw is not batch.draw]
        if others:
            if self.independent or batch.skip is not None or others[-1].skip is not None:
                raise StepError(ANOTHER)
            if any(b.draw.iteration is not batch.draw.iteration for b in others):
                raise StepError(BORDER)
        return batch

    def _check_empty(self, passed_over: list[PhysicalBatch], iteration: Iteration) -> None:
        if self.independent and leaves_empty(passed_over, iteration):
            self._locked = EMPTY
            raise StepError(EMPTY, doc="sampling")

    def units_of(
        self, samples: int, views: int = 1
    ) -> tuple[PhysicalBatch | None, UnitSamples | None]:
        """Returns the batch of a backward pass and its units. None if single samples are drawn.

        Args:
            samples: number of samples, without their views.
            views: number of views of each in the model's batch.

        Raises:
            StepError, BatchSizeError: as `find`, or the units of the samples are unknown.
        """
        batch = self.find(samples) if self.by_units else None
        if batch is None or batch.draw.units is None:
            return None, None
        again = batch.number is not None and batch in self._used
        others = self._passed.candidates(self._out(), batch)
        found = unit_samples(
            batch, others, samples, self.physical_samples, again=again, views=views
        )
        return batch, found

    def use(self, batch: PhysicalBatch, samples: int, calls: int = 1) -> bool:
        """Credits `samples` samples of `batch`. False if the batch is empty, and none may contribute.

        Args:
            calls: number of calls of the model under the one loss.
        """
        out = self._out()
        if batch in out:
            self._last_out = out[-1]
            self._pace.use(out, more=self._waiting != out or not batch.draw.iteration.over)
            gone = out[: out.index(batch) + 1]
            self._waiting = [b for b in self._waiting if b not in gone]
            self._passed.add(gone[:-1])
        batch.draw.iteration.used = True
        if not self._used or self._used[-1] is not batch:
            self._used.append(batch)
        batch.draw.credit(samples, calls)
        return batch.draw.size > 0

    def contribute(self, parts: list[int]) -> bool:
        """Credits samples of batches gathered before this step, in order. False as in `use`."""
        real = True
        if len(parts) > 1:  # the batches waited for this step
            out = self._out()
            self._lags = True
            more = len(out) - len(parts)
            if out and not out[-1].draw.iteration.over:
                self._pace.see(more)
            if not self._used and more > self._pace.ahead:
                skipped = out[: more - int(self._pace.ahead)]
                self._check_empty(skipped, out[-1].draw.iteration)
                self._waiting = [b for b in self._waiting if b not in skipped]
        for samples in parts:
            batch = self.find(samples)
            real = real and (batch is None or self.use(batch, samples))
        return real

    def check_release(self) -> None:
        """Checks that each batch may be released, as `SampledBatch.check_release` does."""
        for batch in self._used:
            batch.draw.check_release(self, self.independent)

    def release(self) -> None:
        """Ends the logical batch after a real step."""
        known = self.independent or self._pace.step()
        self.released = list(dict.fromkeys(b.draw.iteration for b in self._used if known))
        for draw in {b.draw for b in self._used}:
            draw.released_by.append(self)
            draw.iteration.done = max(draw.iteration.done, draw.number)
        last = self._used[-1].draw if self._used else None
        self._rest = None
        if last is not None and last.credited < last.size:
            self._rest = last.credited, last.size
        self._used.clear()

    def give_up(self, *, forget: bool) -> None:
        """Discards the logical batch that is being gathered, without a release.

        Args:
            forget: discards the batch in hand, too. If False, its backward pass may be run again.
        """
        back = [] if forget else list(dict.fromkeys(self._used))
        self._last_out, self.unknown.gathered = None, 0
        for batch in self._used:
            batch.draw.credited, batch.draw.called_twice = 0, False
        self._used.clear()
        out = self._out()
        if any(b.skip is not None for b in (*out, *back)):
            back = [] if out else back[-1:]
        if not forget:
            self._waiting = [*back, *self._waiting]
        elif len(out) > 1 and any(b.skip is not None for b in out) and self._lags is not False:
            self._locked = AHEAD
        else:
            self._waiting = [b for b in self._waiting if b not in out or b.skip is None]

    def _part_of_the_last(self, out: list[PhysicalBatch], samples: int) -> PhysicalBatch | None:
        """Returns the last used batch, if this is another part of it."""
        last = self._used[-1] if self._used else None
        if last is None or not last.fits(samples):
            return None
        if out and (self._lags is False or any(b.skip is not None for b in out)):
            return None
        return last

    def _choose(self, out: list[PhysicalBatch], samples: int) -> PhysicalBatch:
        if not out:
            return self._again(samples)
        first, last = out[0], out[-1]
        if last is self._last_out:
            self._lags = True  # nothing was handed out after the last backward pass
        elif len(out) == 1:
            iteration = first.draw.iteration
            if not iteration.over or any(
                b.draw.iteration is iteration for b in self._waiting if b is not first
            ):
                self._lags = False
        if self._locked:
            raise StepError(self._locked, doc="sampling" if self._locked == EMPTY else None)
        if len(out) > 1 and self._lags is not False and any(b.skip is not None for b in out):
            raise StepError(AHEAD)
        if self._lags is False or last.skip is not None:
            if not last.fits(samples):
                raise last.too_many(samples)
            return last
        exact = [b for b in out if self._holds(b, samples)]
        if len({b.draw.size > 0 for b in exact}) > 1 and not self._first_in_hand(out):
            raise StepError(UNCLEAR, doc="sampling")
        possible = exact or [b for b in out if b.fits(samples)]
        if not possible:
            raise first.too_many(samples)
        batch = possible[0]
        if exact and len(out) > 1:
            if exact == [last]:
                self._lags = False
            elif last not in exact:
                self._lags = True
        return batch

    def _first_in_hand(self, out: list[PhysicalBatch]) -> bool:
        """Whether only the first batch can be in hand, because none was skipped."""
        over, ahead = out[-1].draw.iteration.over, self._pace.ahead
        return bool(self._lags) and not over and len(out) <= ahead + 1

    def _again(self, samples: int) -> PhysicalBatch:
        """Returns a batch of an earlier pass, which may be used again without Poisson sampling."""
        if self._used:
            raise self._used[-1].too_many(samples)
        if self.independent and self._rest is not None:
            used, drawn = self._rest
            if samples <= drawn - used:
                raise StepError(REST.format(used=used, drawn=drawn), doc="step-order")
        if self.independent:
            raise StepError(UNDRAWN, doc="sampling")
        batch = PhysicalBatch(SampledBatch(self._largest, Iteration(stream=self.stream)), 0)
        if not batch.fits(samples):
            raise batch.too_many(samples)
        return batch

    def _holds(self, batch: PhysicalBatch, samples: int) -> bool:
        if batch.draw.size:
            return samples == batch.samples_left
        return samples == 0 or (self.placeholders and samples == 1)
