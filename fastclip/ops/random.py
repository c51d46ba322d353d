"""Random streams: ChaCha20 under keys that are used once, separate generators, forks.

Every draw takes a fresh key of 256 bits from the operating system, and erases it when it is done.
Nothing is kept between draws, and a fork in the middle of one takes a new key. So a fork, a copied
object or a restored checkpoint has no stream to repeat, and no (key, nonce, counter) is used twice. The
cipher is that of the `cryptography` package (OpenSSL).
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
"""Bytes per (key, nonce): 2^32 blocks of 64 bytes. A longer draw continues under another key."""


@contextmanager
def fresh_key() -> Iterator[bytearray]:
    """Yields a key from the operating system, and erases it at the end of the block."""
    key = bytearray(KEY_BYTES)
    try:
        _fill(key)
        yield key
    finally:
        key[:] = bytes(KEY_BYTES)


def _fill(key: bytearray) -> None:
    """Writes bytes of the kernel's generator, directly into `key` if the system allows it."""
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
    """Returns the cipher's constructor, from a key to a context.

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
    """Independent uniform bits, CPU only: `with KeyStream() as stream: stream.fill(words)`."""

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
        """Overwrites a contiguous CPU tensor of at most `LONGEST` bytes with random bits."""
        buffer: Any = words.view(torch.uint8).numpy()  # no copy
        if len(buffer) > self._left or self._process != this_process():
            self._rekey()
        if len(self._zeros) != len(buffer):
            self._zeros = bytes(len(buffer))
        self._left -= self._cipher.update_into(self._zeros, buffer)


# -------------------------------------------------------------------------------------------------
# Torch's global generator is shared: only one thread at a time may set it temporarily and restore it.
#
# A dry run of a model seeds it with a number that anybody can read in this package. Numbers that another
# thread drew from it meanwhile would be public, and drawn again after it is restored.


class _Keeper:
    """The lock of the global generator: one thread at a time, which may enter again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = 0


_grad_state = _Keeper()
_unknown = False
"""This process was forked while the global generator was temporarily set, by any thread."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Context in which no other thread seeds from torch's global generator, or sets it temporarily.

    Nothing inside may wait for another thread that does so.
    """
    grad_state = _grad_state  # a fork inside has another one, and still leaves this one unchanged
    with grad_state.lock:
        grad_state.inside += 1
        try:
            yield
        finally:
            grad_state.inside -= 1


def stands_elsewhere() -> bool:
    """Whether this process' global generator is a copy of one that was temporarily set."""
    return _unknown


def _renew() -> None:
    """Makes a new lock in a fork, where the thread that holds the lock may be missing."""
    global _grad_state, _unknown
    _unknown = _grad_state.inside > 0
    _grad_state = _Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


# -------------------------------------------------------------------------------------------------
# One stream of random numbers per process: a fork holds its parent's generators.
#
# Whoever sees two releases can subtract noise that they share. Samples that two runs draw together are
# not drawn independently. GPU generators need no check: CUDA does not run in a fork of its process.


_drawn: dict[int, tuple[torch.Generator, tuple[int, int], int]] = {}
"""By the generator's id: the generator (weak references need torch 2.13), the process that drew last
from it, and its seed then."""

_ANOTHER = (0, 0)
"""A process that this one was forked from."""
_UNSEEDED = torch.Generator().initial_seed()
"""The seed of every new generator of torch."""
_MOST = 64
"""Number of generators up to which unreferenced ones are kept."""


def seed_of(generator: torch.Generator) -> int:
    """Returns the effective seed: a CPU's Mersenne Twister takes the low 32 bits of a seed."""
    seed = generator.initial_seed()
    return seed % 2**32 if generator.device.type == "cpu" else seed


def claim(
    generator: torch.Generator | None, what: str, device: torch.device | str = "cpu"
) -> torch.Generator | None:
    """Returns the generator, and notes that this process is about to draw `what` from it.

    Args:
        generator: torch's global one if None, of `device`.

    Raises:
        StepError: it was used before this process was forked, and was not seeded again since. Or it
            was never seeded.
    """
    said = what.replace("rows", "samples")  # a purpose is part of a seed
    if generator is not None and generator.initial_seed() == _UNSEEDED:
        raise StepError(
            f"The generator of {said} was never seeded, so it makes the same numbers in every "
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
            f"This process is a fork of one that drew {said} from the same generator, so both "
            "would draw the same numbers. Seed it here with a number that no other process uses, "
            "or pass secure_mode=True.",
            doc="noise",
        )
    if len(_drawn) >= _MOST and id(stream) not in _drawn:
        _forget()
    _drawn[id(stream)] = stream, process, seed
    return generator


def _know_parent() -> None:
    """Notes in a fork that torch's global generator is the parent's, even if seeded after its draws.

    This includes a generator that the parent's dry run had set to a public seed.
    """
    stream = torch.default_generator
    if id(stream) in _drawn or stands_elsewhere():
        _drawn[id(stream)] = stream, _ANOTHER, seed_of(stream)


if hasattr(os, "register_at_fork"):  # after that of fastclip.ops.random
    os.register_at_fork(after_in_child=_know_parent)


def _forget() -> None:
    """Drops generators that nobody else references."""
    for held in [*_drawn.values()]:
        if sys.getrefcount(held[0]) <= 2:  # the tuple's, and the argument's
            _drawn.pop(id(held[0]), None)


# -------------------------------------------------------------------------------------------------
# Separate streams of random numbers, seeded once from a generator that others may set or read.


class OwnStream:
    """Random numbers for one purpose, from a separate generator on each device.

    Torch's global generator makes initial weights and dropout. An evaluation may seed it in every epoch,
    and dry runs of models set it to a known seed while other threads train. So noise and sampling use
    separate generators. Each is seeded once, by two numbers of the global one, at its first draw. Later
    changes of the global one have no effect, and no two purposes share random words.

    Copies and pickles never contain its generators, and a fork has none of its parent's.

    Args:
        base: the generator for the seed, torch's global one if None.
        purpose: what is drawn; streams of two purposes differ.
        number: the rank; streams of two ranks differ too.
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
        """Returns the generator on this device, made at the first call.

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
        """Drops the generators: the next draw seeds new ones from the base."""
        self._made, self._process = {}, this_process()


def own_generator(
    base: torch.Generator | None, number: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Returns a separate generator for this rank.

    Scripts seed all ranks alike (`torch.manual_seed(0)`). Samples would then be drawn together and noise
    would repeat, and repeated noise can be subtracted.

    Args:
        base: the generator for the seed, torch's global one if None; two numbers are drawn.
        number: the rank. purpose: of the stream; streams of two purposes differ too.

    Raises:
        StepError: a process that this one was forked from drew from `base`.
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
    """Checks that a CPU generator does not have the seed of torch's global one.

    One seed makes one sequence of random words in every generator. Only the low 32 bits count.

    Raises:
        StepError: the seeds are equal.
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
