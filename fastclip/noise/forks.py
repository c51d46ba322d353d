"""One stream of random numbers, one process: a fork holds its parent's generators.

Noise that two releases share is subtracted by whoever sees both; rows that two runs draw together are
no independent draws. A generator of a GPU needs no look: CUDA does not run in a fork of its process.
"""

from __future__ import annotations

import os
import sys

import torch

from fastclip.errors import StepError
from fastclip.forks import this_process
from fastclip.noise.aside import stands_elsewhere

_drawn: dict[int, tuple[torch.Generator, tuple[int, int], int]] = {}
"""By the generator's id: itself (before torch 2.13 none can be referred to weakly), who drew last from
it, and the seed that it had then."""

_ANOTHER = (0, 0)
"""A process, of which this one is a fork."""
_UNSEEDED = torch.Generator().initial_seed()
"""Of every generator that torch has just made."""
_MOST = 64
"""Generators up to which those are kept that nobody else holds."""


def seed_of(generator: torch.Generator) -> int:
    """What its numbers follow from: of a seed, the Mersenne Twister of a CPU takes the low 32 bits."""
    seed = generator.initial_seed()
    return seed % 2**32 if generator.device.type == "cpu" else seed


def claim(
    generator: torch.Generator | None, what: str, device: torch.device | str = "cpu"
) -> torch.Generator | None:
    """The generator itself, from which this process is about to draw `what`.

    Args:
        generator: torch's global one if None, of `device`.

    Raises:
        StepError: it was drawn from before this process was forked, and has not been given another seed
            since; or it was never given one.
    """
    if generator is not None and generator.initial_seed() == _UNSEEDED:
        raise StepError(
            f"{what} cannot come from a generator that was never seeded: torch.Generator() makes the "
            "same numbers in every process, which anybody can make again; call its seed(), or "
            "manual_seed with a number that nobody knows, or pass none"
        )
    where = torch.device(device) if generator is None else generator.device
    if where.type != "cpu":
        return generator
    stream = torch.default_generator if generator is None else generator
    process, seed = this_process(), seed_of(stream)
    _, drew, then = _drawn.get(id(stream), (stream, process, seed))
    if drew != process and then == seed:
        raise StepError(
            f"this process is a fork of one that drew {what} from the same generator, and both would "
            "draw the same: seed it anew here, with a seed that no other process has "
            "(torch.manual_seed, or manual_seed of the generator that was passed), or train with "
            "secure_mode=True"
        )
    if len(_drawn) >= _MOST and id(stream) not in _drawn:
        _forget()
    _drawn[id(stream)] = stream, process, seed
    return generator


def _know_parent() -> None:
    """In a fork: torch's global generator is the parent's, however often that seeded it since it drew.

    So is one that a look of the parent's had set to a seed that everybody knows.
    """
    stream = torch.default_generator
    if id(stream) in _drawn or stands_elsewhere():
        _drawn[id(stream)] = stream, _ANOTHER, seed_of(stream)


if hasattr(os, "register_at_fork"):  # after that of fastclip.noise.aside
    os.register_at_fork(after_in_child=_know_parent)


def _forget() -> None:
    """Let go of generators that nobody can draw from any more."""
    for held in [*_drawn.values()]:
        if sys.getrefcount(held[0]) <= 2:  # the tuple's, and the argument's
            _drawn.pop(id(held[0]), None)
