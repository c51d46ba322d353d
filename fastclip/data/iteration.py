"""One pass over a batch sampler: what it draws, what the loader hands out, what is said of misuse.

Loader workers draw ahead, so a batch is told by its place: the iterator of the DataLoader knows the
place of the batch that it draws, and how many it has handed out.
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
# What is said of a backward pass that may not train on the batch in hand.


ANOTHER = (
    "sums of an unfinished logical batch are held (its loop was left, or one of its physical batches "
    "was skipped), and this batch is another draw of the data loader: a sample of both would contribute "
    "twice to one release. Call optimizer.discard_logical_batch() where a loop is left or a batch "
    "skipped, and let every draw be a step of its own (BatchMemoryManager splits large ones)"
)
BORDER = (
    "batches of two passes over the data loader are accumulated for one step: a sample of both would "
    "contribute twice to one release. Call optimizer.step() at the end of each pass, or leave the last "
    "batches out with optimizer.discard_logical_batch()"
)
AHEAD = (
    "a physical batch was drawn before the one before it was stepped, so it is not known which of them "
    "ends the logical batch: leave the loop. Where a batch is skipped, call "
    "optimizer.discard_logical_batch() before the next one is drawn; where another library draws ahead, "
    "prepare the loader with Accelerate before BatchMemoryManager"
)
UNDRAWN = (
    "a backward pass came without a batch of the data loader that make_private returned: its batches "
    "have all been used, or this one comes from another loader, whose draws epsilon does not speak of. "
    "Iterate over the returned loader and use each of its batches once; wrap passes that must not "
    "train in engine.paused()"
)
EMPTY = (
    "a Poisson draw without rows was passed over: it is a step, of noise alone, and a loop that leaves "
    "it out shows when nobody was drawn, so that epsilon would be larger than what is accounted. Train "
    "on the empty batch as on the others; where the model or the loss cannot take 0 rows, pass "
    "rand_on_empty=True to make_private, which makes it a placeholder row that contributes nothing"
)
FORKED = (
    "this batch was drawn before this process was forked, and its parent may train on it, too: two "
    "releases of one draw are not two draws. Call optimizer.discard_logical_batch() and go on with the "
    "next batch, which is drawn here"
)
SHARED = (
    "another model has released this draw of the data loader: two releases of one draw are not two "
    "draws, and epsilon would be larger than what is accounted. Give each model a data loader of its "
    "own (make_private of the original loader returns one), or train both as parts of one module, by "
    "one make_private"
)
REORDERED = (
    "the rows of a draw come through a {name} around the sampler of the data loader that make_private "
    "returned, and a row's place in its draw says whose it is (unit_ids): iterate over that loader "
    "itself (BatchMemoryManager and Accelerate may be around it)"
)
HALVES = (
    "the calls of the model under one loss were given {rows} rows for {drawn} that the data loader "
    "drew, and rows of several calls are credited as the same samples: pass every call the whole batch, "
    "its rows in the same order (BatchMemoryManager splits large batches; leave out rows in the data "
    "set, not in collate_fn)"
)
AT_ONCE = (
    "the sampler drew {drawn} samples by one key, and the model was given {rows}, so several may be "
    "clipped as one. Give the model all samples that the data set returns, along its batch axis, or let "
    "the data set return one sample for each key"
)
TOO_MANY = (
    "expected at most {left} samples in this backward pass, for the data loader drew {drawn} rows "
    "({used} of them have contributed to this step), got {rows}: a row of the data set must stay one "
    "row of the batch, for each is clipped as one. Use each batch once, and let neither the data set "
    "nor collate_fn make several rows of one (views=K of make_private is for K views of each sample); "
    "where tensors of one batch are joined for one call (torch.cat), call the model once for "
    "each, or let its forward join them"
)
ONE_PASS = (
    "a batch of a stream (IterableDataset) serves one backward pass in a step, for it is not known how "
    "many rows the stream gave, so that a second pass may hold the same rows again: pass the whole "
    "batch through the model at once and take a step before it is used again (average the losses of "
    "several views inside the model's row); where the batch is too large, make batch_size smaller and "
    "call optimizer.step() after several batches"
)
UNCLEAR = (
    "several batches have been drawn ahead, one of them is empty (rand_on_empty=True puts a placeholder "
    "row in its place), and it cannot be told whether that row is the one of this backward pass; draw "
    "the next batch after the step, or set rand_on_empty=False"
)
UNCLEAR_UNITS = (
    "several batches have been drawn and not used, and it cannot be told which of them this backward "
    "pass trains on, so neither whose its rows are: use every batch, and draw the next one after the "
    "step (neither prefetch, keep nor skip; iterate over the returned loader itself)"
)
UNKNOWN_CUT = (
    "a sampler around the data loader's has split a draw of units, and it is not known where, so that "
    "rows of one unit may be in two parts: split by Opacus' BatchMemoryManager, "
    "or bound the draw by max_batch_size and max_samples_per_unit"
)
SHARDED = (
    "the data loader that make_private returned draws this rank's share of the rows, and Accelerate's "
    "{name} around its sampler would share it out again, among {ranks} ranks: prepare everything but "
    "the data loader with Accelerate, and iterate over the one that make_private returned (move its "
    "batches with .to(accelerator.device))"
)


# -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Iteration:
    """One pass over the batch sampler."""

    reader: weakref.ref[Any] | None = None
    """The iterator of the DataLoader that draws, which has the data set and the loader's workers."""
    handed: float = float("inf")
    """Places of batches below it have been handed out."""
    over: bool = False
    """The sampler has no more draws."""
    drawn: int = 0
    used: bool = False
    """A batch of it has contributed."""
    recorded: float = float("inf")
    """Least noise multiplier at which steps of this pass were accounted."""
    cuts: int = 0
    """Of the ledger, when they were."""
    newest: PhysicalBatch | None = None
    stream: bool = False
    """A draw is a number of samples that a stream is asked for, which may give fewer, or none."""
    first: int = 0
    """Place of the first draw."""

    def next_place(self, who: Any) -> int:
        """Place of the draw that is being made, which is counted.

        The draws of a stream are alike, so that the number of batches that were handed out tells of
        which: of those drawn for a worker whose stream has ended none is.

        Args:
            who: the iterator of the DataLoader that draws; None where none does.
        """
        if self.stream and who is not None and not self.drawn:
            self.first = int(getattr(who, YIELDED))
        place = self.first + self.drawn if self.stream or who is None else place_of(who)
        self.drawn += 1
        self.look()
        return place

    def read_by(self, who: Any) -> None:
        """`who`, the iterator of a DataLoader, draws; what it has handed out in the end stays known.

        It is told by its attributes when it is gone, so that nobody needs to keep it alive for that.
        """
        if self.reader is not None and self.reader() is who:
            return
        me = weakref.ref(self)
        facts = vars(who) if self.stream or RECEIVED in vars(who) else {}

        def gone(reader: weakref.ref[Any]) -> None:
            iteration = me()
            if iteration is not None and iteration.reader is reader:
                iteration._note(facts)
                iteration.reader = None  # and with it these facts: the garbage collector keeps them

        self.reader = weakref.ref(who, gone)

    @property
    def alive(self) -> bool:
        """Its DataLoader's iterator is held by somebody."""
        return self.reader is not None and self.reader() is not None

    def look(self) -> float:
        """`handed` as it is now; of a reader that is gone, as it was last."""
        who = None if self.reader is None else self.reader()
        if who is not None:
            self._note(vars(who))
        return self.handed

    def _note(self, facts: Mapping[str, Any]) -> None:
        # without workers each is handed out as it is drawn
        self.handed = float(facts[YIELDED] if self.stream else facts.get(RECEIVED, "inf"))

    def end_of(self, who: Any) -> None:
        """`who` begins another pass: worker processes that stay count from 0 again."""
        if who is not None and self.reader is not None and self.reader() is who:
            self.reader = None
            if self.over:
                self.handed = float("inf")


