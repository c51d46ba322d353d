"""One pass over a batch sampler, the batches that a loader hands out, and the messages on misuse.

Loader workers draw ahead, so a batch is identified by its position. The iterator of the DataLoader
knows the position of the batch that it draws, and how many it has handed out.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opacus.utils.batch_memory_manager import BatchSplittingSampler

from fastclip.core.system import this_process
from fastclip.core.torch_names import INDEX_SAMPLER, RECEIVED, SENT, YIELDED, sampler_calls
from fastclip.data.units import UnitBatch
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError, BatchSizeError, StepError

# -------------------------------------------------------------------------------------------------
# Messages for a backward pass that may not train on the batch in hand.


ANOTHER = (
    "An unfinished logical batch is held, and this batch is another sampled batch, so a sample of both "
    "would contribute twice. Call optimizer.step() once per sampled batch, or "
    "optimizer.discard_logical_batch() when you leave a loop or skip a batch."
)
BORDER = (
    "This step joins batches of two passes over the data loader, so a sample of both would contribute "
    "twice. Call optimizer.step() at the end of each pass, or optimizer.discard_logical_batch() to "
    "leave its last batches out."
)
AHEAD = (
    "A physical batch was drawn before the previous one was stepped, so the end of the logical batch is "
    "unknown. Leave the loop, and call optimizer.discard_logical_batch() before the next batch whenever "
    "you skip one."
)
UNDRAWN = (
    "A backward pass came without a batch of the data loader that make_private returned, so epsilon "
    "does not cover its samples. Iterate over that loader and use each batch once, or wrap passes that "
    "must not train in engine.paused()."
)
REST = (
    "The last step released {used} of the {drawn} samples of a sampled batch, and this backward pass "
    "came before the next batch of the data loader. Call optimizer.step() once per sampled batch, and "
    "let BatchMemoryManager split it."
)
EMPTY = (
    "An empty batch of Poisson sampling was skipped, which reveals that no sample was drawn, so epsilon "
    "is larger than recorded. Train on empty batches too, or pass rand_on_empty=True to make_private."
)
FORKED = (
    "This batch was drawn before this process was forked, so its parent may release it too and epsilon "
    "would be wrong. Call optimizer.discard_logical_batch(), and continue with the next batch."
)
SHARED = (
    "Another model has released this sampled batch, so epsilon would be larger than recorded. Give each "
    "model a data loader of its own (from make_private), or train both as parts of one module."
)
REORDERED = (
    "A {name} around the returned data loader's sampler may move samples, and unit_ids identifies the "
    "unit of each by its position. Iterate over the returned data loader itself."
)
HALVES = (
    "The calls of the model under one loss got {samples} samples of the {drawn} that the data loader "
    "drew, and samples of several calls count as the same. Pass the whole batch to every call, in the "
    "same order."
)
AT_ONCE = (
    "The sampler drew {drawn} samples by one key, and the model got {samples}, so several may be "
    "clipped as one. Pass all samples that the data set returns along the batch axis, or return one "
    "per key."
)
TOO_MANY = (
    "Expected at most {left} samples in this backward pass ({drawn} drawn, {used} used), got {samples}, "
    "so some would contribute twice. Use each batch once, and let collate_fn return one sample per item "
    "(or pass views=K)."
)
ONE_PASS = (
    "A batch of a stream (IterableDataset) has had a second backward pass in one step, so its samples "
    "may contribute twice. Pass the whole batch to the model at once, or use a smaller batch_size."
)
UNCLEAR = (
    "Several batches have been drawn ahead and one of them is empty, so this sample may be its "
    "placeholder. Draw the next batch after the step, or pass rand_on_empty=False."
)
UNCLEAR_UNITS = (
    "Several batches have been drawn and not used, so the unit of each sample in this backward pass is "
    "unknown. Iterate over the returned data loader itself, and use each batch before the next is drawn."
)
UNKNOWN_CUT = (
    "A sampler around the data loader's has split a batch of units at unknown positions, so a unit may "
    "be clipped in two parts. Split batches with Opacus' BatchMemoryManager, or set max_batch_size and "
    "max_samples_per_unit."
)
SHARDED = (
    "Accelerate's {name} would shard the returned data loader again over {ranks} ranks, although each "
    "rank draws its own share. Prepare everything except the data loader, and iterate over the one that "
    "make_private returned."
)


# -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Iteration:
    """One pass over the batch sampler."""

    reader: weakref.ref[Any] | None = None
    """Iterator of the DataLoader that draws. It holds the data set and the workers."""
    handed: float = float("inf")
    """Batches at positions below it have been handed out."""
    over: bool = False
    """The sampler has no more batches."""
    drawn: int = 0
    used: bool = False
    """A batch of this pass has contributed."""
    recorded: float = float("inf")
    """Least noise multiplier at which steps of this pass were recorded."""
    cuts: int = 0
    """Cuts of the ledger at that time."""
    newest: PhysicalBatch | None = None
    stream: bool = False
    """A batch is a number of samples asked of a stream, which may give fewer, or none."""
    first: int = 0
    """Position of the first batch."""
    begun: Any = None
    """State of the sampler's stream at its start. None if the sampler keeps none."""
    done: int = 0
    """Number of its batches up to the last released one, also before a resume."""
    turn: int | None = None
    """Number of the steps that are recorded as one, to which the last released batch belongs."""
    left: int = 0
    """Number of these that are still to come."""

    def enter(self, length: int) -> None:
        """Notes that the last released batch belongs to `length` steps that are recorded as one."""
        before, self.turn = self.turn, (self.done - 1) // length
        self.left = length - 1 - (self.done - 1) % length
        if before is not None and before != self.turn:
            self.recorded = float("inf")

    def next_place(self, who: Any) -> int:
        """Counts the batch that is being drawn, and returns its position.

        The batches of a stream are alike, and identified by how many were handed out. A batch that was
        drawn for a worker whose stream has ended is never handed out.

        Args:
            who: the iterator of the DataLoader that draws. None: no DataLoader draws.
        """
        if self.stream and who is not None and not self.drawn:
            self.first = int(getattr(who, YIELDED))
        place = self.first + self.drawn if self.stream or who is None else place_of(who)
        self.drawn += 1
        self.update()
        return place

    def read_by(self, who: Any) -> None:
        """Notes that `who`, the iterator of a DataLoader, draws.

        The number of batches that it handed out stays known after it is gone, from its attributes. It
        need not be kept alive.
        """
        if self.reader is not None and self.reader() is who:
            return
        me = weakref.ref(self)
        facts = vars(who) if self.stream or RECEIVED in vars(who) else {}

        def gone(reader: weakref.ref[Any]) -> None:
            iteration = me()
            if iteration is not None and iteration.reader is reader:
                iteration._note(facts)
                iteration.reader = None  # frees these facts, which the garbage collector would keep

        self.reader = weakref.ref(who, gone)

    @property
    def alive(self) -> bool:
        """Whether its DataLoader's iterator exists."""
        return self.reader is not None and self.reader() is not None

    def update(self) -> float:
        """Updates and returns `handed`. If the reader is gone, the last value."""
        who = None if self.reader is None else self.reader()
        if who is not None:
            self._note(vars(who))
        return self.handed

    def _note(self, facts: Mapping[str, Any]) -> None:
        # without workers each batch is handed out as it is drawn
        self.handed = float(facts[YIELDED] if self.stream else facts.get(RECEIVED, "inf"))

    def end_of(self, who: Any) -> None:
        """Notes that `who` begins another pass. Persistent workers count from 0 again."""
        if who is not None and self.reader is not None and self.reader() is who:
            self.reader = None
            if self.over:
                self.handed = float("inf")


