"""Random numbers of one rank: no two ranks draw from one stream, though all were seeded alike."""

from __future__ import annotations

import hashlib

import torch

from fastclip.noise.forks import claim


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
    base = claim(base, purpose, where)
    words = torch.randint(2**62, (2,), dtype=torch.int64, device=where, generator=base)
    text = f"{purpose} of rank {number} from {words.tolist()}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    generator = torch.Generator(device)
    generator.manual_seed(seed % 2**63)
    return generator
