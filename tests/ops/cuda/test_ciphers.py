"""Ciphers of csrc/ against their standards' vectors and independent implementations."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from fastclip import _C
from fastclip.ops.noise import fill_normal

testing = _C.testing

COUNTING = bytes(range(32))
ZEROS = bytes(32)

# RFC 8439, section 2.3.2 and appendix A.1: key, counter, nonce, block.
RFC_8439 = {
    "2.3.2": (
        COUNTING, 1, "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        ZEROS, 0, "000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        ZEROS, 1, "000000000000000000000000",
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        ZEROS[:31] + b"\x01", 1, "000000000000000000000000",
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        b"\x00\xff" + ZEROS[:30], 2, "000000000000000000000000",
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        ZEROS, 0, "000000000000000000000002",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}  # fmt: skip

SUNSCREEN = (  # RFC 8439, section 2.4.2
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it."
)
ENCRYPTED = bytes.fromhex(
    "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
    "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
    "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
    "5af90bbf74a35be6b40b8eedf2785e42874d"
)

# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, words.
PHILOX = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """csrc/chacha20.cuh's block as the bytes of the RFC."""
    found = testing.chacha20_block(struct.unpack("<8I", key), counter, struct.unpack("<3I", nonce))
    return struct.pack("<16I", *found)


def by_cryptography(key: bytes, counter: int, nonce: bytes, blocks: int = 1) -> bytes:
    """The same from OpenSSL."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    start = struct.pack("<I", counter) + nonce
    return Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(bytes(64 * blocks))


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, section 4.3, with the constants of their table 2."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@pytest.mark.parametrize("name", RFC_8439)
def test_chacha20_blocks_of_the_rfc(name: str) -> None:
    key, counter, nonce, expected = RFC_8439[name]
    assert block(key, counter, bytes.fromhex(nonce)).hex() == expected


def test_chacha20_encrypts_the_rfcs_text() -> None:
    nonce = bytes.fromhex("000000000000004a00000000")
    stream = block(COUNTING, 1, nonce) + block(COUNTING, 2, nonce)
    assert bytes(x ^ y for x, y in zip(SUNSCREEN, stream, strict=False)) == ENCRYPTED


def test_chacha20_is_openssls() -> None:
    source = random.Random(0)
    for counter in [0, 1, 2, 1000, 2**16, 2**31, 2**32 - 2, 2**32 - 1]:
        for _ in range(4):
            key, nonce = source.randbytes(32), source.randbytes(12)
            assert block(key, counter, nonce) == by_cryptography(key, counter, nonce)


@pytest.mark.parametrize("index", [0, 7, 2**32 - 1, 2**32, 2**32 + 5, 3 * 2**32 - 1, 2**62 - 1])
def test_chacha20_counts_on_in_the_nonce(index: int) -> None:
    """Block indices of 64 bits: the high half is the nonce's first word, and nothing wraps."""
    found = testing.chacha20_words(struct.unpack("<8I", COUNTING), index)
    nonce = struct.pack("<3I", index >> 32, 0, 0)
    assert struct.pack("<16I", *found) == by_cryptography(COUNTING, index % 2**32, nonce)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox_by_hand(words(counter), words(key)) == words(expected)
    assert testing.philox_4x32_10(words(counter), words(key)) == words(expected)


def test_philox_is_the_papers() -> None:
    source = random.Random(1)
    for _ in range(200):
        counter = [source.getrandbits(32) for _ in range(4)]
        key = [source.getrandbits(32) for _ in range(2)]
        assert testing.philox_4x32_10(counter, key) == philox_by_hand(counter, key)


@pytest.mark.parametrize("index", [0, 1, 2**30 - 1, 2**30, 2**32, 2**62 - 1])
def test_a_philox_block_is_four_calls(index: int) -> None:
    """Calls 4 i to 4 i + 3, counted in 64 bits; the seed is the key and the counter's high half."""
    seed = [0x01234567, 0x89ABCDEF, 0xFEDCBA98, 0x76543210]
    expected = []
    for call in range(4 * index, 4 * index + 4):
        expected += philox_by_hand([call % 2**32, call >> 32, *seed[2:]], seed[:2])
    assert testing.philox_words(seed, index) == expected


