"""What summed_grad holds, and which of backward, step and zero_grad may come next.

A logical batch is what one noisy step releases. It may be split into physical batches (skipped
steps, BatchMemoryManager), whose sums stay until the real step; no gradient is released twice.
"""

from __future__ import annotations

from fastclip.errors import StepError

_ABANDONED = (
    "sums of an unfinished logical batch are held (its loop was left, or one of its physical batches "
    "was skipped) and the data loader has moved on: a sample of both batches would contribute twice "
    "to one release. Call optimizer.discard_logical_batch() where a loop is left or a batch skipped"
)
_AHEAD = (
    "a physical batch was drawn before the one before it was stepped, so it is not known which of them "
    "ends the logical batch: leave the loop. Where a batch is skipped, call "
    "optimizer.discard_logical_batch() before the next one is drawn; where another library draws ahead, "
    "prepare the loader with Accelerate before BatchMemoryManager"
)
_RETIRED = (
    "the model of this optimizer is not private any more (it was made private again, or cleaned up), "
    "so its gradients are not clipped for this optimizer; use the optimizer that the last "
    "make_private returned"
)
_BROKEN = (
    "the last backward pass failed halfway through its sums; call optimizer.zero_grad() and run the "
    "logical batch again"
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
        """A backward pass failed while it wrote the sums."""
        self.accumulated = 1
        """Backward passes that the last step consumed."""
        self.retired = False
        """The model has been handed back, or to another engine: nothing may be released here."""
        self.flags: list[bool] = []
        """Of the physical batches drawn but not yet stepped: True only accumulates."""
        self.lockstep = False
        """Batches are used as they are drawn (no worker process draws ahead)."""
        self._iterations = 0
        self._drawn = 0
        self._ahead = False
        """A physical batch was drawn while another waited for its step."""
        self._source: tuple[int, int] | None = None
        """Where in the data loader's draws the logical batch began."""

    # The data loader's side

    def begin_drawing(self) -> None:
        """An iteration over the data begins: flags of one that was left are worth nothing."""
        self._iterations += 1
        self.flags.clear()
        self._ahead = False

    def draw(self) -> None:
        """The data loader has drawn a logical batch."""
        self._drawn += 1

    def signal(self, skip: bool) -> None:
        """The step of the physical batch that comes next only accumulates, or does not."""
        if self.lockstep and self._iterations and self.flags:
            self.flags.clear()  # of a batch that was drawn and never stepped
            self._ahead = True
        self.flags.append(skip)

    def _position(self) -> tuple[int, int]:
        return self._iterations, self._drawn if self.lockstep else 0

    def abandon(self) -> None:
        """Forget the logical batch that is being gathered: nothing of it is released."""
        self.pending, self.held, self.released, self.broken = 0, False, False, False
        if self.lockstep and not self._ahead:
            self.flags.clear()  # of the batch in hand
        elif self.flags:  # of which batch they are cannot be told any more: the loop must be left
            self._ahead = True

    # The engine's side

    @property
    def fresh(self) -> bool:
        """Nothing of this logical batch has been summed yet."""
        return self.pending == 0 and not self.held

    def begin_pass(self) -> None:
        """A backward pass is about to contribute."""
        if self.broken:
            raise StepError(_BROKEN)
        if self._ahead:
            raise StepError(_AHEAD)
        if self.fresh:
            self._source = self._position()
        elif self.held and self._source != self._position():
            raise StepError(_ABANDONED)
        if self.pending and not self.accumulation_allowed:
            raise StepError(
                "Poisson sampling is not compatible with grad accumulation: this is the second "
                "backward pass of one physical batch, which would let a sample contribute twice. "
                "Call optimizer.step() after every forward/backward pass, use BatchMemoryManager "
                "for large batches, or wrap passes that must not train in engine.paused()"
            )

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
        self.accumulated, self.pending = self.pending, 0
        self.held, self.released = skip, not skip

    def zero_grad(self) -> bool:
        """zero_grad() was called; True if the sums must be cleared.

        Half-written sums are always cleared, with the earlier physical batches in them.
        """
        if self.broken:
            self.held = False
        if self.held and self.pending:
            raise StepError(
                "zero_grad() came between backward() and step() of a split batch: summed_grad "
                "already holds this physical batch together with the earlier ones. Call "
                "optimizer.step() first, or optimizer.discard_logical_batch() to give it all up"
            )
        if self.held:
            return False
        self.pending, self.released, self.broken = 0, False, False
        return True
