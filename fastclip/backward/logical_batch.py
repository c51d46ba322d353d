"""One logical batch: the table of its states, its sampled batches, and the steps signaled to it.

A logical batch is what one noisy step releases. It may be split into physical batches (skipped steps,
BatchMemoryManager). Their sums stay until the real step, and no gradient is released twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from fastclip.accounting.steps import Spent
from fastclip.core.system import this_process
from fastclip.data.draws import SampledBatches
from fastclip.data.iteration import FORKED, PhysicalBatch
from fastclip.errors import BatchSizeError, StepError
from fastclip.ops.units import UnitSamples

# -------------------------------------------------------------------------------------------------
# The states of the sums of a logical batch, and what may follow each of them: one table.
#
# No gradient is released twice, none is dropped silently, and half-written sums are never released.
# Each call of the training loop is an event, which leads from the state of the sums to another, or
# raises an error.


class State(Enum):
    """State of the sums between two real steps."""

    EMPTY = "nothing has been summed"
    GATHERED = "backward passes have contributed"
    HELD = "a step that only accumulates left the sums of physical batches"
    JOINED = "the next physical batch has contributed to held sums"
    RELEASED = "a real step has used the sums, and they have not been cleared"
    STALE = "a backward pass has contributed to sums that were released"
    BROKEN = "a change of the sums failed halfway, or was interrupted"
    RETIRED = "the model has been handed back, or to another engine"


class Event(Enum):
    """What happens to the sums."""

    PASS = "a backward pass contributes"
    ALONE = "the same, where a physical batch has one pass only (Poisson sampling)"
    SKIP = "step() that only accumulates"
    STEP = "step() that releases"
    CLEAR = "zero_grad()"
    ABANDON = "discard_logical_batch()"


class Refusal(Enum):
    """Why an event raises an error: its message."""

    RETIRED = (
        "The model of this optimizer was made private again or cleaned up, so its gradients are not "
        "clipped for this optimizer. Use the optimizer that the last make_private returned."
    )
    BROKEN = (
        "The last backward pass or step failed or was interrupted, so its sums are incomplete. Call "
        "optimizer.zero_grad(), and run the logical batch again."
    )
    SECOND_PASS = (
        "Poisson sampling is not compatible with grad accumulation: two backward passes came before one "
        "optimizer.step(), so a sample of both would contribute twice. Call optimizer.step() after each "
        "pass, and let BatchMemoryManager split large batches."
    )
    UNCLEARED = (
        "Gradients haven't been cleared since the last optimizer step, so the privacy guarantee would "
        "not hold. Call optimizer.zero_grad() on each step."
    )
    NO_PASS = (
        "Per sample gradient is not initialized: step() was called without a backward pass of the "
        "private model. Call loss.backward() first, also for an empty batch."
    )
    SPLIT = (
        "zero_grad() was called between backward() and step() of a split batch, whose sums already "
        "include this physical batch. Call optimizer.step() first, or "
        "optimizer.discard_logical_batch() to drop the whole batch."
    )


_COLUMNS = tuple(Event)
_ROWS: dict[State, tuple[State | Refusal, ...]] = {  # PASS, ALONE, SKIP, STEP, CLEAR, ABANDON
    State.EMPTY: (
        State.GATHERED, State.GATHERED, Refusal.NO_PASS, Refusal.NO_PASS, State.EMPTY, State.EMPTY,
    ),
    State.GATHERED: (
        State.GATHERED, Refusal.SECOND_PASS, State.HELD, State.RELEASED, State.EMPTY, State.EMPTY,
    ),
    State.HELD: (
        State.JOINED, State.JOINED, Refusal.NO_PASS, Refusal.NO_PASS, State.HELD, State.EMPTY,
    ),
    State.JOINED: (
        State.JOINED, Refusal.SECOND_PASS, State.HELD, State.RELEASED, Refusal.SPLIT, State.EMPTY,
    ),
    State.RELEASED: (
        State.STALE, State.STALE, Refusal.UNCLEARED, Refusal.UNCLEARED, State.EMPTY, State.EMPTY,
    ),
    State.STALE: (
        State.STALE, Refusal.SECOND_PASS, Refusal.UNCLEARED, Refusal.UNCLEARED, State.EMPTY,
        State.EMPTY,
    ),
    State.BROKEN: (
        Refusal.BROKEN, Refusal.BROKEN, Refusal.BROKEN, Refusal.BROKEN, State.EMPTY, State.EMPTY,
    ),
    State.RETIRED: (
        State.RETIRED, State.RETIRED, Refusal.RETIRED, Refusal.RETIRED, State.RETIRED,
        State.RETIRED,
    ),
}  # fmt: skip
TABLE = {state: dict(zip(_COLUMNS, sample, strict=True)) for state, sample in _ROWS.items()}
"""State -> event -> the next state, or the reason why it raises an error."""


# -------------------------------------------------------------------------------------------------


_DONE = (State.RELEASED, State.STALE, State.RETIRED)
"""States in which no sampled batch waits for a release."""


class LogicalBatch:
    """State of the sums between two real steps."""

    def __init__(self) -> None:
        self.accumulation_allowed = True
        """Passes may be joined without a step between them."""
        self.pending = 0
        """Backward passes since the last step or zero_grad."""
        self.accumulated = 1
        """Backward passes that the last step consumed."""
        self._state = State.EMPTY
        """State of the sums when their last change began."""
        self._changing = False
        """A change of the sums has begun and not ended."""
        self.flags: list[bool] = []
        """One per step to come, as the training loop signals them: True only accumulates."""
        self.draws: SampledBatches | None = None
        """Of the data loader; None if there is none."""
        self.account: Any = None
        """Account of the steps on these sums; its `ledger` records them."""
        self.last_was_real, self.real_steps = False, 0
        """Whether the last step of the training loop was a release, and how many were."""
        self._spent: Spent | None = None
        """In a copy, which has no ledger: what the original was trained with until then."""
        self._found: PhysicalBatch | None = None
        self._begun: PhysicalBatch | None = None
        """The batch with the units of the running pass; a loader in another thread may continue."""
        self._fills = False
        """The next pass is over a placeholder sample that stands for no sampled batch."""
        self.next_units: UnitSamples | None = None
        """Which samples of the next pass are clipped as one; that pass uses it up."""
        self.views = 1
        """Samples of the model's batch that are views of one sample, next to each other."""

    def signal(self, skip: bool) -> None:
        """Signal whether the step of the next physical batch only accumulates.

        BatchMemoryManager's sampler does so while a loader samples that batch, which keeps the signal.
        """
        filling = None if self.draws is None else self.draws.filling
        skip = skip or (filling is not None and filling.left > 0)
        if self.draws is None or not self.draws.announce(skip):
            self.flags.append(skip)

    def next_skip(self, *, pop: bool = True) -> bool:
        """Whether the next step only accumulates."""
        last = None if self.draws is None else self.draws.last
        if last is not None and last.skip is not None:
            return last.skip
        if not self.flags:
            return False
        return self.flags.pop(0) if pop else self.flags[0]

    # Its state

    @property
    def state(self) -> State:
        """State of the sums; the table of states says what it allows."""
        broken = self._changing and not self.retired
        return State.BROKEN if broken else self._state

    @property
    def retired(self) -> bool:
        """The model has been handed back, or to another engine: nothing may be released here."""
        return self._state is State.RETIRED

    def retire(self) -> None:
        """Nothing may be released here any more."""
        self._state = State.RETIRED

    def _after(self, event: Event) -> State:
        """The state that an event leads to.

        Raises:
            StepError: the table does not allow it.
        """
        outcome = TABLE[self.state][event]
        if isinstance(outcome, Refusal):
            retired = outcome is Refusal.RETIRED
            raise StepError(outcome.value, doc="optimizers" if retired else None)
        return outcome

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The sums, or their records, change inside; an error (Ctrl-C) leaves them broken."""
        self._changing = True
        yield
        self._changing = False

    def unchanged(self) -> None:
        """The change that has begun raised an error before it touched the sums."""
        self._changing = False

    def break_off(self) -> None:
        """Mark the sums as broken: a part of a common contribution has failed."""
        self._changing = True

    @contextmanager
    def abandon(self) -> Iterator[None]:
        """Forget the logical batch that is being gathered; its sums are cleared inside."""
        after = self._after(Event.ABANDON)
        with self.changing():
            yield
            self.flags.clear()
            self.next_units, self._fills = None, False
            if self.draws is not None:
                self.draws.give_up(forget=True)
            self.pending, self._state = 0, after

    # The engine's side

    @property
    def fresh(self) -> bool:
        """Nothing of this logical batch has been summed yet."""
        return self._state in (State.EMPTY, State.RELEASED)

    def begin_pass(self) -> None:
        """A backward pass is about to contribute.

        Raises:
            StepError: it may not.
        """
        self._after(Event.PASS if self.accumulation_allowed else Event.ALONE)

    def _contributed(self, passes: int) -> None:
        """Count so many passes that have contributed, as `begin_pass` allowed."""
        after = TABLE[self._state][Event.PASS]
        assert isinstance(after, State)
        self.pending, self._state = self.pending + passes, after

    def fill(self) -> None:
        """The next pass is over a placeholder sample, and contributes nothing to the sampled batch.

        Ranks that train one model together make equally many passes, whatever batches they have.
        """
        self._fills = True

    def find(self, samples: int) -> bool:
        """Find the sampled batch of a pass over `samples` samples; False if it is a placeholder.

        Raises:
            StepError, BatchSizeError: the data loader did not sample them.
        """
        if self._fills:
            return False
        self._found, self._begun = self._begun, None
        if self._found is None and self.draws is not None:
            self._found = self.draws.find(self._samples(samples))
        return self._found is None or self._found.draw.size > 0

    @property
    def whole(self) -> int:
        """Entries of the sampled batch that `find` has found. 0: unknown, or a manager splits it."""
        found = self._found
        return 0 if found is None or found.skip is not None else found.draw.size * self.views

    def in_hand(self) -> frozenset[int]:
        """The numbers of samples that the next pass may hold; empty if unknown."""
        samples = frozenset() if self.draws is None else self.draws.in_hand
        return frozenset(n * self.views for n in samples)

    def _samples(self, entries: int) -> int:
        """The number of samples of which so many entries of the model's batch are the views.

        Raises:
            BatchSizeError: it is not a whole number.
        """
        samples, rest = divmod(entries, self.views)
        if rest:
            raise BatchSizeError(
                f"views={self.views} expects {self.views} entries per sample in this backward pass, "
                f"got {entries} entries. Give the model every view of every sample, in the order of "
                f"x.repeat_interleave({self.views}, 0).",
                doc="privacy-units",
            )
        return samples

    def unit_samples(self, entries: int) -> UnitSamples | None:
        """Which of the `entries` of the pass that begins are clipped as one; None: each by itself.

        Raises:
            StepError, BatchSizeError: the data loader did not sample them of those units.
        """
        units, self.next_units, self._begun = self.next_units, None, None
        if self._fills:
            return units
        samples = self._samples(entries)
        if units is None and self.draws is not None:
            self._begun, units = self.draws.units_of(samples, self.views)
        if units is not None and len(units) != samples:
            raise BatchSizeError(
                f"The backward pass holds {samples} samples, but the units of {len(units)} samples are "
                "known. Give the model every sample of the loader's batch, in its order.",
                doc="privacy-units",
            )
        return units if units is None or self.views == 1 else units.of_views(self.views)

    def check_no_units(self) -> None:
        """Check that no units are in use, because single samples are clipped.

        Raises:
            StepError: samples are to be clipped by units.
        """
        if self.next_units is not None or (self.draws is not None and self.draws.by_units):
            raise StepError(
                "unit_ids asks for clipping by units, but Opacus' modes clip and protect single samples "
                "only. Omit grad_sample_mode to use the fast mode.",
                doc="privacy-units",
            )

    def end_pass(self, samples: int, calls: int) -> None:
        """The pass has contributed, through `calls` calls of the model."""
        if self.draws is not None and not self._fills:
            if self._found is not None:
                self.draws.use(self._found, samples // self.views, calls)
            elif not self.draws.watching:
                self.draws.unknown.gathered += 1
        self._found, self._fills = None, False
        self._contributed(1)

    def contribute(self, passes: list[int]) -> bool:
        """Count passes over so many samples each since the last step; False if placeholders."""
        number = max(1, len(passes))
        if self.draws is not None and not self.draws.watching:
            self.draws.unknown.gathered += number
        real = self.draws is None or self.draws.contribute(passes)
        self._contributed(number)
        return real

    @property
    def joined(self) -> int:
        """Batches in the logical batch: sampled batches, or backward passes if there are more."""
        return max(self.pending, 0 if self.draws is None else self.draws.joined)

    @property
    def consumed(self) -> int:
        """Batches that the current (or last) step consumes: scales the sampling rate."""
        return self.joined if self.pending else self.accumulated

    def step(self, *, skip: bool) -> None:
        """step() was called; `skip` if it only accumulates.

        Raises:
            StepError: there is nothing to release, or it must not be released.
        """
        after = self._after(Event.SKIP if skip else Event.STEP)
        if self.draws is not None and not skip:
            self._check_process(self.draws)
            self.draws.check_release()
        with self.changing():
            self.accumulated, self.pending = self.joined, 0
            if self.draws is not None and not skip:
                self.draws.release()
                self.draws.unknown.release()
            self._state = after

    def count_release(self) -> None:
        """A real step has ended."""
        self.last_was_real, self.real_steps = True, self.real_steps + 1

    def _check_process(self, draws: SampledBatches) -> None:
        """Check that no fork of this process, or its parent, has the same sampled batch."""
        last = draws.last
        if draws.independent and last is not None and last.draw.process != this_process():
            raise StepError(FORKED)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no account yet, but its weights have been trained with these steps."""
        return {**self.__dict__, "account": None, "_spent": self.spent}

    @property
    def spent(self) -> Spent | None:
        """What the model was trained with, as the ledger stands now."""
        ledger = getattr(self.account, "ledger", None)
        return self._spent if ledger is None else Spent(ledger.segments(), ledger.protected)

    def keeps_sums(self) -> bool:
        """Whether zero_grad() keeps the sums, because they belong to a split batch.

        Half-written sums are never kept, nor are the earlier physical batches in them.

        Raises:
            StepError: in the middle of a split batch.
        """
        return self._after(Event.CLEAR) is State.HELD

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """Clear the sums inside, because zero_grad() was called."""
        after = self._after(Event.CLEAR)
        with self.changing():
            yield
            if self.draws is not None and self._state not in _DONE:
                self.draws.give_up(forget=False)
            self.pending, self._state = 0, after
