"""Which sampled batch a backward pass trains on, and how many samples it holds.

Epsilon is stated for the samples that the loader draws: each contributes once to the one release of its
draw. So the loader's sampler tells of every draw as it is made (fastclip.data.loader), and the samples
that a backward pass credits are held against it. Loader workers draw ahead, so a batch is told by its
place: the DataLoader's iterator knows the place of the batch that it draws and how many it has
handed out.

A batch that was handed out and not used was skipped by the loop, or waits in a prefetcher
(Accelerate's, a list); the numbers of samples, and the order of draws and uses, tell which.
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
# Whether a loop uses the batches that it is handed out one for one, or may use some of them again.


class Pace:
    """That of one private model without Poisson sampling, where a pass over the data costs one step.

    Which of the batches that are out a step has used cannot be told. A plain loop and a prefetcher use
    each once: they are handed out another for every step, until a prefetcher uses what it is ahead by.
    A step beyond that may be on a batch that another step of the pass was on.
    """

    def __init__(self) -> None:
        self.ahead = inf
        """Fewest batches of this pass that were out beyond those being used."""
        self._steady = 0
        """Steps of this pass that went with a batch of their own, while more were to come."""
        self._behind = 0
        """Steps without one, less the batches that came later."""
        self._new: int | None = None
        """Batches handed out since the last step; None: none that was out has been used since."""
        self._newest: Any = None
        """Batch that was out when one was used last."""
        self._more = False
        """More were to come then."""
        self._said = False

    def begin(self) -> None:
        """Another pass begins."""
        self.ahead, self._steady = inf, 0

    def see(self, ahead: int) -> None:
        """So many are out beyond those that are being used."""
        self.ahead = min(self.ahead, max(ahead, 0))

    def use(self, out: Sequence[Any], *, more: bool) -> None:
        """One of the batches that are out, in order, is used; `more` of this pass are to come."""
        known = out.index(self._newest) + 1 if self._newest in out else 0
        self._new = (self._new or 0) + len(out) - known
        self._newest, self._more = out[-1], more
        if more:
            self.see(len(out) - 1)

    def step(self) -> bool:
        """A step is released; whether it is on batches that no other step of the pass was on."""
        new, self._new = self._new, None
        if new is None:
            return True  # whoever knows no batch counts for itself
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
# Backward passes over batches of which no data loader has told: which samples they hold is not known.
#
# The fast mode refuses them under Poisson sampling. Opacus' modes take them, as Opacus does
# (batches of the loader that was given to make_private, made by hand, kept), and without Poisson
# sampling every mode does, for as long as the returned loader was never iterated over; what they
# release is accounted for what it is.


class UnknownPasses:
    """Those of one private model.

    Formal guarantee: a sample is once in a pass at most, and clipped at C in each, so that a
    release of n such passes, and of known draws beside them, is a Gaussian mechanism of q = 1 whose
    noise multiplier is divided by n (by n + 1). Nothing is amplified: a sample may be in every one.
    """

    def __init__(self) -> None:
        self.gathered = 0
        """In the logical batch that is being gathered."""
        self.released = 0
        """In the one that was released last."""
        self._said = False

    def release(self) -> None:
        """A real step has used up the logical batch."""
        self.released, self.gathered = self.gathered, 0

    def say(self, rate: float | None) -> None:
        """Warn once why epsilon is larger than of draws, and name the way out.

        Args:
            rate: of Poisson draws; None: without them, where a step joins several such passes.
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
# Whose the samples of a backward pass are: exactly those that were drawn, in their order, or refused.
#
# Of single samples only the number matters. A unit's samples are clipped as one, so a pass must hold all
# samples of a physical batch and no others: of fewer it is not known which were left out.


class PassedOver:
    """Batches of units that were handed out, and that the loop has gone on without.

    It may have kept them (a buffer that is shuffled, a list of several passes), so the batch of a later
    backward pass may be one of them.
    """

    def __init__(self) -> None:
        self._batches: list[PhysicalBatch] = []

    def add(self, batches: Iterable[PhysicalBatch]) -> None:
        """They were not used when a later one was, or when another pass over the data began."""
        self._batches += [b for b in batches if b.draw.units is not None and b.draw.size]
        del self._batches[:-_MOST]

    def new_pass(
        self, before: Iteration | None, left: Iterable[PhysicalBatch], direct: bool
    ) -> None:
        """A pass over the data begins, after `before`, of which these batches are left.

        Args:
            direct: every batch was used as soon as it was handed out, or never.
        """
        if self._batches or not direct:
            self._batches = [b for b in self._batches if b.draw.iteration is before]
            self.add(left)

    def beside(self, out: list[PhysicalBatch], batch: PhysicalBatch) -> list[PhysicalBatch]:
        """All batches that a backward pass over `batch` may be over, where these are out."""
        if len(out) == 1:  # used as soon as handed out; a pass that was only looked at is over
            now = batch.draw.iteration
            self._batches = [
                b for b in self._batches if b.draw.iteration.used or b.draw.iteration is now
            ]
        return [*out, *self._batches]