@dataclass(eq=False)
class SampledBatch:
    """The samples of one logical batch, which the batch sampler drew at once."""

    size: int
    iteration: Iteration
    units: UnitBatch | None = None
    """The units of its samples, if units are drawn."""
    credited: int = 0
    """Number of samples that have contributed."""
    called_twice: bool = False
    """A backward pass went through several calls of the model, which must hold the same samples."""
    process: tuple[int, int] = field(default_factory=this_process)
    """Process in which the batch was drawn."""
    released_by: list[Any] = field(default_factory=list)
    """Models that have released it. One list for all models that hear of this sampler's batches."""
    at_once: bool = False
    """The data set was asked for several samples by one key, and lays them out along an axis."""
    number: int = 0
    """Number of this batch in its pass, from 1."""

    def credit(self, samples: int, calls: int) -> None:
        """Credits a backward pass over `samples` of its samples, through `calls` calls of the model.

        A stream's batch may hold fewer samples than were drawn, so none are left afterwards.
        """
        if self.size:
            self.credited = self.size if self.iteration.stream else self.credited + samples
        self.called_twice |= calls > 1

    def check_release(self, who: Any, independent: bool) -> None:
        """Checks that each entry is one sample, and that no other model has released the batch.

        Args:
            who: the model that is about to release it.
            independent: every release is recorded as another sampled batch.

        Raises:
            StepError: another model has released this batch.
            BatchSizeError: several calls of the model held fewer samples than were drawn, or a pass held
                fewer of the samples that the data set returned at once.
        """
        if independent and any(other is not who for other in self.released_by):
            raise StepError(SHARED, doc="sampling")
        if self.called_twice and self.credited < self.size:
            halves = HALVES.format(samples=self.credited, drawn=self.size)
            raise BatchSizeError(halves, doc="data-order")
        if self.at_once and self.credited < self.size:
            at_once = AT_ONCE.format(samples=self.credited, drawn=self.size)
            raise BatchSizeError(at_once, doc="data-order")


