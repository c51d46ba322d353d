"""What only a GPU can show: whole steps equal the CPU's, and never wait for the device."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping, ops
from fastclip.core.torch_names import current_gpu, stream_of
from fastclip.errors import GraphError, StepError
from fastclip.ops.dispatch import use_backend
from fastclip.ops.noise import SecureNoise, SeededNoise
from tests.ops.noise.laws import assert_standard_normal, assert_uncorrelated
from tests.ops.noise.test_secure_mode import noise_of_a_step, start
from tests.oracle import make_private, relative_error, sample_loss, summed
from tests.test_no_synchronization import MODELS, STRATEGIES

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
        sample_loss(private(inputs)).mean().backward()
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
def test_a_step_does_not_synchronize(name: str, strategy: str) -> None:
    build, make_inputs = MODELS[name]
    model, inputs = build().cuda(), make_inputs().cuda()
    engine, private, optimizer, _ = make_private(
        model, clipping=STRATEGIES[strategy], noise_multiplier=1.0
    )
    ids = torch.arange(len(inputs), device="cuda") % 3

    def step() -> None:
        optimizer.zero_grad()
        engine.set_groups(ids)
        sample_loss(private(inputs)).mean().backward()
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


def _built() -> bool:
    from fastclip.ops.dispatch import _load

    return "noise_finalize" in _load("cuda")


extension = pytest.mark.skipif(
    torch.cuda.is_available() and not _built(), reason="the CUDA extension is not built"
)


def test_the_captured_step_trains() -> None:
    from examples.cuda_graph import train

    losses = train(steps=30)
    assert losses[-1] < losses[0]


def _twin_steps(name: str, strategy: str, secure: bool = False) -> list[tuple]:
    """The same run without and with graphs, on the same Poisson draws."""
    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    model, inputs = build(), torch.cat([make_inputs() for _ in range(16)])
    found = []
    for cuda_graph in (False, True):
        own = copy.deepcopy(model).cuda()
        engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
        data = TensorDataset(inputs, torch.arange(len(inputs)) % 3)
        private, optimizer, loader = engine.make_private(
            module=own, optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
            data_loader=DataLoader(data, 16, generator=torch.Generator().manual_seed(3)),
            noise_multiplier=1.0 if secure else 0.0, max_grad_norm=0.5,
            clipping=STRATEGIES[strategy],
        )  # fmt: skip

        def losses(model: nn.Module, x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
            return sample_loss(model(x))

        step = engine.make_step(private, losses, physical_batch=40, cuda_graph=cuda_graph)
        found.append((engine, private, optimizer, loader, step))
    return found


@pytest.mark.parametrize("strategy", ["flat", "adaptive", "groups"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_step_is_the_step(name: str, strategy: str) -> None:
    runs = _twin_steps(name, strategy)
    for batches in zip(*(run[3] for run in runs), strict=True):
        sums = []
        for (engine, private, optimizer, _, step), (x, groups) in zip(runs, batches, strict=True):
            engine.set_groups(groups.cuda())
            step(x, groups)
            sums.append(summed(dict(private._module.named_parameters())))
            optimizer.step()
            optimizer.zero_grad()
        assert relative_error(sums[1], sums[0]) <= 1e-4
    assert runs[1][4].captured
    assert runs[0][0].accountant.history == runs[1][0].accountant.history


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=extension)])
def test_a_replayed_step_does_not_synchronize_and_draws_new_noise(secure: bool) -> None:
    _, private, optimizer, loader, step = _twin_steps("rows", "flat", secure)[1]
    gradients = []
    for number, (x, y) in enumerate(loader):
        x, y = x.cuda(), y.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step.captured and number > 3 else "default")
        try:
            step(x, y)
            before = summed(dict(private._module.named_parameters()))
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        named = dict(private._module.named_parameters())
        if len(x):
            gradients.append(
                torch.cat([(16 * p.grad - before[n]).flatten() for n, p in named.items()])
            )
        optimizer.zero_grad()
    assert step.captured
    for first, second in pairwise(gradients):
        assert not secure or not torch.equal(first, second)


def test_what_is_asked_for_in_every_launch() -> None:
    assert current_gpu() == torch.cuda.current_device()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert stream_of(current_gpu()) == stream.cuda_stream


@pytest.mark.parametrize("waits", ["in each pass", "where it is captured"])
def test_a_refused_capture_leaves_the_device_as_it_was(waits: str) -> None:
    """Afterwards the same process draws, trains and captures, on the caller's stream."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).cuda()
    engine, private, optimizer, _ = make_private(model, max_grad_norm=0.5, noise_multiplier=1.0)
    x, stream = torch.randn(16, 6, device="cuda"), torch.cuda.current_stream()

    def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = sample_loss(model(x))
        if waits == "in each pass" or torch.cuda.is_current_stream_capturing():
            loss.sum().item()
        return loss

    step = engine.make_step(private, losses, physical_batch=16, cuda_graph=True)
    step(x)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(GraphError, match="cannot be captured"):
        step(x)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    optimizer.zero_grad()
    sample_loss(private(x)).mean().backward()  # with dropout
    optimizer.step()  # with noise
    optimizer.zero_grad()
    step = engine.make_step(
        private, lambda model, x: sample_loss(model(x)), physical_batch=16, cuda_graph=True
    )
    for _ in range(3):
        step(x)
        optimizer.step()
        optimizer.zero_grad()
    assert step.captured


