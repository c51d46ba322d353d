"""Where generators stood when noise was drawn: noise that two releases share can be subtracted.

A script that seeds torch before each of its runs, or sets a generator back in every epoch, draws the
same noise again, and a ledger that counts both would compose them as if they were independent.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from fastclip._dynamo import disable_dynamo
from fastclip.errors import StepError

_SEED = 8
"""Bytes of the seed, with which the state of a CPU's generator begins."""


class DrawnStates:
    """The states from which the noise of one ledger's steps was drawn, as digests of 16 bytes.

    They stay in memory: a digest in a checkpoint would let anybody try seeds against it. So a copy knows
    none, and a ledger that goes on in another process, or from a checkpoint, begins anew.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __reduce__(self) -> Any:
        return DrawnStates, ()

    @disable_dynamo
    def note(self, generator: torch.Generator) -> None:
        """Noise is about to be drawn from where the generator stands; no device is waited for.

        Raises:
            StepError: noise was drawn from there before.
        """
        if generator.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # replays move it on
        words = generator.get_state().numpy().tobytes()
        if generator.device.type == "cpu":
            words = words[_SEED:]  # of which the words take a half
        state = hashlib.blake2b(words, digest_size=16).digest()
        if state in self._seen:
            raise StepError(
                "the noise of this step expects a state of its generator that no other step of this "
                "engine has drawn from, got one that has (a seed or state was set again), so whoever "
                "sees both could subtract it: seed every run otherwise or not at all, give a run that "
                "is to be repeated a FastPrivacyEngine of its own, or train with secure_mode=True"
            )
        self._seen.add(state)

    def join(self, other: DrawnStates) -> None:
        """Know what another knows, too."""
        self._seen |= other._seen
