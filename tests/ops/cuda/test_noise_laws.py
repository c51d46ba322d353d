"""The noise of csrc/: its law, and which bits serve which value."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from fastclip import _C
from tests.ops.cuda.drawing import (
    CHUNK,
    KEY,
    SCALARS,
    SIZES,
    ciphers,
    devices,
    fill,
    guards,
    places_of,
    wides,
)
from tests.ops.cuda.test_ciphers import by_cryptography
from tests.ops.noise.laws import assert_standard_normal, assert_uncorrelated


def assert_law(cipher: str, dtype: torch.dtype, guarded: bool, device: str, n: int) -> None:
    out = torch.full((n,), torch.nan, dtype=dtype, device=device)
    fill(cipher, [out], guarded=guarded)
    assert_standard_normal(out.cpu())
    for shift in (1, 2, 4, 1024, CHUNK):  # a pair, neighbors, runs of a thread, chunks
        assert_uncorrelated(out[:-shift].cpu(), out[shift:].cpu())


@devices
@guards
@wides
@ciphers
def test_a_million_draws_are_normal(
    cipher: str, dtype: torch.dtype, guarded: bool, device: str
) -> None:
    assert_law(cipher, dtype, guarded, device, 1_000_000)


@pytest.mark.slow
@devices
@guards
@wides
@ciphers
def test_ten_million_draws_are_normal(
    cipher: str, dtype: torch.dtype, guarded: bool, device: str
) -> None:
    assert_law(cipher, dtype, guarded, device, 10_000_000)


@devices
@ciphers
def test_the_tails_are_there(cipher: str, device: str) -> None:
    """Among 10^8 draws, in parts, some lie beyond 5.3 sigma; none beyond what 32 bits allow."""
    part = torch.empty(20_000_000 if device == "cpu" else 100_000_000, device=device)
    fill(cipher, [part])
    largest = float(part.abs().max())
    # P(no value beyond 4.8 sigma among 2e7) = exp(-2e7 * 1.59e-6) = 2e-14
    assert 4.8 < largest < 6.77


# ---- Which bits serve which value ------------------------------------------------------------------


def many(device: str = "cpu", dtypes: tuple = (torch.float32,)) -> list[Tensor]:
    """1500 tensors: more than one launch takes, from 1 to 3 chunks, some empty."""
    sizes = [SIZES[i % 7 + 1] + 17 * (i % 5) if i % 97 != 96 else 0 for i in range(1500)]
    return [
        torch.zeros(n, dtype=dtypes[i % len(dtypes)], device=device) for i, n in enumerate(sizes)
    ]


@guards
@pytest.mark.parametrize("count", [1, 64, 65, 1500])
def test_every_word_serves_one_value(count: int, guarded: bool) -> None:
    """No block of bits is drawn twice, over tensors, launches and both arithmetics."""
    outs = many(dtypes=(torch.float32, torch.float64))[:count]
    blocks = torch.tensor(places_of(outs, guarded=guarded))
    assert len(blocks) == len(blocks.unique()) > 0
    if guarded:
        return
    used = []
    for dtype, values in ((torch.float32, 16), (torch.float64, 8)):
        if not (mine := [x for x in outs if x.dtype == dtype]):
            continue
        places = torch.cat(mine).long()
        assert len(places) == len(places.unique())
        used.append((places // values).unique())
    drawn = torch.cat(used)
    assert len(drawn) == len(drawn.unique())  # the two arithmetics share no block
    assert bool(torch.isin(drawn, blocks).all())


def by_definition(cipher: str, places: np.ndarray) -> np.ndarray:
    """float32 normals of places in a stream: words of the cipher, Box and Muller in float64."""
    block, word = places // 16, places % 16 // 2 * 2
    distinct = np.unique(block)
    if cipher == "chacha20":
        stream = by_cryptography(KEY, 0, bytes(12), int(distinct[-1]) + 1)
        words = np.frombuffer(stream, "<u4").reshape(-1, 16)[distinct]
    else:
        seed = struct.unpack("<4I", KEY[:16])
        words = np.array([_C.testing.philox_words(seed, int(i)) for i in distinct], dtype=np.uint32)
    row = np.searchsorted(distinct, block)
    x, y = words[row, word].astype(float), words[row, word + 1].astype(np.int32).astype(float)
    radius = np.sqrt(-2 * np.log((x + 0.5) / 2**32))
    angle = np.pi * (y + 0.5) / 2**31
    return radius * np.where(places % 2 == 0, np.cos(angle), np.sin(angle))


@devices
@ciphers
def test_a_value_is_the_normal_of_its_words(cipher: str, device: str) -> None:
    """The whole way from key to value, computed again by other means."""
    outs = [torch.zeros(n, device=device) for n in SIZES]
    fill(cipher, outs)
    places = [torch.zeros(n) for n in SIZES]
    places_of(places)
    expected = by_definition(cipher, torch.cat(places).long().numpy())
    found = torch.cat(outs).cpu().double().numpy()
    # a radius near 0 has the rounding of u to 24 bits in it
    assert np.abs(found - expected).max() < 1e-3
    assert np.median(np.abs(found - expected)) < 1e-6
    large = np.abs(expected) > 1
    assert np.allclose(found[large], expected[large], rtol=1e-5)


@devices
@guards
@ciphers
def test_where_a_tensor_lies_changes_no_value(cipher: str, guarded: bool, device: str) -> None:
    """Runs of 16 bytes where memory is aligned, single values elsewhere: the same numbers."""
    for dtype in SCALARS:
        for n in SIZES[1:]:
            memory = torch.zeros(n + 8, dtype=dtype, device=device)
            fill(cipher, [aligned := torch.zeros(n, dtype=dtype, device=device)], guarded=guarded)
            for offset in (1, 2, 3):
                memory.zero_()
                fill(cipher, [memory[offset : offset + n]], guarded=guarded)
                assert torch.equal(memory[offset : offset + n], aligned)
                assert not memory[:offset].any()
                assert not memory[offset + n :].any()


@pytest.mark.one_in(2)
@guards
@ciphers
def test_values_of_1500_tensors_differ_and_are_normal(cipher: str, guarded: bool) -> None:
    outs = many()
    fill(cipher, outs, guarded=guarded)
    values = torch.cat(outs)
    assert_standard_normal(values)
    # n^2 / 2 pairs, of which about 2^-26 agree by rounding; words that serve twice would add n / 2
    collisions = len(values) - len(values.unique())
    assert collisions < len(values) / 10
    first, second = (torch.cat([x for x in outs[i::2] if len(x) > 4000]) for i in (0, 1))
    n = min(len(first), len(second))
    assert_uncorrelated(first[:n], second[:n])