WIDTHS = [(32, testing.normal_pair, 1e-6), (64, testing.normal_pair_wide, 1e-15)]


@pytest.mark.parametrize(("bits", "pair", "_"), WIDTHS)
def test_the_edges_of_normals(bits: int, pair, _: float) -> None:
    """No word gives NaN or infinity; the largest value is that of u = 2^-(bits + 1)."""
    top = 2 ** (bits - 1)
    edges = [0, 1, 2, 127, 128, 129, 2**10, top - 1, top, top + 1, 2 * top - 129, 2 * top - 2,
             2 * top - 1]  # fmt: skip
    largest = math.sqrt(2 * (bits + 1) * math.log(2))
    for x in edges:
        for y in [*edges, top // 2, 3 * top // 2]:
            values = pair(x, y)
            assert all(map(math.isfinite, values)), (x, y)
            assert math.hypot(*values) <= largest * (1 + 1e-6), (x, y)
    assert pair(0, 0) == pytest.approx((largest, 0.0), abs=1e-6)
    assert pair(0, top // 2) == pytest.approx((0.0, largest), abs=1e-6)
    assert pair(0, top) == pytest.approx((-largest, 0.0), abs=1e-6)
    assert pair(0, 3 * top // 2) == pytest.approx((0.0, -largest), abs=1e-6)
    for y in edges:
        assert max(map(abs, pair(2 * top - 1, y))) == 0.0  # u = 1
    assert math.hypot(*pair(2 * top - 2**9 if bits == 32 else 2 * top - 2**12, 1)) > 0.0
    assert pair(1, 0)[0] < pair(0, 0)[0]  # the last bit of a small word counts


@pytest.mark.parametrize(("bits", "pair", "rounding"), WIDTHS)
def test_normals_are_box_mullers(bits: int, pair, rounding: float) -> None:
    source = random.Random(2)
    for _ in range(1000):
        x, y = (source.getrandbits(source.choice([bits, bits // 2, 8])) for _ in range(2))
        signed = y - 2**bits if y >= 2 ** (bits - 1) else y
        radius = math.sqrt(-2 * math.log((x + 0.5) / 2**bits))
        angle = math.pi * (signed + 0.5) / 2 ** (bits - 1)
        expected = (radius * math.cos(angle), radius * math.sin(angle))
        # u near 1 is rounded to a float: the radius is off by rounding / radius
        assert pair(x, y) == pytest.approx(expected, abs=8 * rounding * max(1.0, 1 / radius))


@pytest.mark.parametrize(("bits", "pair", "rounding"), WIDTHS)
def test_normals_are_those_of_python(bits: int, pair, rounding: float) -> None:
    """fastclip.ops.noise makes the same pairs of the same words."""
    source = random.Random(3)
    pairs = 500
    words = [source.getrandbits(source.choice([bits, bits // 2, 8])) for _ in range(2 * pairs)]

    class Given:
        def fill(self, out: torch.Tensor) -> None:
            signed = [word - 2**bits if word >= 2 ** (bits - 1) else word for word in words]
            out.copy_(torch.tensor(signed, dtype=out.dtype))

    out = torch.empty(2 * pairs, dtype=torch.float32 if bits == 32 else torch.float64)
    fill_normal(out, 1.0, Given(), guarded=False)
    for i in range(
        pairs
    ):  # words: those of radii, then those of angles; values: cosines, then sines
        expected = pair(words[i], words[pairs + i])
        radius = max(math.hypot(*expected), 1e-9)
        found = float(out[i]), float(out[pairs + i])
        assert found == pytest.approx(expected, abs=8 * rounding * max(1.0, 1 / radius))
