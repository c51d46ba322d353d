"""Noise of a chosen key or seed, straight from fastclip._C; devices to run on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastclip import _C
from fastclip.ops.noise import SecureNoise, SeededNoise

SCALARS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""In the order of csrc/cuda/noise.cuh."""
CIPHERS = ("philox", "chacha20")
KEY = bytes(range(100, 132))
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
        ],
    ),
]


def seed_words(key: bytes) -> Tensor:
    """What Philox takes of a key: two integers of 64 bits."""
    return torch.frombuffer(bytearray(key[:16]), dtype=torch.int64)


def fill(
    cipher: str,
    outs: Sequence[Tensor],
    key: bytes = KEY,
    *,
    guarded: bool = False,
    std: float = 1.0,
) -> None:
    """N(0, std^2) in all of `outs`, of one device, from a fixed key or seed."""
    rows = [(0, out.data_ptr(), out.numel(), SCALARS.index(out.dtype)) for out in outs]
    device, place = outs[0].device, {"device": -1, "stream": 0}
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        place = {"device": stream.device_index, "stream": stream.cuda_stream}
    how = {"std": std, "device_std": 0, "divisor": 1.0, "guarded": guarded, **place}
    if cipher == "chacha20":
        _C.noise_chacha20(key=key, rows=rows, **how)
        return
    seed = seed_words(key).to(device)
    _C.noise_philox(seed=seed.data_ptr(), rows=rows, **how)


def places_of(outs: Sequence[Tensor], *, guarded: bool = False) -> list[int]:
    """The blocks of bits that are drawn for `outs`, which receive the places of their values.

    A place is block * values of a block + place in the block, where nothing is guarded.
    """
    rows = [(out.data_ptr(), out.numel(), SCALARS.index(out.dtype)) for out in outs]
    return _C.testing.recorded_blocks(rows, guarded)


CHUNK = 4096
SIZES = (0, 1, 3, 5, 1023, 4095, 4096, 4097, 20_001)
devices = pytest.mark.parametrize("device", DEVICES)
ciphers = pytest.mark.parametrize("cipher", CIPHERS)
guards = pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
wides = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=lambda t: str(t).removeprefix("torch.")
)
dtypes = pytest.mark.parametrize("dtype", SCALARS, ids=lambda t: str(t).removeprefix("torch."))


def seeded(device: str = "cpu", seed: int = 7, *, guarded: bool = False) -> SeededNoise:
    source = SeededNoise(torch.Generator(device).manual_seed(seed))
    source.guarded = guarded
    return source


def sources(device: str) -> list:
    return [seeded(device), seeded(device, guarded=True), SecureNoise(False), SecureNoise(True)]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sums_for(parameters: list[Tensor], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(p.shape, generator=generator, dtype=arithmetic(p.dtype)).to(p.device)
        for p in parameters
    ]