def test_bfloat16_autocast() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).cuda()
    inputs = torch.randn(16, 32, 64, device="cuda")
    expected, _ = sums_of(model.cpu().double(), inputs.cpu().double(), clipping.dp_sgd(), "auto")
    _, private, _, _ = make_private(model.float().cuda(), max_grad_norm=0.5)
    with torch.autocast("cuda", torch.bfloat16):
        out = private(inputs)
    sample_loss(out.float()).mean().backward()
    found = {name: x.cpu() for name, x in summed(dict(model.named_parameters())).items()}
    assert relative_error(found, expected) <= 2e-2


class Attention(nn.Module):
    """Long enough for kernels that add up its gradients in any order."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 3)
        self.masked = masked

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.table(ids)).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril() if self.masked else None
        out = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_whose_gradients_of_attention_are(kernel: str, autocast: bool, masked: bool) -> None:
    """Two backward passes of these kernels differ in their last bits, which is no coupling."""
    if not autocast and kernel != "EFFICIENT_ATTENTION":
        pytest.skip("a kernel of 16-bit numbers")
    if masked and kernel == "FLASH_ATTENTION":
        pytest.skip("a kernel without masks")
    model, ids = Attention(masked), torch.randint(50, (6, 1024))
    expected, _ = sums_of(model.double(), ids, clipping.dp_sgd(), "reference")
    _, private, _, _ = make_private(model.float().cuda(), max_grad_norm=0.5)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = private(ids.cuda())
        sample_loss(out.float()).mean().backward()
    found = {name: x.cpu() for name, x in summed(dict(model.named_parameters())).items()}
    assert relative_error(found, expected) <= (2e-2 if autocast else 1e-4)


@extension
def test_a_secure_step_does_not_synchronize() -> None:
    """The key is a parameter of the launch: nothing is copied, nothing waited for."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
    _, private, optimizer, _ = make_private(
        model, clipping=clipping.adaptive(), noise_multiplier=1.0
    )
    optimizer.secure_mode = True
    inputs = torch.randn(16, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        sample_loss(private(inputs)).mean().backward()
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
        with pytest.raises(StepError, match="cannot be captured in a CUDA graph"):
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
    _, model, optimizer, _ = start(
        width=20_000, grad_sample_mode=mode, poisson_sampling=False
    )  # its batches are made by hand
    model.cuda()
    first, second = noise_of_a_step(model, optimizer), noise_of_a_step(model, optimizer)
    assert_standard_normal(torch.cat([first, second]).cpu())
    assert_uncorrelated(first.cpu(), second.cpu())
