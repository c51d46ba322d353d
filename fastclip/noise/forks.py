"""One stream of random numbers, one process: a fork holds its parent's generators.

Noise that two releases share is subtracted by whoever sees both; rows that two runs draw together are
no independent draws. A generator of a GPU needs no look: CUDA does not run in a fork of its process.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from fastclip.errors import StepError
from fastclip.forks import this_process

_drawn: WeakKeyDictionary[torch.Generator, tuple[tuple[int, int], int]] = WeakKeyDictionary()
"""Who drew last from each generator, and the seed that it had then."""


def claim(
    generator: torch.Generator | None, what: str, device: torch.device | str = "cpu"
) -> torch.Generator | None:
    """The generator itself, from which this process is about to draw `what`.

    Args:
        generator: torch's global one if None, of `device`.

    Raises:
        StepError: it was drawn from before this process was forked, and has not been given another seed
            since.
    """
    where = torch.device(device) if generator is None else generator.device
    if where.type != "cpu":
        return generator
    stream = torch.default_generator if generator is None else generator
    now, before = (this_process(), stream.initial_seed()), _drawn.get(stream)
    if before == now:
        return generator
    if before is not None and before[0] != now[0] and before[1] == now[1]:
        raise StepError(
            f"this process is a fork of one that drew {what} from the same generator, and both would "
            "draw the same: seed it anew here, with a seed that no other process has "
            "(torch.manual_seed, or manual_seed of the generator that was passed), or train with "
            "secure_mode=True"
        )
    _drawn[stream] = now
    return generator