@dataclass(eq=False)
class SampledBatch:
    """What the batch sampler drew at once: the samples of one logical batch."""

    size: int
    iteration: Iteration
    units: UnitBatch | None = None
    """Whose its samples are, where units are drawn."""
    credited: int = 0
    """Samples that have contributed."""
    called_twice: bool = False
    """A backward pass went through several calls of the model, whose samples must be the same."""
    process: tuple[int, int] = field(default_factory=this_process)
    """In which it was drawn."""
    released_by: list[Any] = field(default_factory=list)
    """Who has released it; one list for all models that hear of the draws of this sampler."""
    at_once: bool = False
    """The data set was asked for several samples by one key, and lays them out along an axis itself."""

    def credit(self, samples: int, calls: int) -> None:
        """A backward pass over so many of its samples, through `calls` calls of the model, contributes.

        Of a stream's batch, which may hold fewer samples than were drawn, none are left then.
        """
        if self.size:
            self.credited = self.size if self.iteration.stream else self.credited + samples
        self.called_twice |= calls > 1

    def check_release(self, who: Any, independent: bool) -> None:
        """Refuse a release whose entries are not one sample each, or not a draw of its own.

        Args:
            who: is about to release it. independent: every release is accounted as another draw.

        Raises:
            StepError: another model has released this draw.
            BatchSizeError: several calls of the model held fewer samples than were drawn, or a pass held
                fewer of the samples that the data set returned at once.
        """
        if independent and any(other is not who for other in self.released_by):
            raise StepError(SHARED)
        if self.called_twice and self.credited < self.size:
            raise BatchSizeError(HALVES.format(rows=self.credited, drawn=self.size))
        if self.at_once and self.credited < self.size:
            raise BatchSizeError(AT_ONCE.format(rows=self.credited, drawn=self.size))


