"""What the sums of a logical batch are, and what may be done with them next: one table.

No gradient is released twice, none is dropped unseen, and nothing of half-written sums goes out. Each
call of the training loop is an event, which leads from the state of the sums to another, or is refused.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Of the sums between two real steps."""

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
    """What a training loop is told."""

    RETIRED = (
        "the model of this optimizer is not private any more (it was made private again, or cleaned "
        "up), so its gradients are not clipped for this optimizer; use the optimizer that the last "
        "make_private returned"
    )
    BROKEN = (
        "the last backward pass or step failed halfway through its sums, or was interrupted; call "
        "optimizer.zero_grad() and run the logical batch again"
    )
    SECOND_PASS = (
        "Poisson sampling is not compatible with grad accumulation: this is the second "
        "backward pass of one physical batch, which would let a sample contribute twice. "
        "Call optimizer.step() after every forward/backward pass, or add the losses of one batch, "
        "and call backward() once; use BatchMemoryManager for large batches, and wrap passes that must "
        "not train in engine.paused()"
    )
    UNCLEARED = (
        "Gradients haven't been cleared since the last optimizer step. In order to obtain "
        "privacy guarantees you must call optimizer.zero_grad() on each step"
    )
    NO_PASS = (
        "Per sample gradient is not initialized: step() came without a backward pass of "
        "the private model; call loss.backward() first, also for an empty batch"
    )
    SPLIT = (
        "zero_grad() came between backward() and step() of a split batch: summed_grad "
        "already holds this physical batch together with the earlier ones. Call "
        "optimizer.step() first, or optimizer.discard_logical_batch() to give it all up"
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
TABLE = {state: dict(zip(_COLUMNS, row, strict=True)) for state, row in _ROWS.items()}
"""State -> event -> the next state, or why it is refused."""