def unit_samples(
    batch: PhysicalBatch, out: Sequence[PhysicalBatch], samples: int, most: int | None, *, again: bool,
    views: int = 1,
) -> UnitSamples:  # fmt: skip
    """Whose the `samples` samples of a backward pass over `batch` are.

    Args:
        out: all batches that are out, and those that were passed over. Which of them is in hand is
            inferred from how the loop has gone so far, which is enough for numbers of samples: here
            any of them may be the one.
        most: samples of the physical batches into which the loop cuts a draw; None: it does not.
        again: the batch has had its pass.
        views: of each sample, in the model's batch.

    Raises:
        BatchSizeError: other samples than were drawn. StepError: it may be another batch.
    """
    units = batch.draw.units
    assert units is not None
    if not batch.draw.size:  # a placeholder, which contributes nothing
        if samples > 1 and any(
            other.draw.size for other in out
        ):  # or another batch, which would be lost
            raise StepError(UNCLEAR_UNITS, doc="privacy-units")
        return UnitSamples(
            torch.zeros(samples, dtype=torch.int64, device="cpu"), 0, 0, units.reduction
        )
    part = _next_part(batch, most)
    owners = units.rows_of(part)
    if views > 1 and (again or samples != len(part)):
        raise BatchSizeError(
            f"views={views} expects {views} views of each of the {0 if again else len(part)} samples "
            f"that the loader drew, got {views * samples} samples. Pass every view of every sample to "
            "the model in one call, and each batch once."
        )
    if owners is None or again or samples != len(part):
        raise BatchSizeError(
            f"Expected all {0 if again else len(part)} samples that the loader drew of its units, "
            f"each once and in order, got {samples}. Do not filter, add or split samples in "
            "collate_fn or in the loop (BatchMemoryManager splits between units).",
            doc="privacy-units",
        )
    for other in out:
        if other is not batch and other.draw.size and other.draw.units is not None:
            theirs = _next_part(other, most)
            same = other.draw.units.rows_of(theirs)
            if len(theirs) == samples and (same is None or not same.owner.equal(owners.owner)):
                raise StepError(UNCLEAR_UNITS, doc="privacy-units")
    return owners


def _next_part(batch: PhysicalBatch, most: int | None) -> range:
    """The samples of the draw that its next pass must hold."""
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
"""Batches that may wait."""


