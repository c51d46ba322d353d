"""Noise sources of a run, and how random bits become normal variables.

Both sources are for the noise of gradients and counts. `SecureNoise` is the source of
`FastPrivacyEngine(secure_mode=True)`. docs/secure_mode.md says what it protects from and what not.
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.building import how_to_build
from fastclip.core.compiler import disable_dynamo
from fastclip.errors import StepError, say
from fastclip.ops.clip import add_totals
from fastclip.ops.dispatch import host_operation
from fastclip.ops.random import KeyStream, OwnStream, check_not_globally_seeded, claim

# -------------------------------------------------------------------------------------------------
# Random bits to normal variables: Box and Muller (1958), safe at the edges, guarded if asked.
#
# A pair of normals is r cos(pi t), r sin(pi t) with r = sqrt(-2 log u), u in (0, 1] and t in [-1,
# 1]. Each is made of a whole word, so u is never 0 and the smallest u gives the largest value.
# csrc/cuda/normal.cuh makes the same normals of the same words, up to rounding, and explains edges.
#
# | word | smallest u | largest normal |
# |---|---|---|
# | 32 bits, float32 | 2^-33 | 6.76 |
# | 64 bits, float64 | 2^-65 | 9.49 |
#
# The guard (Holohan and Braghin 2021, section 5.1, as in Opacus) makes each value half the sum of
# four independent normals. A single floating-point normal takes few of the numbers near it. The
# missing ones can reveal the sum it was added to (Mironov 2012, Jin et al. 2022).


CHUNK = 65_536
"""Values per chunk: words, radii and angles fit into the cache."""
GUARD = 4


class Bits(Protocol):
    """A source of uniform words."""

    def fill(self, words: Tensor) -> None:
        """Overwrites a contiguous CPU tensor with random bits."""


def fill_normal(out: Tensor, std: float, bits: Bits, *, guarded: bool) -> None:
    """Fills a contiguous CPU tensor, float32 or float64, with N(0, std^2).

    Args:
        out: filled in place. std: of every value. bits: source of the words.
        guarded: every value is half the sum of four normals, of four pairs.
    """
    if not out.numel():
        return
    terms = GUARD if guarded else 1
    parts = out.view(-1).split(CHUNK // terms)
    pairs = _Pairs(terms * _half(parts[0]), out.dtype, bits)
    try:
        for part in parts:
            half = _half(part)
            normals = pairs.draw(terms * half).view(2, terms, half)  # cosines, sines
            values = normals.sum(1) if guarded else normals
            torch.mul(values.reshape(-1)[: len(part)], std / math.sqrt(terms), out=part)
            if guarded:
                values.zero_()
    finally:
        pairs.erase()


def _half(part: Tensor) -> int:
    return (len(part) + 1) // 2


class _Pairs:
    """Reusable buffers for at most `size` pairs."""

    def __init__(self, size: int, dtype: torch.dtype, bits: Bits) -> None:
        self.bits = bits
        wide = dtype == torch.float64
        self.words = torch.empty(2 * size, dtype=torch.int64 if wide else torch.int32, device="cpu")
        self.unsigned = torch.uint64 if wide else torch.uint32
        self.unit = 2.0**-63 if wide else 2.0**-31  # of a signed word
        self.buffers = torch.empty(4, size, dtype=dtype, device="cpu")

    def draw(self, count: int) -> Tensor:
        """Draws the next `count` pairs, [2, count]: cosines and sines; the next call overwrites them."""
        words = self.words[: 2 * count]
        self.bits.fill(words)
        radius, angle = self.buffers[2, :count], self.buffers[3, :count]
        # The largest words round to u = 1, where log u = 0; the smallest u is half a unit.
        radius.copy_(words[:count].view(self.unsigned)).add_(0.5).mul_(self.unit / 2)
        radius.log_().mul_(-2).sqrt_()
        angle.copy_(words[count:]).add_(0.5).mul_(math.pi * self.unit)
        values = self.buffers.view(-1)[: 2 * count].view(2, count)
        torch.cos(angle, out=values[0])
        torch.sin(angle, out=values[1])
        return values.mul_(radius)

    def erase(self) -> None:
        """Erases the buffers: later readers of this memory must not find the noise."""
        self.words.zero_()
        self.buffers.zero_()


# -------------------------------------------------------------------------------------------------
# Unpredictable normals, drawn on the CPU.


@host_operation
def secure_normals(
    outs: list[Tensor], std: float, guarded: bool, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Fills contiguous CPU tensors, float32 or float64, with N(0, std^2) of ChaCha20, plus `totals`.

    Every call draws under new keys.

    Args:
        guarded: each value is half the sum of four normals. totals: one for each of `outs`, or None
            instead; or no totals at all. factor: multiplies them.
    """
    for out in outs:
        with KeyStream() as bits:
            fill_normal(out, std, bits, guarded=guarded)
    if totals:
        add_totals(outs, totals, factor)


