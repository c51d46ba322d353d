"""What only a GPU can show of noise: the host's numbers, no waiting, graphs, streams."""

from __future__ import annotations

import pytest
import torch

from fastclip.errors import StepError
from fastclip.ops.cuda import fill_normal, noise_finalize
from fastclip.ops.noise import SecureNoise, SeededNoise
from tests.ops.cuda.drawing import SIZES, ciphers, fill, guards, seeded, sources, wides
from tests.ops.noise.laws import assert_uncorrelated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@guards
@ciphers
@wides
def test_gpu_and_host_draw_alike(dtype: torch.dtype, cipher: str, guarded: bool) -> None:
    """One key, one noise: but for the last bits of log, sine and cosine."""
    host = [torch.zeros(n, dtype=dtype) for n in SIZES]
    there = [torch.zeros(n, dtype=dtype, device="cuda") for n in SIZES]
    fill(cipher, host, guarded=guarded)
    fill(cipher, there, guarded=guarded)
    close = 1e-5 if dtype == torch.float32 else 1e-13
    assert torch.allclose(torch.cat(there).cpu(), torch.cat(host), rtol=close, atol=close)


def test_nothing_waits_for_the_device() -> None:
    parameters = [torch.zeros(5000, device="cuda")]
    std = torch.ones((), device="cuda")
    calls = [sources("cuda") for _ in range(2)]
    for source in calls[0]:
        noise_finalize([None], parameters, std, 2.0, source)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for source in calls[1]:
            noise_finalize([parameters[0]], parameters, std, 2.0, source)
            fill_normal(parameters[0], 1.0, source)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_graph_draws_anew() -> None:
    parameters = [torch.zeros(5000, device="cuda")]
    noise_finalize([None], parameters, 1.0, 1.0, SeededNoise())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = noise_finalize([None], parameters, 1.0, 1.0, SeededNoise())[0]
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(found.cpu())
    assert_uncorrelated(*draws)
    assert not (draws[0] == draws[1]).any()


def test_a_graph_cannot_hold_secure_noise() -> None:
    parameters = [torch.zeros(5000, device="cuda")]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(StepError, match="CUDA graph"), torch.cuda.graph(graph):
        noise_finalize([None], parameters, 1.0, 1.0, SecureNoise())


def test_the_stream_is_the_current_one() -> None:
    """Noise written on a side stream waits for what that stream did before."""
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(1000.0)
        found = noise_finalize([x], [x], 0.0, 1.0, seeded("cuda"))[0]
    side.synchronize()
    assert bool((found == 1000.0).all())
