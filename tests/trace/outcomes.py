"""Whether what Python decides by a number of the batch changes what is computed.

Transformers' models warn where inputs hold padding and no mask was given: a branch on the batch, but one
that computes nothing else. A step is run again with the other answer to each such question. If all runs
are the same operations on the same operands, then the question has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastclip.trace.numbers import Trail

Run = Callable[[Mapping[int, bool]], "tuple[Trail | None, list[bool]]"]


def outcomes_agree(run: Run, most: int = 8) -> bool:
    """Explore the answers to yes-or-no questions that a step asks of its numbers.

    Args:
        run: runs the step with given answers to the questions of these numbers; others are answered as
            they are. Returns the trail of its operations, None if it failed, and all answers.
        most: runs, at most; with more to do the answer is no.
    """
    first, answers = run({})
    ahead = [[*answers[:k], not answers[k]] for k in range(len(answers))]
    runs = 1
    while ahead:
        wanted = ahead.pop()
        runs += 1
        if runs > most:
            return False
        trail, answers = run(dict(enumerate(wanted)))
        if trail is None or trail != first or answers[: len(wanted)] != wanted:
            return False
        ahead += [[*answers[:k], not answers[k]] for k in range(len(wanted), len(answers))]
    return first is not None