# -------------------------------------------------------------------------------------------------


class NoiseSource(ABC):
    """A source of independent normal variables, for operations of fastclip.ops."""

    secure: ClassVar[bool]
    """Nobody can predict or repeat the draws."""
    guarded: bool = False
    """Every value is half the sum of four: a guard against floating-point attacks."""
    generator: torch.Generator | None = None
    """The user's generator, used directly; None: the user gave none."""
    account: Any = None
    """The account of the steps that get this noise: their number (`steps`), and the ledger's `drawn`."""
    _noted: tuple[Any, ...] = ()
    """Step and device of the last noted state."""

    def stream(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """Returns the generator used on a device; None: torch's own there.

        Raises:
            StepError: in a fork of a process that drew from it.
        """
        return claim(self.generator, "noise", device)

    def drawing(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """Returns `stream`, and notes that it draws the noise of a step.

        Raises:
            StepError: as `stream`, or its state was used for noise of the same ledger before.
        """
        generator, account = self.stream(device), self.account
        if generator is not None and account is not None:
            now = account, account.steps, generator.device
            if now != self._noted:  # once per step is enough: the rest follows from that state
                account.ledger.drawn.note(generator)
                self._noted = now
        return generator

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which has no account yet."""
        kept = self.__dict__.items()
        return {name: value for name, value in kept if name not in ("account", "_noted")}

    @abstractmethod
    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        """Fills `out`, of any floating type and device, with N(0, std^2); returns it."""

    def draw(self, like: Tensor, std: float) -> Tensor | None:
        """Returns N(0, std^2), independent for each entry of `like`; None if std is 0."""
        if not ops.check_std(std):
            return None
        noise = torch.empty_like(like)
        ops.fill_normal(noise, std, self)
        return noise


class SeededNoise(NoiseSource):
    """Noise of a torch.Generator, reproducible and as predictable as its seed.

    Without a generator it draws from a separate stream (`OwnStream`), seeded from torch's global
    generator at the first draw. `torch.manual_seed` before that draw makes repeatable noise. Setting the
    global generator afterwards changes nothing.

    Copies and pickles never contain its generator: whoever has the stream can subtract the noise. In a
    fork of a process that drew from it, it raises StepError until it is seeded anew. A generator seeded
    like torch's global one raises StepError too.

    Args:
        generator: used directly.
        purpose: of the separate stream; two sources of one purpose may be seeded alike.
    """

    secure = False

    def __init__(self, generator: torch.Generator | None = None, *, purpose: str = "noise") -> None:
        self.generator = None if generator is torch.default_generator else generator
        self._own = OwnStream(None, purpose)

    def of_rank(self, number: int) -> SeededNoise:
        """Returns a source for one rank, with its own noise, seeded from this generator or torch's."""
        found = SeededNoise()
        found._own = OwnStream(self.generator, self._own.purpose, number)
        return found

    def stream(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """Returns the generator used on a device; the noise continues from its state.

        Restoring it (`set_state`) repeats the noise bit for bit. Whoever sees it can subtract the noise.

        Returns:
            None if nothing is drawn (meta), and during the capture of a CUDA graph if no generator was
            given: replays advance CUDA's own.

        Raises:
            StepError: in a fork of a process that drew from it, or if its seed is the global one's.
        """
        if self.generator is not None:
            check_not_globally_seeded(self.generator)
            return claim(self.generator, "noise")
        kind = torch.device(device).type
        if kind == "meta" or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return self._own.on(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> SeededNoise:
        return SeededNoise(purpose=self._own.purpose)

    def __reduce__(self) -> Any:
        return partial(SeededNoise, purpose=self._own.purpose), ()

    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        return out.normal_(0.0, std, generator=self.drawing(out.device))


class SecureNoise(NoiseSource):
    """Cryptographic noise: ChaCha20 under a key that is used for one draw and erased.

    It holds no state, so copies, forks and restored checkpoints draw independent noise.

    Formal guarantee: no (key, nonce, counter) is used twice, except by a collision of 256 random bits.
    A distinguisher of the noise from ideal normals in floating-point arithmetic is also one of ChaCha20
    or of the operating system's generator.

    Args:
        guarded: half the sum of four normals for each value (Holohan and Braghin 2021, section 5.1).
    """

    secure = True

    def __init__(self, guarded: bool = True) -> None:
        self.guarded = guarded

    @disable_dynamo
    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        """Fills `out` on the CPU, and copies to its device if needed.

        Raises:
            StepError: while a CUDA graph is captured, whose replays would repeat the noise.
            SecureModeError: without the cryptography package.
            ArgumentError, ArgumentTypeError: std or the type of `out` is invalid.
        """
        check_not_captured(out.device)
        ops.check_floating(out)
        ops.check_std(std)
        if out.device.type == "cuda":
            _say_that_it_is_slow()
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        fits = out.device.type == "cpu" and out.dtype == wide and out.is_contiguous()
        values = out.detach() if fits else torch.empty(out.shape, dtype=wide, device="cpu")
        try:
            secure_normals([values], std, self.guarded)
            if not fits:
                with torch.no_grad():
                    out.copy_(values)
        finally:
            if not fits:
                values.zero_()
        return out


SEEDED, SECURE, TORCHS = SeededNoise.normal_, SecureNoise.normal_, Tensor.normal_
"""The original methods. If code replaces one of them, it must see every draw. Faster loops, imported
with the first draw, are therefore used only while these three are unchanged."""


def check_not_captured(device: torch.device) -> None:
    """Raises StepError while a CUDA graph is captured: every replay would use the same key."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StepError(
            "Secure noise cannot be captured in a CUDA graph, because every replay would draw the "
            "same noise. Leave optimizer.step() out of the capture, or train without secure_mode.",
            doc="secure-mode",
        )


@functools.cache
def _say_that_it_is_slow() -> None:
    say(
        "Secure noise is drawn on the CPU and copied to the GPU, because fastclip's CUDA "
        f"extension is not available. {how_to_build('nvcc')}",
        doc="missing-libraries",
    )


# -------------------------------------------------------------------------------------------------
# The public names.


__all__ = ["NoiseSource", "SecureNoise", "SeededNoise", "check_not_captured"]


# -------------------------------------------------------------------------------------------------
# States of generators for which noise was drawn: noise shared by two releases can be subtracted.
#
# A script that seeds torch before each run, or resets a generator in every epoch, draws the same
# noise again. A ledger that counts both would compose them as if they were independent.


_SEED = 8
"""Bytes of the seed at the start of a CPU generator's state."""


class DrawnStates:
    """The states from which the noise of one ledger's steps was drawn, as digests of 16 bytes.

    They stay in memory: a digest in a checkpoint would let anybody try seeds against it. A copy has
    none. A ledger that resumes in another process, or from a checkpoint, starts without them.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __reduce__(self) -> Any:
        return DrawnStates, ()

    @disable_dynamo
    def note(self, generator: torch.Generator) -> None:
        """Notes the generator's state before noise is drawn, without waiting for a device.

        Raises:
            StepError: noise was drawn from this state before.
        """
        if generator.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # replays advance it
        words = generator.get_state().numpy().tobytes()
        if generator.device.type == "cpu":
            words = words[_SEED:]  # half of which are the words
        state = hashlib.blake2b(words, digest_size=16).digest()
        if state in self._seen:
            raise StepError(
                "The noise generator repeats a state that an earlier step used, so the noise of "
                "the two steps could be subtracted. Remove the call that resets its seed, or use "
                "secure_mode=True.",
                doc="repeated-noise",
            )
        self._seen.add(state)

    def join(self, other: DrawnStates) -> None:
        """Adds the states of another."""
        self._seen |= other._seen
