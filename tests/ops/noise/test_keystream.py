"""Keys serve once and are erased; streams never repeat, whatever is forked, copied or restored."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from fastclip.errors import SecureModeError
from fastclip.ops import random
from fastclip.ops.random import KeyStream, fresh_key

KEY = bytes(range(32))


def words(n: int) -> torch.Tensor:
    out = torch.empty(n, dtype=torch.int32)
    with KeyStream() as stream:
        stream.fill(out)
    return out


def chacha20(key: bytes, blocks: int) -> bytes:
    """RFC 8439, section 2.3, written out: nonce 0, counter from 0."""

    def quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] ^= s[x]
            s[z] = (s[z] << turn | s[z] >> (32 - turn)) & 0xFFFFFFFF

    stream = b""
    for counter in range(blocks):
        words = [int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in (0, 4, 8, 12)]
        words += [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
        words += [counter, 0, 0, 0]
        state = list(words)
        for _ in range(10):
            for i in range(4):
                quarter(state, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(state, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        for x, y in zip(state, words, strict=True):
            stream += ((x + y) & 0xFFFFFFFF).to_bytes(4, "little")
    return stream


def fixed(monkeypatch: pytest.MonkeyPatch, keys: list[bytes]) -> None:
    """The operating system gives these keys, in this order."""

    def fill(key: bytearray) -> None:
        key[:] = keys.pop(0)

    monkeypatch.setattr(random, "_fill", fill)


def test_the_stream_is_chacha20_and_goes_on_from_fill_to_fill(monkeypatch) -> None:
    fixed(monkeypatch, [KEY])
    out = torch.empty(5 * 16, dtype=torch.int32)
    with KeyStream() as stream:
        stream.fill(out[:16])
        stream.fill(out[16:19])
        stream.fill(out[19:].view(-1))
    assert bytes(out.view(torch.uint8).tolist()) == chacha20(KEY, 5)


def test_published_vector() -> None:
    """RFC 8439, A.1, test vector 1: the loop above is the cipher."""
    assert chacha20(bytes(32), 1).hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")


def test_a_stream_at_its_end_goes_on_under_another_key(monkeypatch) -> None:
    """Neither the counter's end nor the key's is ever passed."""
    other = bytes(reversed(KEY))
    fixed(monkeypatch, [KEY, other])
    monkeypatch.setattr(random, "LONGEST", 128)
    out = torch.empty(3, 16, dtype=torch.int32)
    with KeyStream() as stream:
        for row in out:
            stream.fill(row)
    assert stream._cipher is None  # gone with its copy of the key
    raw = bytes(out.view(torch.uint8).flatten().tolist())
    assert raw == chacha20(KEY, 2) + chacha20(other, 1)


def test_keys_are_fresh_and_erased() -> None:
    seen = set()
    for _ in range(1000):
        with fresh_key() as key:
            seen.add(bytes(key))
        assert not any(key)
    assert len(seen) == 1000
    kept: bytearray | None = None

    def fails() -> None:
        nonlocal kept
        with fresh_key() as kept:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert kept == bytes(32)


def test_the_cipher_is_given_no_copy_of_the_key(monkeypatch) -> None:
    """What the stream keeps alive holds no key once it is erased."""
    fixed(monkeypatch, [KEY])
    given = []
    from cryptography.hazmat.primitives.ciphers import algorithms

    real = algorithms.ChaCha20
    monkeypatch.setattr(
        algorithms, "ChaCha20", lambda key, nonce: given.append(key) or real(key, nonce)
    )
    words(16)
    assert [type(key) for key in given] == [bytearray]
    assert not any(given[0])


def test_no_block_repeats_in_a_million() -> None:
    """Long draws, short draws and threads: 10^6 blocks of 64 bytes, none twice."""
    parts = [words(16 * 600_000), *(words(16 * 10) for _ in range(10_000))]
    threads = [threading.Thread(target=lambda: parts.append(words(16 * 50_000))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    blocks = torch.cat(parts).view(torch.int64).view(-1, 8)
    assert len(blocks) == 1_000_000
    assert len(blocks[:, 0].unique()) == len(blocks)  # 64 bits of each: 2.7e-8 that two agree


FORKED = """
import os, torch
from fastclip.ops.noise import SecureNoise
torch.set_num_threads(1)
source = SecureNoise()
source.normal_(torch.empty(4))
for _ in range(3):
    read, write = os.pipe()
    if not os.fork():
        os.write(write, str(source.normal_(torch.empty(4)).tolist()).encode())
        os._exit(0)
    print(os.read(read, 1000).decode(), flush=True)
    os.wait()
print(source.normal_(torch.empty(4)).tolist())
"""


def test_forks_draw_noise_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == len(set(lines)) == 4


def test_without_the_library_secure_mode_is_refused(monkeypatch) -> None:
    from fastclip import FastPrivacyEngine

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(SecureModeError, match="pip install cryptography"):
        FastPrivacyEngine(secure_mode=True)
    with pytest.raises(ImportError):  # what a caller of Opacus catches
        KeyStream()
