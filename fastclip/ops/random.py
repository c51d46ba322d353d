"""Random streams: ChaCha20 under a key that is used once, generators of one's own, forks.

Every draw takes a fresh key of 256 bits from the operating system and forgets it when it is done.
Nothing is kept between draws, and a fork in the middle of one takes a key of its own: a process that
forks, an object that is copied and a checkpoint that is restored have no stream to repeat, and no
(key, nonce, counter) serves twice. The cipher is that of the `cryptography` package (OpenSSL).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastclip.core.compiler import disable_dynamo
from fastclip.core.system import this_process
from fastclip.errors import SecureModeError, StepError

KEY_BYTES = 32
LONGEST = 2**38
"""Bytes of one (key, nonce): 2^32 blocks of 64 bytes. A longer draw goes on under another key."""


@contextmanager
def fresh_key() -> Iterator[bytearray]:
    """A key from the operating system, erased at the end of the block."""
    key = bytearray(KEY_BYTES)
    try:
        _fill(key)
        yield key
    finally:
        key[:] = bytes(KEY_BYTES)


def _fill(key: bytearray) -> None:
    """Bytes of the kernel's generator, straight into `key` where the system allows it."""
    try:
        getrandom = ctypes.CDLL(None).getrandom
        getrandom.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        getrandom.restype = ctypes.c_ssize_t
    except (OSError, AttributeError, TypeError):  # not Linux
        key[:] = os.urandom(len(key))  # leaves a copy, which Python frees without erasing
        return
    if getrandom((ctypes.c_char * len(key)).from_buffer(key), len(key), 0) != len(key):
        key[:] = os.urandom(len(key))


def require_cipher() -> Any:
    """The cipher's constructor, from a key to a context.

    Raises:
        SecureModeError: without the cryptography package.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError as error:
        raise SecureModeError(
            "Secure mode needs the cipher of the cryptography package, which cannot be imported "
            f"({error}). Run pip install cryptography."
        ) from error
    return lambda key: Cipher(algorithms.ChaCha20(key, bytes(16)), None)


class KeyStream:
    """`with KeyStream() as stream: stream.fill(words)`: independent uniform bits, CPU only."""

    def __init__(self) -> None:
        self._new_cipher = require_cipher()
        self._zeros = b""
        self._cipher: Any = None
        self._left = 0
        self._process = this_process()

    def __enter__(self) -> KeyStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._cipher = None  # OpenSSL erases its copy of the key

    def _rekey(self) -> None:
        with fresh_key() as key:
            self._cipher = self._new_cipher(key).encryptor()
        self._left, self._process = LONGEST, this_process()

    def fill(self, words: Tensor) -> None:
        """Overwrite a contiguous CPU tensor of at most `LONGEST` bytes with random bits."""
        buffer: Any = words.view(torch.uint8).numpy()  # no copy
        if len(buffer) > self._left or self._process != this_process():
            self._rekey()
        if len(self._zeros) != len(buffer):
            self._zeros = bytes(len(buffer))
        self._left -= self._cipher.update_into(self._zeros, buffer)


# -------------------------------------------------------------------------------------------------
# Torch's global generator is everybody's: whoever sets it for a while, and puts it back, does so
# alone.
#
# A look at a model starts it at a seed that anybody can read in this package. What another thread
# took from it meanwhile would be known to all, and drawn again once it is put back.


class _Keeper:
    """Of the global generator: one thread at a time, which may come in again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = 0


_grad_state = _Keeper()
_unknown = False
"""This process was forked while another thread, or the one that forked, had it set aside."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, no other thread takes a seed from torch's global generator, or sets it aside.

    Nothing inside may wait for another thread that would do so.
    """
    grad_state = _grad_state  # a fork inside has another one, and still leaves this one as it came
    with grad_state.lock:
        grad_state.inside += 1
        try:
            yield
        finally:
            grad_state.inside -= 1


def stands_elsewhere() -> bool:
    """Whether this process' global generator is a copy of one that was set aside."""
    return _unknown


def _renew() -> None:
    """The thread that holds the lock may not be there in a fork."""
    global _grad_state, _unknown
    _unknown = _grad_state.inside > 0
    _grad_state = _Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


# -------------------------------------------------------------------------------------------------
# One stream of random numbers, one process: a fork holds its parent's generators.
#
# Noise that two releases share is subtracted by whoever sees both; rows that two runs draw together
# are no independent draws. A generator of a GPU needs no look: CUDA does not run in a fork of its
# process.


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
            f"The generator of {what} was never seeded, so it makes the same numbers in every "
            "process. Call its seed() method, or pass no generator.",
            doc="noise",
        )
    where = torch.device(device) if generator is None else generator.device
    if where.type != "cpu":
        return generator
    stream = torch.default_generator if generator is None else generator
    process, seed = this_process(), seed_of(stream)
    _, drew, then = _drawn.get(id(stream), (stream, process, seed))
    if drew != process and then == seed:
        raise StepError(
            f"This process is a fork of one that drew {what} from the same generator, so both "
            "would draw the same numbers. Seed it here with a number that no other process uses, "
            "or pass secure_mode=True.",
            doc="noise",
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


if hasattr(os, "register_at_fork"):  # after that of fastclip.ops.random
    os.register_at_fork(after_in_child=_know_parent)


def _forget() -> None:
    """Let go of generators that nobody can draw from any more."""
    for held in [*_drawn.values()]:
        if sys.getrefcount(held[0]) <= 2:  # the tuple's, and the argument's
            _drawn.pop(id(held[0]), None)


# -------------------------------------------------------------------------------------------------
# Streams of random numbers of one's own: seeded once from a generator that others may set or read.


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


def check_not_globally_seeded(generator: torch.Generator) -> None:
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
            "noise_generator expects a seed of its own, got that of torch's global generator, so "
            "noise would repeat random words of initial weights and dropout. Call "
            "noise_generator.manual_seed(torch.initial_seed() + 1).",
            doc="noise",
        )
