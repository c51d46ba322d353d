"""Loss scaling: every quantity is that of the unscaled loss, and no step is ever skipped."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import TensorDataset

import fastclip
from fastclip import GradScaler, clipping
from fastclip.errors import ArgumentError, ArgumentTypeError, GraphError, StepError
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.precision.families import FAMILIES, gradients_under, losses_under
from tests.refusal import refused

SCALES = (1.0, 4096.0, 2.0**-5, 2.0**32)
STRATEGIES = {
    "flat": "flat",
    "per_layer": "per_layer",
    "automatic": clipping.automatic(),
    "automatic_v": clipping.automatic(0),
    "adaptive": clipping.adaptive(),
    "normalized": clipping.normalized_dp_sgd(),
}


def stepped(scale: float | None, strategy: str, model: nn.Module, x: torch.Tensor) -> list:
    """Norms, sums, gradients and threshold of one noiseless step; scale None uses no scaler."""
    model = copy.deepcopy(model)
    C = [1.0] * 4 if strategy == "per_layer" else 1.0
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, clipping=STRATEGIES[strategy])
    loss = sample_loss(private(x)).mean()
    if scale is None:
        loss.backward()
        optimizer.step()
    else:
        scaler = GradScaler(init_scale=scale)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    found = [optimizer.per_sample_norms, optimizer.threshold]
    for p in model.parameters():
        found += [p.summed_grad, p.grad, p.detach()]
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", SCALES)
def test_bit_for_bit(scale: float, strategy: str) -> None:
    """Powers of two round nothing; the batch has 4 rows, so that neither does its mean."""
    model, x = mlp().float(), rows(4).float()
    plain, scaled = stepped(None, strategy, model, x), stepped(scale, strategy, model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "resnet"])
def test_float16_keeps_small_gradients(family: str) -> None:
    """Losses of 1e-7: most float16 gradients underflow without a scale, and none with it."""
    tiny, scale = 2.0**-24, 2.0**24
    model, batch, loss_fn = FAMILIES[family]()
    dtype = torch.float16
    grads = gradients_under(dtype, model, batch, loss_fn)
    grads = {name: tiny * g for name, g in grads.items()}
    C = norms(grads).median().item()
    errors = {}
    for name, scaler in (("none", None), ("ours", GradScaler(init_scale=scale))):
        twin = copy.deepcopy(model)
        _, private, optimizer, _ = make_private(twin, max_grad_norm=C, loss_reduction="sum")
        loss = tiny * losses_under(dtype, private, batch, loss_fn).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        errors[name] = relative_error(optimizer.per_sample_norms, norms(grads))
        if scaler is not None:
            params = dict(twin.named_parameters())
            assert_sums(summed(params), clipped_sum(grads, C), 6e-4)
    assert errors["ours"] <= 6e-5
    assert errors["none"] >= 0.1


class Wide(nn.Module):
    """One row in float16 range, another whose gradients leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_overflowing_samples_contribute_zero() -> None:
    """And the others exactly what they would without them; the step is taken."""
    model, x = Wide(), torch.randn(4, 6)
    weights = torch.tensor([1.0, 3e4, 1.0, 3e4])
    dtype, scale = torch.float16, 2.0**14

    def losses(net: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return weights * sample_loss(net(x)).float()

    twin = copy.deepcopy(model)
    grads: dict[str, list] = {n: [] for n, _ in model.named_parameters()}
    for i in (0, 2):
        twin.zero_grad()
        (scale * losses(twin, x[i : i + 1], weights[i : i + 1]).sum()).backward()
        for n, p in twin.named_parameters():
            grads[n].append(p.grad.double() / scale)
    finite = {n: torch.stack(g) for n, g in grads.items()}
    assert torch.isfinite(norms(finite)).all()
    C = norms(finite).median().item()

    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    scaler, before = GradScaler(init_scale=scale), copy.deepcopy(params)
    scaler.scale(losses(private, x, weights).sum()).backward()
    found = torch.isfinite(optimizer.per_sample_norms)
    assert found.tolist() == [True, False, True, False]
    assert_sums(summed(params), clipped_sum(finite, C), 1e-3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale
    assert all(torch.isfinite(p).all() and not torch.equal(p, before[n]) for n, p in params.items())


def test_all_samples_overflow() -> None:
    """A step of pure noise, like an empty batch's."""
    model = Wide()
    _, private, optimizer, _ = make_private(model, noise_multiplier=1.0)
    scaler = GradScaler(init_scale=2.0**32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = sample_loss(private(torch.randn(4, 6))).float().mean()
    scaler.scale(loss).backward()
    assert all(not p.summed_grad.any() for p in model.parameters())
    scaler.step(optimizer)
    assert all(torch.isfinite(p).all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("strategy", ["flat", "adaptive"])
@pytest.mark.parametrize("physical", [2, 3])
def test_physical_batches(physical: int, strategy: str) -> None:
    """Under BatchMemoryManager, with a scale that changes between physical batches."""

    def train(scaled: bool) -> tuple[nn.Module, float]:
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(24, 6, dtype=torch.float64))
        _, private, optimizer, loader = make_private(
            mlp(), dataset=data, batch_size=8, poisson_sampling=True, clipping=STRATEGIES[strategy],
            generator=torch.Generator().manual_seed(5),
        )  # fmt: skip
        scaler = GradScaler(enabled=scaled)
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as split:
            for i, (x,) in enumerate(split):
                optimizer.zero_grad()
                scaler.scale(sample_loss(private(x)).mean()).backward()
                scaler.step(optimizer)
                scaler.update(2.0 ** (i % 5))
        return private, optimizer.threshold.item()

    (plain, c1), (scaled, c2) = train(False), train(True)
    assert c1 == pytest.approx(c2, rel=1e-12)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert relative_error(b.detach(), a.detach()) <= 1e-12


def test_parts_of_a_loss() -> None:
    """Several scaled losses in one pass, one scale: as their sum."""
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    scaler = GradScaler()
    losses = sample_loss(private(x))
    parts = scaler.scale([losses[:2].sum() / 5, losses[2:].sum() / 5])
    sum(parts).backward()
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-12
    assert_sums(summed(params), clipped_sum(grads, C), 1e-10)


def test_one_pass_has_one_scale() -> None:
    private = make_private(mlp())[1]
    losses = sample_loss(private(rows()))
    scaler = GradScaler()
    first = scaler.scale(losses[:2].sum())
    scaler.update(2.0)
    with refused("scale the sum"):
        (first + scaler.scale(losses[2:].sum())).backward()
    backward(private, rows())  # and the next pass is as ever


def test_scaled_twice() -> None:
    scaler = GradScaler()
    loss = torch.ones((), requires_grad=True) * 2
    with refused("The loss is scaled already", GraphError):
        scaler.scale(scaler.scale(loss))


def test_one_pass_does_not_tell_another() -> None:
    """A scaled pass that failed, one that was paused, and an unscaled one after them."""
    model, x = mlp(), rows()
    grads = per_sample_gradients(model, x)
    engine, private, optimizer, _ = make_private(model, max_grad_norm=1e6)
    scaler = GradScaler()
    inputs = x.clone().requires_grad_()
    with engine.paused():
        scaler.scale(sample_loss(private(inputs)).mean()).backward()
    losses = sample_loss(private(x))
    losses.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        scaler.scale(losses.mean()).backward()
    backward(private, x)
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 1e-12


def _fail(_: torch.Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("stale", [False, True])
def test_torchs_scaler_is_no_silent_mistake(stale: bool) -> None:
    """It multiplies the loss and would divide `p.grad`, which does not hold the sums."""
    model = mlp()
    if stale:  # gradients from before make_private, in which torch's scaler finds no overflow
        sample_loss(model(rows())).mean().backward()
    _, private, optimizer, _ = make_private(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sample_loss(private(rows())).mean()).backward()
    with refused("fastclip.GradScaler", StepError):
        scaler.step(optimizer)


def test_torchs_scaler_switched_off() -> None:
    """As scripts leave it in for bfloat16."""
    private, optimizer = make_private(mlp())[1:3]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(sample_loss(private(rows())).mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(p.grad is not None for p in private.parameters())


def test_other_optimizers_are_refused() -> None:
    """Their gradients would keep the scale."""
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, hooks, _ = make_private(mlp(), grad_sample_mode="hooks")
    for optimizer in (plain, hooks):
        for call in (GradScaler().step, GradScaler().unscale_):
            with pytest.raises(ArgumentTypeError, match="make_private"):
                call(optimizer)


def test_disabled() -> None:
    scaler = GradScaler(enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()) == (1.0, False, {})
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows()).sum().backward()
    before = model[0].weight.clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(8.0)
    assert not torch.equal(before, model[0].weight)


def test_states() -> None:
    scaler = fastclip.GradScaler("cuda", init_scale=64)
    other = fastclip.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 64.0
    torch_state = {"scale": 64.0, "growth_factor": 2.0, "_growth_tracker": 3}
    with pytest.raises(ArgumentError, match="init_scale"):
        other.load_state_dict(torch_state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.update()
        other.update(torch.tensor(2.0))
    assert other.get_scale() == 2.0


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, float("inf"), float("nan"), 2.0**40, 2.0**-40])
def test_scales_that_would_round(scale: float) -> None:
    with pytest.raises(ArgumentError, match="power of two"):
        GradScaler(init_scale=scale)
    with pytest.raises(ArgumentError, match="power of two"):
        GradScaler().update(scale)


@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_interval": 100},
        {"growth": 2},
        {"device": 65536.0},
        {"init_scale": "big"},
        {"enabled": 1},
    ],
)
def test_arguments(arguments: dict) -> None:
    with pytest.raises(ArgumentTypeError):
        GradScaler(**arguments)


def test_losses_of_any_type() -> None:
    """float16 losses are scaled in float32; a float64 one stays what it is."""
    for dtype, wide in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        x = torch.tensor(2.0, dtype=dtype, requires_grad=True)
        scaled = GradScaler(init_scale=2.0**17).scale(F.relu(x))
        assert scaled.dtype == wide
        assert scaled.item() == 2.0**18
    with pytest.raises(ArgumentTypeError, match="tensor"):
        GradScaler().scale(1.0)
