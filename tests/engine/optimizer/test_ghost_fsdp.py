"""Opacus' "ghost_fsdp" on one rank: its noise is scaled for what its model clips at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import StepError
from tests.opacus_runs import Recorder
from tests.oracle import norms, per_sample_gradients, relative_error
from tests.refusal import refused

FSDP2Wrapper = pytest.importorskip(
    "opacus.utils.fsdp_utils", reason="Opacus before 1.6: no ghost_fsdp"
).FSDP2Wrapper

D, B, C = 5, 4, 1e-2


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory) -> Iterator[None]:
    """A process group of this process alone."""
    if distributed.is_initialized():
        pytest.skip("a process group is there already")
    meeting = tmp_path_factory.mktemp("rank") / "meeting"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))


def start(**kwargs: Any) -> tuple:
    """(net, private model, optimizer, criterion)."""
    net = FSDP2Wrapper(network())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        engine = FastPrivacyEngine(accountant="rdp")
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "poisson_sampling": False}
    model, optimizer, criterion, _ = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost_fsdp",
        data_loader=DataLoader(TensorDataset(torch.zeros(8, D)), batch_size=B), **options | kwargs,
    )  # fmt: skip
    return net, model, optimizer, criterion


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, D, generator=generator), torch.randint(2, (B,), generator=generator)


def clipped(seed: int, bound: float) -> Tensor:
    """The clipped sum of the first weights, one sample at a time."""
    x, y = batch(seed)
    index = iter(range(99))

    def loss(out: Tensor, _: Any) -> Tensor:
        i = next(index)
        target = y if len(out) == B else y[i - 1 : i]
        return nn.functional.cross_entropy(out, target, reduction="none")

    grads = per_sample_gradients(network(), x, loss)
    scale = (bound / norms(grads)).clamp(max=1)
    return torch.cat([(scale @ g.flatten(1)) for g in grads.values()])


def whole(p: Any) -> Tensor:
    p = p.detach() if isinstance(p, Tensor) else p
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def weights(net: nn.Module) -> Tensor:
    return torch.cat([whole(p).flatten() for p in net.parameters()]).clone()


def backward(model: nn.Module, criterion: Any, seed: int) -> None:
    x, y = batch(seed)
    criterion(model(x), y).backward()


@pytest.mark.parametrize("how", ["number", "scheduler"])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_threshold_that_is_set(factor: float, how: str) -> None:
    """In the middle of a logical batch it waits for the next; then it clips, and scales the noise."""
    net, model, optimizer, criterion = start(noise_multiplier=1.0)
    source = optimizer.noise_source = Recorder()
    before = weights(net)
    backward(model, criterion, 1)
    optimizer.signal_skip_step(True)
    optimizer.step()
    if how == "number":
        optimizer.max_grad_norm = factor * C
    else:
        ExponentialGradClip(optimizer, gamma=factor).step()
    optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    backward(model, criterion, 2)
    optimizer.step()
    expected = (clipped(1, C) + clipped(2, C)) / B
    assert relative_error(before - weights(net), expected) < 1e-3
    assert source.stds == pytest.approx([C] * 4)
    source.stds.clear()
    optimizer.zero_grad()
    backward(model, criterion, 3)
    optimizer.pre_step()
    assert source.stds == pytest.approx([factor * C] * 4)
    total = torch.cat([whole(p.grad).flatten() for p in net.parameters()]) * B
    assert float(total.norm()) <= B * factor * C


def test_a_threshold_set_between_backward_and_step() -> None:
    """The batch is clipped already: its noise keeps to that."""
    _, model, optimizer, criterion = start(noise_multiplier=1.0)
    source = optimizer.noise_source = Recorder()
    backward(model, criterion, 1)
    optimizer.max_grad_norm = 1e-6
    optimizer.step()
    assert source.stds == pytest.approx([C] * 4)


def test_a_threshold_set_on_the_model() -> None:
    _, model, optimizer, criterion = start()
    backward(model, criterion, 1)
    model.max_grad_norm = 100.0
    with refused("of the optimizer, not of the model", StepError):
        optimizer.step()


@pytest.mark.parametrize("all_frozen", [False, True])
def test_frozen_between_backward_and_step(all_frozen: bool) -> None:
    """Clipped, but without noise: it must not move."""
    net, model, optimizer, criterion = start(noise_multiplier=1.0)
    before = [whole(p).clone() for p in net.parameters()]
    backward(model, criterion, 1)
    net[0].requires_grad_(False)
    net[2].requires_grad_(not all_frozen)
    optimizer.step()
    same = [torch.equal(whole(p), b) for p, b in zip(net.parameters(), before, strict=True)]
    assert same == [True, True, all_frozen, all_frozen]


def test_only_what_the_model_has_clipped() -> None:
    """A plain loss leaves raw gradients in p.grad."""
    net, model, optimizer, criterion = start()
    before = weights(net)
    x, y = batch(1)
    (nn.functional.cross_entropy(model(x), y) * 1e3).backward()
    with refused("the criterion that make_private returned", StepError):
        optimizer.step()
    assert torch.equal(weights(net), before)
    optimizer.zero_grad()
    backward(model, criterion, 1)
    optimizer.step()


@pytest.mark.parametrize("skip", [False, True])
def test_a_physical_batch_is_summed_once(skip: bool) -> None:
    """A second step() without a backward pass added it again."""
    net, model, optimizer, criterion = start()
    backward(model, criterion, 1)
    optimizer.signal_skip_step(skip)
    optimizer.step()
    before = weights(net)
    with refused("once before every step", StepError):
        optimizer.step()
    assert torch.equal(weights(net), before)


def test_the_inner_step_and_torchs_scaler() -> None:
    net, model, optimizer, criterion = start()
    before = weights(net)
    backward(model, criterion, 1)
    with refused("make_private returned", StepError):
        optimizer.original_optimizer.step()
    with refused("bfloat16", StepError):
        _ = optimizer._step_supports_amp_scaling
    assert torch.equal(weights(net), before)
