"""What summed_grad holds, and which of backward, step and zero_grad may come next.

A logical batch is what one noisy step releases. It may be split into physical batches (skipped
steps, BatchMemoryManager), whose sums stay until the real step; no gradient is released twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastclip.draws import Draws
from fastclip.errors import StepError
from fastclip.iteration import PhysicalBatch

_RETIRED = (
    "the model of this optimizer is not private any more (it was made private again, or cleaned up), "
    "so its gradients are not clipped for this optimizer; use the optimizer that the last "
    "make_private returned"
)
_BROKEN = (
    "the last backward pass or step failed halfway through its sums, or was interrupted; call "
    "optimizer.zero_grad() and run the logical batch again"
)


class LogicalBatch:
    """State of the sums between two real steps."""

    def __init__(self) -> None:
        self.accumulation_allowed = True
        self.pending = 0
        """Backward passes since the last step or zero_grad."""
        self.held = False
        """Skipped steps left sums of earlier physical batches."""
        self.released = False
        """A real step has used the sums, which have not been cleared since."""
        self.broken = False
        """The sums, and what is said of them here, do not agree: see `changing`."""
        self.accumulated = 1
        """Backward passes that the last step consumed."""
        self.retired = False
        """The model has been handed back, or to another engine: nothing may be released here."""
        self.flags: list[bool] = []
        """Of steps to come, as the training loop signals them: True only accumulates."""
        self.draws: Draws | None = None
        """Of the data loader; None where there is none."""
        self._found: PhysicalBatch | None = None

    def signal(self, skip: bool) -> None:
        """The step of the physical batch that comes next only accumulates, or does not.

        BatchMemoryManager's sampler says so while a loader draws that batch, which keeps it.
        """
        if self.draws is None or not self.draws.announce(skip):
            self.flags.append(skip)

    def next_skip(self, *, pop: bool = True) -> bool:
        """Whether the next step only accumulates."""
        announced = None if self.draws is None else self.draws.announced
        if announced is not None:
            return announced
        if not self.flags:
            return False
        return self.flags.pop(0) if pop else self.flags[0]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The sums, or what is said of them, change inside; an error (Ctrl-C) leaves them broken."""
        self.broken = True
        yield
        self.broken = False

    @contextmanager
    def abandon(self) -> Iterator[None]:
        """Forget the logical batch that is being gathered, whose sums are cleared inside."""
        with self.changing():
            yield
            self.flags.clear()
            if self.draws is not None:
                self.draws.give_up(forget=True)
            self.pending, self.held, self.released = 0, False, False

    # The engine's side

    @property
    def fresh(self) -> bool:
        """Nothing of this logical batch has been summed yet."""
        return self.pending == 0 and not self.held

    def begin_pass(self) -> None:
        """A backward pass is about to contribute."""
        if self.broken:
            raise StepError(_BROKEN)
        if self.pending and not self.accumulation_allowed:
            raise StepError(
                "Poisson sampling is not compatible with grad accumulation: this is the second "
                "backward pass of one physical batch, which would let a sample contribute twice. "
                "Call optimizer.step() after every forward/backward pass, use BatchMemoryManager "
                "for large batches, or wrap passes that must not train in engine.paused()"
            )

    def find(self, rows: int) -> bool:
        """The pass holds `rows` rows, of the batch in hand; False if it is empty and they made up.

        Raises:
            StepError, BatchSizeError: the data loader did not draw them.
        """
        self._found = None if self.draws is None else self.draws.find(rows)
        return self._found is None or self._found.draw.size > 0

    def end_pass(self, rows: int, calls: int) -> None:
        """The pass has contributed, through `calls` calls of the model."""
        if self.draws is not None and self._found is not None:
            self.draws.use(self._found, rows, calls)
        self._found = None
        self.pending += 1

    def contribute(self, passes: list[int]) -> bool:
        """Passes over so many rows each have been made since the last step; False: made up."""
        real = self.draws is None or self.draws.contribute(passes)
        self.pending += max(1, len(passes))
        return real

    @property
    def joined(self) -> int:
        """Batches that the logical batch consists of: draws, or backward passes where more."""
        return max(self.pending, 0 if self.draws is None else self.draws.joined)

    def step(self, *, skip: bool) -> None:
        """step() was called; `skip` if it only accumulates."""
        if self.retired:
            raise StepError(_RETIRED)
        if self.broken:
            raise StepError(_BROKEN)
        if self.released:
            raise StepError(
                "Gradients haven't been cleared since the last optimizer step. In order to obtain "
                "privacy guarantees you must call optimizer.zero_grad() on each step"
            )
        if not self.pending:
            raise StepError(
                "Per sample gradient is not initialized: step() came without a backward pass of "
                "the private model; call loss.backward() first, also for an empty batch"
            )
        if self.draws is not None and not skip:
            self.draws.check_release()
        with self.changing():
            self.accumulated, self.pending = self.joined, 0
            if self.draws is not None and not skip:
                self.draws.release()
            self.held, self.released = skip, not skip

    def keeps_sums(self) -> bool:
        """zero_grad() was called; whether the sums are of a split batch, which stay.

        Half-written sums never stay, nor do the earlier physical batches in them.
        """
        if self.broken:
            self.held = False
        if self.held and self.pending:
            raise StepError(
                "zero_grad() came between backward() and step() of a split batch: summed_grad "
                "already holds this physical batch together with the earlier ones. Call "
                "optimizer.step() first, or optimizer.discard_logical_batch() to give it all up"
            )
        return self.held

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """zero_grad() was called, and the sums are cleared inside."""
        with self.changing():
            yield
            if self.draws is not None and not self.released:
                self.draws.give_up(forget=False)
            self.pending, self.released = 0, False
