"""Seeded noise on a CPU: in vectors, on several threads, and still the normals of its words."""

from __future__ import annotations

import math

import pytest
import torch

from fastclip import _C, ops
from fastclip.ops.dispatch import use_backend
from tests.ops.cuda.drawing import seeded
from tests.ops.noise.laws import assert_standard_normal

SEED = (0x9E3779B9, 1, 0xFFFFFFFF, 0x12345678)
BLOCKS = (0, 1, 8, (1 << 30) - 5, (1 << 30) - 1, (1 << 61) + 3)  # calls whose low half comes round
RUN, RUNS, LANES, TERMS = 4, 4, 8, 4


def exact_pair(x: int, y: int) -> tuple[float, float]:
    """Box and Muller in float64, from u as float32 has it."""
    u = float(torch.tensor((x + 0.5) / 2**32, dtype=torch.float64).float())
    t = ((y ^ 1 << 31) - (1 << 31) + 0.5) / 2**31
    r = math.sqrt(-2 * math.log(u))
    return r * math.cos(math.pi * t), r * math.sin(math.pi * t)


def by_definition(first_block: int, guarded: bool) -> list[float]:
    """Eight threads, a block of bits each (guarded: four), in the order of memory."""
    of_lanes = []
    terms = TERMS if guarded else 1
    for lane in range(LANES):
        total = [0.0] * 16
        for term in range(terms):
            words = _C.testing.philox_words(SEED, first_block + lane * terms + term)
            for i in range(0, 16, 2):
                for j, value in enumerate(exact_pair(words[i], words[i + 1])):
                    total[i + j] += value / math.sqrt(terms)
        of_lanes.append(total)
    return [of_lanes[lane][run * RUN + i] for run in range(RUNS) for lane in range(LANES)
            for i in range(RUN)]  # fmt: skip


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("first_block", BLOCKS)
def test_lanes_draw_what_their_blocks_give(first_block: int, guarded: bool) -> None:
    """And every processor the same, to the last bit."""
    found = _C.testing.normals_in_lanes(SEED, first_block, guarded, True)
    assert found == _C.testing.normals_in_lanes(SEED, first_block, guarded, False)
    # u is rounded twice, which is seen where a radius is near 0
    assert found == pytest.approx(by_definition(first_block, guarded), rel=2e-6, abs=2e-4)


EDGES = (0, 1, 2, 127, 128, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - (1 << 20),
         (1 << 32) - 129, (1 << 32) - 1, 0x3504F333, 0xB504F333, 0xB504F334, 1 << 30)  # fmt: skip


@pytest.mark.parametrize("best", [True, False], ids=["vectors", "loops"])
def test_normals_at_the_edges(best: bool) -> None:
    """The smallest and largest words, both sides of sqrt 1/2, all quarters of the circle."""
    pairs = [(x, y) for x in EDGES for y in EDGES]
    for begin in range(0, len(pairs), LANES):
        part = pairs[begin : begin + LANES]
        found = _C.testing.pairs_in_lanes(*zip(*part, strict=True), best)
        for lane, (x, y) in enumerate(part):
            one = found[lane], found[lane + LANES]
            scalar = _C.testing.normal_pair(x, y)
            radius = math.hypot(*scalar)
            assert math.hypot(*one) <= 6.77
            assert one == pytest.approx(scalar, rel=1e-6, abs=1e-6 * radius)


def test_threads_change_no_value() -> None:
    sizes = (3, 4096, 40_001)
    drawn = []
    for threads in (1, 2, 5, 64):
        outs = [torch.full((n,), torch.nan) for n in sizes]
        sums = [torch.arange(n, dtype=torch.float32) for n in sizes]
        rows = [(s.data_ptr(), o.data_ptr(), len(o), 0) for s, o in zip(sums, outs, strict=True)]
        seed = torch.tensor([5, 6])
        _C.noise_philox(
            seed=seed.data_ptr(), rows=rows, std=2.0, device_std=0, divisor=4.0, guarded=False,
            device=-1, stream=0, threads=threads,
        )  # fmt: skip
        drawn.append(torch.cat(outs))
    assert all(torch.equal(values, drawn[0]) for values in drawn)
    assert_standard_normal((drawn[0] * 4.0 - torch.cat(sums)) / 2.0)


def test_who_serves_on_a_cpu() -> None:
    """Whoever asks for it gets Philox; the default is torch's stream, and so Opacus' noise of a seed."""
    like = [torch.zeros(3000)]
    drawn = {}
    for backend in ("auto", "reference", "cuda"):
        with use_backend(backend):
            drawn[backend] = ops.noise_finalize([None], like, 1.0, 2.0, seeded())[0]
    assert torch.equal(drawn["auto"], drawn["reference"])
    assert not torch.isclose(drawn["cuda"], drawn["auto"]).all()
    assert_standard_normal(drawn["cuda"] * 2.0)
