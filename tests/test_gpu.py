"""What only a GPU can show: whole steps equal the CPU's, and never wait for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastclip import clipping, ops
from fastclip.errors import StepError
from fastclip.noise import SecureNoise, SeededNoise
from fastclip.ops.dispatch import use_backend
from tests.noise.laws import assert_standard_normal, assert_uncorrelated
from tests.noise.test_secure_mode import noise_of_a_step, start
from tests.oracle import make_private, relative_error, row_loss, summed
from tests.test_no_synchronisation import MODELS, STRATEGIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def sums_of(model: nn.Module, inputs: torch.Tensor, strategy, backend: str):
    """Clipped sums of one step, and the optimizer that holds its thresholds and counts."""
    model = copy.deepcopy(model)
    with use_backend(backend):
        engine, private, optimizer, _ = make_private(model, clipping=strategy, max_grad_norm=0.5)
        engine.set_groups(torch.arange(len(inputs), device=inputs.device) % 3)
        row_loss(private(inputs)).mean().backward()
        found = summed(dict(model.named_parameters()))
        optimizer.step()
    return {name: x.cpu() for name, x in found.items()}, optimizer


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_the_cpus(name: str, strategy: str, backend: str) -> None:
    build, make_inputs = MODELS[name]
    model, inputs = build(), make_inputs()
    chosen = STRATEGIES[strategy]
    expected, here = sums_of(model.double(), _double(inputs), chosen, "reference")
    found, there = sums_of(model.float().cuda(), inputs.cuda(), chosen, backend)
    assert relative_error(found, expected) <= 1e-5
    assert torch.allclose(there.threshold.cpu(), here.threshold, rtol=1e-6)
    if here.noisy_counts is not None:
        assert torch.equal(there.noisy_counts.cpu(), here.noisy_counts)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_does_not_synchronise(name: str, strategy: str) -> None:
    build, make_inputs = MODELS[name]
    model, inputs = build().cuda(), make_inputs().cuda()
    engine, private, optimizer, _ = make_private(
        model, clipping=STRATEGIES[strategy], noise_multiplier=1.0
    )
    ids = torch.arange(len(inputs), device="cuda") % 3

    def step() -> None:
        optimizer.zero_grad()
        engine.set_groups(ids)
        row_loss(private(inputs)).mean().backward()
        optimizer.step()

    for _ in range(3):  # finds the samples' axis, compiles the kernels, warms the allocator up
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_kernel_fell_back() -> None:
    """After the steps above every operation that was launched is still a kernel."""
    from fastclip.ops.dispatch import OPERATIONS, backend_of

    device = torch.device("cuda")
    failed = {name: backend_of(name, device) for name in OPERATIONS}
    assert not [f"{name}: {why}" for name, (_, why) in failed.items() if "failed" in why]


def test_the_captured_step_trains() -> None:
    from examples.cuda_graph import train

    losses = train(steps=30)
    assert losses[-1] < losses[0]


def test_bfloat16_autocast() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).cuda()
    inputs = torch.randn(16, 32, 64, device="cuda")
    expected, _ = sums_of(model.cpu().double(), inputs.cpu().double(), clipping.dp_sgd(), "auto")
    _, private, _, _ = make_private(model.float().cuda(), max_grad_norm=0.5)
    with torch.autocast("cuda", torch.bfloat16):
        out = private(inputs)
    row_loss(out.float()).mean().backward()
    found = {name: x.cpu() for name, x in summed(dict(model.named_parameters())).items()}
    assert relative_error(found, expected) <= 2e-2


def _built() -> bool:
    from fastclip.ops.dispatch import _load

    return "noise_finalize" in _load("cuda")


extension = pytest.mark.skipif(
    torch.cuda.is_available() and not _built(), reason="the CUDA extension is not built"
)


@extension
def test_a_secure_step_does_not_synchronise() -> None:
    """The key is a parameter of the launch: nothing is copied, nothing waited for."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
    _, private, optimizer, _ = make_private(
        model, clipping=clipping.adaptive(), noise_multiplier=1.0
    )
    optimizer.secure_mode = True
    inputs = torch.randn(16, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        row_loss(private(inputs)).mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@extension
def test_replayed_graphs_draw_new_seeded_noise_and_no_secure_noise() -> None:
    out = torch.zeros(1000, device="cuda")
    seeded, secure = SeededNoise(), SecureNoise()
    for source in (seeded, secure):
        ops.fill_normal(out, 1.0, source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fill_normal(out, 1.0, seeded)
        with pytest.raises(StepError, match="cannot be part of a CUDA graph"):
            ops.fill_normal(out, 1.0, secure)
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append(out.clone())
    assert not (draws[0] == draws[1]).all()
    assert not (draws[1] == draws[2]).all()


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
def test_secure_noise_of_whole_steps(mode: str) -> None:
    """The law of what the optimizer adds on the GPU, in the fast mode and in Opacus' own."""
    _, model, optimizer, _ = start(width=20_000, grad_sample_mode=mode)
    model.cuda()
    first, second = noise_of_a_step(model, optimizer), noise_of_a_step(model, optimizer)
    assert_standard_normal(torch.cat([first, second]).cpu())
    assert_uncorrelated(first.cpu(), second.cpu())