@dataclass(eq=False)
class PhysicalBatch:
    """What the DataLoader hands out at once, a sampled batch or a part of one."""

    draw: SampledBatch
    place: int
    skip: bool | None = None
    """Whether its step only accumulates. None: no splitting sampler decides."""
    number: int | None = None
    """Number of the part of the batch. None: no splitting sampler made it."""

    @property
    def samples_left(self) -> int:
        """Number of samples that may still contribute."""
        return self.draw.size - self.draw.credited

    @staticmethod
    def sizes_of(out: Collection[PhysicalBatch]) -> frozenset[int]:
        """Returns the numbers of samples of these batches.

        0 alone if it is unknown how batches are split, or how many samples a stream gave.
        """
        unknown = any(b.skip is not None or b.draw.iteration.stream for b in out)
        return frozenset(b.samples_left for b in out if not (unknown and b.draw.size))

    def fits(self, samples: int) -> bool:
        """Whether it may hold `samples` samples. An empty batch fits any, which contribute nothing."""
        return not self.draw.size or samples <= self.samples_left

    def too_many(self, samples: int) -> BatchSizeError:
        """Returns the error for a backward pass over too many samples."""
        draw = self.draw
        if draw.iteration.stream and draw.credited:
            return BatchSizeError(ONE_PASS, doc="sampling")
        return BatchSizeError(
            TOO_MANY.format(
                left=self.samples_left, drawn=draw.size, used=draw.credited, samples=samples
            ),
            doc="sampling",
        )


def leaves_empty(passed_over: Collection[PhysicalBatch], iteration: Iteration) -> bool:
    """Whether the loop skipped an empty batch of this pass, which is a step like any other.

    Such a loop reveals that no sample was drawn. Its steps have the rate q / (1 - (1 - q)^N), which is
    larger than the recorded one.
    """
    return any(not b.draw.size and b.draw.iteration is iteration for b in passed_over)