class SampledBatches:
    """The draws of one data loader that one private model is trained on.

    Args:
        independent: draws are independent samples (Poisson), so that no two may be joined.
        required: a backward pass without a draw is refused; else only once the loader was iterated.
        placeholders: an empty draw is handed out as one placeholder sample.
    """

    def __init__(self, *, independent: bool, required: bool, placeholders: bool = False) -> None:
        self.independent, self.required, self.placeholders = independent, required, placeholders
        self.watching, self.unknown = required, UnknownPasses()
        self._waiting: list[PhysicalBatch] = []
        """Drawn and not used, in order."""
        self._used: list[PhysicalBatch] = []
        """What the logical batch that is being gathered consists of."""
        self.released: list[Iteration] = []
        """The passes over the data that the last step belongs to; none where they are not known."""
        self._newest: PhysicalBatch | None = None
        self._read_by: WeakKeyDictionary[Any, weakref.ref[Iteration]] = WeakKeyDictionary()
        self._largest = 0
        self._lags: bool | None = None
        """Batches are handed out before the ones before them are used; None: not known yet."""
        self._last_out: PhysicalBatch | None = None
        """The newest that was out when a batch was used last."""
        self._pace = Pace()
        self._locked = ""
        """Which physical batch is in hand cannot be told any more in this iteration."""
        self.by_units = False
        """Samples of units are drawn, which belong together."""
        self._passed = PassedOver()
        self.physical_samples: int | None = None
        """Samples of the physical batches into which the training loop itself cuts a draw of units."""
        self.filling: Filling | None = None
        """What makes all ranks hand out equally many physical batches, where they must."""
        self.at_once = False
        """The data set is asked for all samples of a draw at once (`SampledBatch.at_once`)."""
        self.stream = False
        """The samples come of a stream, so that a draw says only how many there are at most."""

    def __reduce__(self) -> Any:
        """A copy hears of no draws: loaders tell the original."""
        kind = {"independent": self.independent, "required": self.required}
        return partial(SampledBatches, placeholders=self.placeholders, **kind), ()

    # The data loader's side

    def drawn(
        self, iteration: Iteration, size: int, units: UnitBatch | None, released_by: list[Any],
        *, at_once: bool = False,
    ) -> None:  # fmt: skip
        """The batch sampler has drawn `size` samples, of these units, and told those of `released_by`.

        Args:
            at_once: as of Draw.
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
            self._waiting.pop()  # a sampler around this one passed it over, or reading it failed
        self._largest = max(self._largest, size)
        draw = SampledBatch(size, iteration, units, released_by=released_by, at_once=at_once)
        self._add(PhysicalBatch(draw, place))

    def exhausted(self, iteration: Iteration) -> None:
        """The batch sampler was asked for a draw and had none."""
        iteration.over = True
        iteration.look()

    def announce(self, skip: bool) -> bool:
        """A splitting sampler draws a part of the newest draw; False where no loader is drawing."""
        who = reading()
        known = None if who is None else self._read_by.get(who)
        iteration = None if known is None else known()
        if iteration is None or iteration.newest is None:
            return False
        iteration.look()
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
        # A prefetcher holds what is out still; a loop that only looked at it (an evaluation) does not.
        held = self.independent and len(out) == 1 if self._lags is None else self._lags
        gone = {b for b in out if not held or b.skip is not None or b.draw.iteration is not before}
        if before is not None and before.alive and not before.over and out:
            gone.discard(out[-1])  # a pass inside another, whose batch is in hand
        self._waiting = [b for b in self._waiting if b not in gone]
        self._passed.new_pass(before, [b for b in out if b in gone], self._lags is False)
        self.watching, self._lags, self._locked = True, None, ""
        self._pace.begin()
        if before is not None and before.used and before.over:
            self._check_empty([*gone], before)

    def _add(self, batch: PhysicalBatch) -> None:
        self._waiting.append(batch)
        if len(self._waiting) > _MOST:  # a loop that trains elsewhere, such as a captured graph
            del self._waiting[: _MOST // 2]
        self._newest = batch.draw.iteration.newest = batch

    def _out(self) -> list[PhysicalBatch]:
        """Handed out and not used, in order; those that never will be are forgotten."""
        out, waiting = [], []
        for batch in self._waiting:
            iteration = batch.draw.iteration
            handed = batch.place < iteration.look()
            if handed:
                out.append(batch)
            if handed or iteration.alive:
                waiting.append(batch)
        self._waiting = waiting
        return out

    # The engine's side

    def reads(self, who: Any) -> bool:
        """Whether the iterator of a DataLoader has drawn from this sampler."""
        return who in self._read_by

    @property
    def in_hand(self) -> frozenset[int]:
        """Samples of the draws that may be in hand; 0 alone where they are split, or of a stream."""
        return PhysicalBatch.rows_of(self._out())

    @property
    def joined(self) -> int:
        """Draws that the logical batch consists of."""
        return len({id(b.draw) for b in self._used})

    @property
    def last(self) -> PhysicalBatch | None:
        """The batch used last, of the logical batch that is being gathered."""
        return self._used[-1] if self._used else None

    def find(self, samples: int) -> PhysicalBatch | None:
        """The batch that a backward pass over `samples` samples trains on; None where none is known.

        Raises:
            StepError: no draw may be it, or it may not be joined with what is held.
            BatchSizeError: more samples than were drawn.
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
        """The batch of a backward pass, and whose its samples are; None where single samples are drawn.

        Args:
            samples: without their views. views: of each in the model's batch.

        Raises:
            StepError, BatchSizeError: as `find`, or it cannot be told whose they are.
        """
        batch = self.find(samples) if self.by_units else None
        if batch is None or batch.draw.units is None:
            return None, None
        again = batch.number is not None and batch in self._used
        others = self._passed.beside(self._out(), batch)
        found = unit_samples(
            batch, others, samples, self.physical_samples, again=again, views=views
        )
        return batch, found

    def use(self, batch: PhysicalBatch, samples: int, calls: int = 1) -> bool:
        """`samples` samples of `batch` contribute; False if it is an empty draw, so that none may.

        Args:
            calls: of the model under the one loss.
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
        """Samples of batches that were gathered before this step, in order; False as in `use`."""
        real = True
        if len(parts) > 1:  # they waited for this
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
        """Refuse to release what one draw may not; see `SampledBatch.check_release`."""
        for batch in self._used:
            batch.draw.check_release(self, self.independent)

    def release(self) -> None:
        """A real step has used up the logical batch."""
        known = self.independent or self._pace.step()
        self.released = list(dict.fromkeys(b.draw.iteration for b in self._used if known))
        for draw in {b.draw for b in self._used}:
            draw.released_by.append(self)
        self._used.clear()

    def give_up(self, *, forget: bool) -> None:
        """Nothing of the logical batch that is being gathered is released.

        Args:
            forget: the batch in hand is given up, too; else its backward pass may be run again.
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
        """The batch used last, if this is another part of it."""
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
            self._lags = True  # nothing was handed out since the last backward pass
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
        """Whether no batch but the first can be the one in hand: none was skipped."""
        over, ahead = out[-1].draw.iteration.over, self._pace.ahead
        return bool(self._lags) and not over and len(out) <= ahead + 1

    def _again(self, samples: int) -> PhysicalBatch:
        """A batch of an earlier pass, which without Poisson sampling the next one may repeat."""
        if self._used:
            raise self._used[-1].too_many(samples)
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
