"""What summed_grad holds, and which of backward, step and zero_grad may come next.

A logical batch is what one noisy step releases. It may be split into physical batches (skipped
steps, BatchMemoryManager), whose sums stay until the real step; no gradient is released twice.
"""

from __future__ import annotations

from fastclip.errors import StepError

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

    def step(self, *, skip: bool) -> None:
        """step() was called; `skip` if it only accumulates."""
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
                "optimizer.step() first"
            )
        if self.held:
            return False
        self.pending, self.released, self.broken = 0, False, False
        return True
