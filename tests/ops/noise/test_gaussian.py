"""Words to normals: the law, its edges, and what is independent of what."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastclip.ops.noise import CHUNK, SecureNoise, SeededNoise, fill_normal
from fastclip.ops.random import KeyStream
from tests.ops.noise.laws import SeededBits, assert_standard_normal, assert_uncorrelated

MANY = 10_000_000


def drawn(
    n: int, dtype: torch.dtype = torch.float32, guarded: bool = False, seed: int = 0
) -> Tensor:
    out = torch.full((n,), math.nan, dtype=dtype)
    fill_normal(out, 1.0, SeededBits(seed), guarded=guarded)
    return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("guarded", [False, True])
def test_ten_million_secure_draws_are_normal(guarded: bool) -> None:
    assert_standard_normal(SecureNoise(guarded).normal_(torch.empty(MANY)))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_seeded_bits_are_normal(dtype: torch.dtype, guarded: bool) -> None:
    assert_standard_normal(drawn(1_000_000, dtype, guarded))


class Words:
    """The same word everywhere, or one for radii (first half) and one for angles."""

    def __init__(self, radius: int, angle: int) -> None:
        self.radius, self.angle = radius, angle

    def fill(self, words: Tensor) -> None:
        half = len(words) // 2
        words[:half] = self.radius
        words[half:] = self.angle


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.float64, 64)])
def test_the_edges(dtype: torch.dtype, bits: int) -> None:
    """No log of 0; the largest value is that of u = 2^-(bits + 1), the smallest radius is 0."""
    top = 2 ** (bits - 1)
    largest = math.sqrt(2 * (bits + 1) * math.log(2))
    out = torch.empty(2, dtype=dtype)
    fill_normal(out, 1.0, Words(0, 0), guarded=False)
    assert torch.allclose(out, torch.tensor([largest, 0.0], dtype=dtype), atol=1e-8)
    fill_normal(out, 1.0, Words(0, -top), guarded=False)
    assert torch.allclose(out, torch.tensor([-largest, 0.0], dtype=dtype), atol=1e-5)
    fill_normal(out, 1.0, Words(-top, 0), guarded=False)  # u = 1/2
    half = math.sqrt(2 * math.log(2))
    assert torch.allclose(out, torch.tensor([half, 0.0], dtype=dtype), atol=1e-8)
    for angle in (0, top - 1, -top, -1):
        fill_normal(out, 1.0, Words(-1, angle), guarded=False)  # u = 1
        assert torch.equal(out.abs(), torch.zeros_like(out))
    for word in (0, 1, -1, top - 1, -top, top // 2, -top // 2):
        fill_normal(out, 1.0, Words(word, word), guarded=True)
        assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 7, CHUNK // 4 + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
)
def test_every_entry_is_filled_once(n: int, guarded: bool) -> None:
    out = drawn(n, torch.float64, guarded)
    assert bool(torch.isfinite(out).all())
    assert len(out.unique()) == n


def test_the_guard_sums_four_pairs() -> None:
    """Every word is used once: changing one pair's words moves exactly its two entries."""
    n = 64
    original = torch.randint(-(2**31), 2**31, (8 * n // 2,), dtype=torch.int32)

    class Given:
        def __init__(self, words: Tensor) -> None:
            self.words = words

        def fill(self, words: Tensor) -> None:
            assert len(words) == len(self.words)
            words.copy_(self.words)

    def values(words: Tensor) -> Tensor:
        out = torch.empty(n)
        fill_normal(out, 1.0, Given(words), guarded=True)
        return out

    before = values(original)
    moved = torch.zeros(n, dtype=torch.int64)
    for i in range(len(original)):
        changed = original.clone()
        changed[i] ^= 0x20000000
        moved += values(changed) != before
    assert moved.tolist() == [8] * n  # four radii, four angles


def test_entries_tensors_and_draws_are_independent() -> None:
    source = SecureNoise()
    first, second = (source.normal_(torch.empty(1_000_000)) for _ in range(2))
    assert_uncorrelated(first, second)
    assert_uncorrelated(first, SecureNoise().normal_(torch.empty(1_000_000)))
    for shift in (1, CHUNK // 8, CHUNK // 4, CHUNK // 2):  # neighbors, cosine and sine of a pair
        assert_uncorrelated(first[:-shift], first[shift:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_layout_and_type(dtype: torch.dtype) -> None:
    out = torch.zeros(300, 400, dtype=dtype).T
    assert SecureNoise().normal_(out, 2.0) is out
    assert abs(float(out.double().std()) - 2) < 0.05
    whole = torch.zeros(300, 400, dtype=dtype)
    SecureNoise().normal_(whole[:, ::2], 2.0)
    assert not whole[:, 1::2].any()
    assert abs(float(whole[:, ::2].double().std()) - 2) < 0.05
    scalar = torch.zeros((), dtype=dtype)
    assert SecureNoise().draw(scalar, 0.0) is None
    assert SecureNoise().draw(scalar, 1.0).shape == ()


def test_equal_seeds_give_equal_noise_only_in_the_seeded_source() -> None:
    def seeded() -> SeededNoise:
        return SeededNoise(torch.Generator().manual_seed(3))

    def of_global_seed(source: SeededNoise | SecureNoise) -> Tensor:
        torch.manual_seed(3)
        return source.normal_(torch.empty(100))

    assert torch.equal(seeded().normal_(torch.empty(100)), seeded().normal_(torch.empty(100)))
    assert torch.equal(of_global_seed(SeededNoise()), of_global_seed(SeededNoise()))
    same = SecureNoise()
    assert not (of_global_seed(same) == of_global_seed(same)).any()


def test_buffers_are_erased(monkeypatch) -> None:
    """Words, radii and angles do not stay in memory."""
    from fastclip.ops import noise

    kept = []
    real = noise._Pairs.__init__

    def remember(self, *args) -> None:
        real(self, *args)
        kept.append(self)

    monkeypatch.setattr(noise._Pairs, "__init__", remember)
    with KeyStream() as bits:
        fill_normal(torch.empty(1000), 1.0, bits, guarded=True)
    assert len(kept) == 1
    assert not kept[0].words.any()
    assert not kept[0].buffers.any()
