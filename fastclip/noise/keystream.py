"""Random bits that nobody can foresee or draw again: ChaCha20 (RFC 8439) under a key used once.

Every draw takes a fresh key of 256 bits from the operating system and forgets it when it is done.
Nothing is kept between draws, and a fork in the middle of one takes a key of its own: a process that
forks, an object that is copied and a checkpoint that is restored have no stream to repeat, and no
(key, nonce, counter) serves twice. The cipher is that of the `cryptography` package (OpenSSL).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastclip.errors import SecureModeError
from fastclip.forks import this_process

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
            "secure mode draws from the cipher of the cryptography package, which cannot be "
            f"imported ({error}): pip install cryptography"
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