def reading() -> Any:
    """Returns the iterator of the DataLoader that is drawing now, if one is.

    It may be any DataLoader around the sampler (BatchMemoryManager's, Accelerate's), of which only this
    call is visible.
    """
    found = sampler_calls.innermost()
    return None if found is None else found[0]


def samplers_around(who: Any) -> Iterator[Any]:
    """Yields the samplers around the one that draws, from the outermost to the last known one.

    Args:
        who: the iterator of a DataLoader.
    """
    sampler: Any = getattr(who, INDEX_SAMPLER, None)
    while sampler is not None and not hasattr(type(sampler), "unwatched"):
        yield sampler
        if isinstance(sampler, BatchSplittingSampler):
            sampler = sampler.sampler
        elif _accelerates(sampler):  # it skips whole batches
            sampler = getattr(sampler, "batch_sampler", None)
        else:
            return


def sampler_between(who: Any) -> str | None:
    """Returns the name of a user's sampler around the one that draws. None if there is none.

    Args:
        who: the iterator of a DataLoader.
    """
    for sampler in samplers_around(who):
        if not isinstance(sampler, BatchSplittingSampler) and not _accelerates(sampler):
            return type(sampler).__name__
    return None


def most_samples(who: Any) -> int | None:
    """Returns the samples of a physical batch into which a batch is split. None if it is not.

    Args:
        who: the iterator of the DataLoader that draws.
    """
    cuts = [s.max_batch_size for s in samplers_around(who) if isinstance(s, BatchSplittingSampler)]
    return int(cuts[-1]) if cuts else None


def check_not_sharded(who: Any) -> None:
    """Checks that no sampler of Accelerate hands each rank only a part of a batch.

    Args:
        who: the iterator of the DataLoader that draws. None: no DataLoader draws.

    Raises:
        ArgumentError: a sampler does, with the suggested fix.
    """
    for sampler in samplers_around(who):
        ranks = getattr(sampler, "num_processes", 1) if _accelerates(sampler) else 1
        if ranks > 1:
            sharded = SHARDED.format(name=type(sampler).__name__, ranks=ranks)
            raise ArgumentError(sharded, doc="several-processes")


def _accelerates(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("accelerate.")


def place_of(who: Any) -> int:
    """Position of the batch being drawn among those that are handed out."""
    sent = getattr(who, SENT, None)
    return int(getattr(who, YIELDED) if sent is None else sent)


# -------------------------------------------------------------------------------------------------
# Ranks that run one model together, on which each batch has equally many physical batches.
#
# If parameters are sharded over ranks, every forward and backward pass gathers them from all. A rank
# may draw fewer samples than another one, and split them into fewer parts (BatchMemoryManager). It
# then continues with parts without samples, which contribute nothing.


class Filling:
    """Counts the parts without samples that follow those of the batch in hand.

    Args:
        placeholders: parts without samples are handed out as a placeholder sample.
    """

    def __init__(self, ranks: Ranks, placeholders: bool) -> None:
        self._ranks, self._placeholders = ranks, placeholders
        self.left = 0

    def drawn(self, samples: int, who: Any) -> None:
        """Notes the number of samples that this rank has drawn. All ranks call this together.

        Args:
            who: the iterator of the DataLoader that draws.
        """
        cuts = [
            s.max_batch_size for s in samplers_around(who) if isinstance(s, BatchSplittingSampler)
        ]
        parts = max(1, -(-samples // min(cuts, default=max(samples, 1))))
        most = self._ranks.most(parts)
        self.left = most - parts
        if most > 1 and self._placeholders:
            raise ArgumentError(
                "rand_on_empty=True is not supported with BatchMemoryManager on a sharded model "
                "(fully_shard), where ranks fill up with empty batches. Omit rand_on_empty.",
                doc="sharded-models",
            )


def filling_of(ranks: Ranks | None, placeholders: bool) -> Filling | None:
    """Returns the `Filling` for the batches of these ranks, if their parameters are sharded."""
    return None if ranks is None or ranks.shards is None else Filling(ranks, placeholders)