@dataclass(eq=False)
class PhysicalBatch:
    """What the DataLoader hands out at once: a draw, or a part of one."""

    draw: SampledBatch
    place: int
    skip: bool | None = None
    """Whether its step only accumulates, where a splitting sampler says so."""
    number: int | None = None
    """Which part of the draw it is, where a splitting sampler says that it is one."""

    @property
    def samples_left(self) -> int:
        """Samples that may still contribute."""
        return self.draw.size - self.draw.credited

    @staticmethod
    def rows_of(out: Collection[PhysicalBatch]) -> frozenset[int]:
        """The numbers of samples that these hold; 0 alone where it is not known how draws are split, or
        how many samples a stream gave."""
        unknown = any(b.skip is not None or b.draw.iteration.stream for b in out)
        return frozenset(b.samples_left for b in out if not (unknown and b.draw.size))

    def fits(self, samples: int) -> bool:
        """Whether it may hold `samples` samples; whatever stands for an empty draw contributes
        nothing."""
        return not self.draw.size or samples <= self.samples_left

    def too_many(self, samples: int) -> BatchSizeError:
        """The refusal of a backward pass over so many samples."""
        draw = self.draw
        if draw.iteration.stream and draw.credited:
            return BatchSizeError(ONE_PASS)
        return BatchSizeError(
            TOO_MANY.format(
                left=self.samples_left, drawn=draw.size, used=draw.credited, rows=samples
            )
        )


def leaves_empty(passed_over: Collection[PhysicalBatch], iteration: Iteration) -> bool:
    """Whether the loop has gone on without an empty draw of this pass, which is a step like any other.

    Such a loop shows when nobody was drawn, and takes its steps with a rate that is larger than the one
    that is accounted: q / (1 - (1 - q)^N).
    """
    return any(not b.draw.size and b.draw.iteration is iteration for b in passed_over)


def reading() -> Any:
    """The iterator of a DataLoader that is drawing just now, if one is.

    It may be any DataLoader around the sampler (BatchMemoryManager's, Accelerate's), of which nothing
    but this call is to be seen.
    """
    found = sampler_calls.innermost()
    return None if found is None else found[0]


def samplers_around(who: Any) -> Iterator[Any]:
    """The samplers around the one that draws, from the outermost to the last that is known.

    Args:
        who: the iterator of a DataLoader.
    """
    sampler: Any = getattr(who, INDEX_SAMPLER, None)
    while sampler is not None and not hasattr(type(sampler), "unwatched"):
        yield sampler
        if isinstance(sampler, BatchSplittingSampler):
            sampler = sampler.sampler
        elif _accelerates(sampler):  # which skips whole draws
            sampler = getattr(sampler, "batch_sampler", None)
        else:
            return


def sampler_between(who: Any) -> str | None:
    """The name of a sampler of the user's own around the one that draws; None where there is none.

    Args:
        who: the iterator of a DataLoader.
    """
    for sampler in samplers_around(who):
        if not isinstance(sampler, BatchSplittingSampler) and not _accelerates(sampler):
            return type(sampler).__name__
    return None


def most_samples(who: Any) -> int | None:
    """Samples of a physical batch into which a draw is cut; None where it is not.

    Args:
        who: the iterator of the DataLoader that draws.
    """
    cuts = [s.max_batch_size for s in samplers_around(who) if isinstance(s, BatchSplittingSampler)]
    return int(cuts[-1]) if cuts else None


def check_not_sharded(who: Any) -> None:
    """Refuse a sampler of Accelerate's that hands each rank but a part of what is drawn.

    Args:
        who: the iterator of the DataLoader that draws; None where none does.

    Raises:
        ArgumentError: with the way out.
    """
    for sampler in samplers_around(who):
        ranks = getattr(sampler, "num_processes", 1) if _accelerates(sampler) else 1
        if ranks > 1:
            raise ArgumentError(SHARDED.format(name=type(sampler).__name__, ranks=ranks))


def _accelerates(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("accelerate.")


def place_of(who: Any) -> int:
    """Place, among the batches that are handed out, of the one being drawn."""
    sent = getattr(who, SENT, None)
    return int(getattr(who, YIELDED) if sent is None else sent)


# -------------------------------------------------------------------------------------------------
# Ranks that go through one model together: each draw is cut into as many physical batches on all.
#
# Where parameters are spread over ranks, every forward and backward pass gathers them from all. A
# rank that has drawn fewer samples than another one, and cuts them into fewer parts
# (BatchMemoryManager), goes on with parts without samples, which contribute nothing.


class Filling:
    """How many parts without samples are still to come after those of the draw in hand.

    Args:
        placeholders: parts without samples are handed out as a placeholder sample.
    """

    def __init__(self, ranks: Ranks, placeholders: bool) -> None:
        self._ranks, self._placeholders = ranks, placeholders
        self.left = 0

    def drawn(self, samples: int, who: Any) -> None:
        """This rank has drawn so many samples. All ranks come here.

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
                "BatchMemoryManager on a model that is spread over ranks (fully_shard) hands out "
                "batches without rows, so that all ranks go through the model equally often; omit "
                "rand_on_empty"
            )


def filling_of(ranks: Ranks | None, placeholders: bool) -> Filling | None:
    """What fills up the draws of these ranks, where they need it."""
    return None if ranks is None or ranks.shards is None else Filling(ranks, placeholders)
