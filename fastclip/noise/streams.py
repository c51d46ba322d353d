"""Streams of random numbers of one's own: seeded once from a generator that others may set or read."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from fastclip._dynamo import disable_dynamo
from fastclip.errors import StepError
from fastclip.forks import this_process
from fastclip.noise.aside import set_aside
from fastclip.noise.forks import claim, seed_of


class OwnStream:
    """Random numbers of one purpose, from a generator of its own on each device.

    Torch's global generator makes initial weights and dropout, an evaluation seeds it in every epoch,
    and looks at models start it at a known seed while other threads train. So noise and rows are drawn
    from a generator of their own. It is seeded once, of two numbers of the global one, when it is first
    drawn from: what happens to that later changes nothing, and no two purposes share random words.

    It is never copied or pickled with its generators, and a fork has none of its parent's.

    Args:
        base: what it is seeded from, torch's global generator if None.
        purpose: what is drawn; streams of two purposes differ.
        number: of the rank, whose streams differ, too.
    """

    def __init__(self, base: torch.Generator | None, purpose: str, number: int = 0) -> None:
        self.base = None if base is torch.default_generator else base
        self.purpose, self.number = purpose, number
        self._made: dict[torch.device, torch.Generator] = {}
        self._process = this_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnStream:
        return OwnStream(self.base, self.purpose, self.number)

    def __reduce__(self) -> Any:
        return OwnStream, (self.base, self.purpose, self.number)

    @disable_dynamo
    def on(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Its generator on this device, which is made when it is asked for first.

        Raises:
            StepError: in a fork of a process that drew from the base.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._process == this_process() and device in self._made:  # without waiting for anybody
            return self._made[device]
        with set_aside():
            if self._process != this_process():
                self.forget()
            if device not in self._made:
                what = self.purpose if device.type == "cpu" else f"{self.purpose} on {device}"
                self._made[device] = own_generator(self.base, self.number, what, device)
            return self._made[device]

    def forget(self) -> None:
        """What is drawn next comes of new numbers of the base."""
        self._made, self._process = {}, this_process()


def own_generator(
    base: torch.Generator | None, number: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator of this rank's own.

    Scripts seed all ranks alike (`torch.manual_seed(0)`): rows would then be drawn together and noise
    would repeat, and noise that repeats can be subtracted.

    Args:
        base: what it is seeded from, torch's global generator if None; two numbers are drawn.
        number: of the rank. purpose: of the stream; streams of two purposes differ, too.

    Raises:
        StepError: another process, of which this one is a fork, drew from `base`.
    """
    where = "cpu" if base is None else base.device
    with set_aside():
        base = claim(base, purpose, where)
        words = torch.randint(2**62, (2,), dtype=torch.int64, device=where, generator=base)
    text = f"{purpose} of rank {number} from {words.numpy(force=True).tolist()}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    generator = torch.Generator(device)
    generator.manual_seed(seed % 2**63)
    return generator


def refuse_global_seed(generator: torch.Generator) -> None:
    """One seed makes one sequence of random words, whichever generator of the CPU has it.

    Two that are alike in their low 32 bits are one.

    Raises:
        StepError: torch's global generator was seeded alike.
    """
    if generator.device.type != "cpu":
        return
    with set_aside():
        alike = seed_of(generator) == seed_of(torch.default_generator)
    if alike:
        raise StepError(
            "noise_generator expects a seed of its own, got that of torch's global generator, so the "
            "noise would be made of the random words of initial weights and dropout: seed it otherwise, "
            "e.g. noise_generator.manual_seed(torch.initial_seed() + 1)"
        )
