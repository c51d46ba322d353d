"""Opacus' modes: what is not released does not reach the inner step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader, TensorDataset

import fastclip
from fastclip import ops
from fastclip.engine.opacus_modes.optimizers import clip_on_devices
from fastclip.errors import ArgumentTypeError, StepError
from tests.opacus_runs import ALL, MODES, B, C, D, backward, gradients, moved, rows, start, weights
from tests.oracle import clipped_sum, norms, relative_error, sample_loss
from tests.refusal import refused


@pytest.mark.parametrize("frozen", [[0], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("mode", ALL)
def test_frozen_between_backward_and_step(mode: str, frozen: list[int]) -> None:
    """Raw gradients of norms up to 668 lay in p.grad; none of them is stepped on."""
    net, model, optimizer, _ = start(mode)
    before = weights(net)
    backward(model)
    parameters = list(net.parameters())
    for i in frozen:
        parameters[i].requires_grad_(False)
    if len(frozen) < 4:
        optimizer.step()
    else:
        optimizer.step()
        assert all(p.grad is None for p in parameters)
    distances = moved(net, before)
    assert all(distances[i] == 0 for i in frozen)
    assert sum(d**2 for d in distances) ** 0.5 <= C * (1 + 1e-5)  # B samples of at most C, over B
    for p in parameters:
        p.requires_grad_(True)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert all(d > 0 for d in moved(net, before))


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_that_freezes(mode: str) -> None:
    net, model, optimizer, _ = start(mode)
    before = weights(net)

    def closure() -> None:
        optimizer.zero_grad()
        backward(model)
        net[0].requires_grad_(False)

    optimizer.step(closure)
    assert moved(net, before)[:2] == [0, 0]
    assert 0 < moved(net, before)[2] <= C * (1 + 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_for_a_while_nothing_is_left_behind(mode: str) -> None:
    """Sums and samples of a batch that was released without the parameter do not join the next."""
    net, model, optimizer, _ = start(mode)
    weight = net[0].weight
    optimizer.signal_skip_step(True)
    backward(model, rows(1))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.signal_skip_step(False)
    backward(model, rows(2))
    weight.requires_grad_(False)
    optimizer.step()
    optimizer.zero_grad()
    weight.requires_grad_(True)
    x = rows(3)
    reference = gradients(net, x)
    backward(model, x)
    optimizer.step()
    expected = clipped_sum(reference, C)["0.weight"]
    assert relative_error(weight.summed_grad, expected) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_unfrozen_between_backward_and_step(mode: str) -> None:
    """It has no per-sample gradients of this batch: Opacus' error, and nothing is released."""
    net, model, optimizer, _ = start(mode)
    net[0].weight.requires_grad_(False)
    backward(model)
    net[0].weight.requires_grad_(True)
    before = weights(net)
    with pytest.raises(ValueError, match=r"[Pp]er sample gradient"):
        optimizer.step()
    assert moved(net, before) == [0] * 4


class Routed(nn.Module):
    """A batch passes through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, 2), nn.Linear(D, 2)
        self.to_left, self.unused = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (self.left if self.to_left else self.right)(x)
        if self.unused:
            self.right(x)
        return out


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("mode", ALL)
def test_a_layer_that_a_batch_does_not_reach(mode: str, unused: bool) -> None:
    """The refusal names it and the way out, which is one."""
    net = Routed()
    net.unused = unused and mode != "ew"
    model, optimizer, _ = fastclip.FastPrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.randn(32, D)), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=C, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    backward(model)
    before = weights(net)
    if mode == "fast":
        optimizer.step()
        assert moved(net, before)[0] > 0 == moved(net, before)[2]
        return
    way_out = "discard_logical_batch" if net.unused else r"right.weight, .*Freeze them"
    with refused(way_out, StepError):
        optimizer.step()
    assert moved(net, before) == [0] * 4
    optimizer.discard_logical_batch()
    net.right.requires_grad_(False)
    backward(model)
    optimizer.step()
    assert moved(net, before)[0] > 0 == moved(net, before)[2]


@pytest.mark.parametrize("mode", MODES)
def test_a_param_group_that_comes_later(mode: str) -> None:
    """A frozen one with a gradient of its own, and one of another private model."""
    _, model, optimizer, _ = start(mode)
    extra = nn.Parameter(torch.zeros(3), requires_grad=False)
    extra.grad = torch.full((3,), 668.0)
    optimizer.add_param_group({"params": [extra]})
    backward(model)
    optimizer.step()
    assert not extra.any()
    optimizer.zero_grad()
    other, elsewhere, _, _ = start(mode)
    optimizer.add_param_group({"params": list(other[0].parameters())})
    backward(model)
    backward(elsewhere, rows(7))
    with refused("do not belong to its private model", StepError):
        optimizer.step()


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_inner_step_called_directly(mode: str, dropped: bool) -> None:
    """The script goes on with the optimizer that it gave to make_private."""
    net, model, optimizer, _ = start(mode)
    inner = optimizer.original_optimizer
    before = weights(net)
    backward(model)
    if dropped:
        del optimizer
    with refused("the optimizer that make_private returned", StepError):
        inner.step()
    assert moved(net, before) == [0] * 4
    model.cleanup()
    backward(net)
    inner.step()  # training without privacy, as asked for
    assert max(moved(net, before)) > 1


def test_pre_step_then_the_inner_step() -> None:
    """What Opacus' own distributed optimizers do; once a release."""
    net, model, optimizer, _ = start()
    before = weights(net)
    backward(model)
    assert optimizer.pre_step()
    optimizer.original_optimizer.step()
    assert 0 < max(moved(net, before)) <= C
    with refused("make_private returned", StepError):
        optimizer.original_optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.signal_skip_step(True)
    assert not optimizer.pre_step()
    with refused("make_private returned", StepError):
        optimizer.original_optimizer.step()


def test_the_parts_of_a_step_called_by_hand() -> None:
    """As Opacus' parts do: a sum is released once, and nothing is added to it afterwards."""
    net, model, optimizer, _ = start()
    backward(model)
    optimizer.clip_and_accumulate()
    optimizer.add_noise()
    assert 0 < float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm()) <= B * C
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.add_noise()
    model.zero_grad()
    backward(model)
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.clip_and_accumulate()


def test_a_physical_batch_is_summed_once() -> None:
    _, model, optimizer, _ = start()
    backward(model)
    optimizer.signal_skip_step(True)
    optimizer.step()
    with pytest.raises(ValueError, match="haven't been cleared"):
        optimizer.step()


SCALERS = {
    "torch.amp": lambda: torch.amp.GradScaler("cpu"),
    "torch.amp, unscaled before": lambda: torch.amp.GradScaler("cpu"),
    "torch.cuda.amp": lambda: torch.cuda.amp.GradScaler(),  # off where there is no GPU
    "sharded": lambda: ShardedGradScaler("cpu"),
}


@pytest.mark.filterwarnings("ignore:.*GradScaler.*")
@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("mode", ALL)
def test_torchs_grad_scaler_is_refused(mode: str, kind: str) -> None:
    """In every mode: it skips steps by raw gradients. Off, it only calls step()."""
    net, model, optimizer, _ = start(mode)
    scaler = SCALERS[kind]()
    before = weights(net)
    scaler.scale(sample_loss(model(rows())).mean()).backward()
    if "unscaled" in kind and mode != "fast":  # nothing to unscale there
        scaler.unscale_(optimizer)
    if scaler.is_enabled():
        with refused(r"errors.html#mixed-precision", StepError):
            scaler.step(optimizer)
        assert moved(net, before) == [0] * 4
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(sample_loss(model(rows())).mean()).backward()
    off.step(optimizer)
    assert max(moved(net, before)) > 0


@pytest.mark.parametrize("mode", MODES)
def test_our_grad_scaler_is_for_the_fast_mode(mode: str) -> None:
    net, model, optimizer, _ = start(mode)
    scaler = fastclip.GradScaler()
    before = weights(net)
    scaler.scale(sample_loss(model(rows())).mean()).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ArgumentTypeError, match=r"fast mode.*errors.html#mixed-precision"):
            call(optimizer)
    assert moved(net, before) == [0] * 4


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("thresholds", [2.0, [0.5, 1.0, 3.0, 0.1]])
def test_a_model_spread_over_devices(thresholds: float | list[float], bad: bool) -> None:
    """Device by device, with the others' norm beside: as if all lay together."""
    torch.manual_seed(0)
    samples = [torch.randn(7, *shape) for shape in ((3, 2), (4,), (2, 2), (5,))]
    if bad:
        samples[2][3] = float("nan")
    expected, reference = ops.clip_accumulate(samples, thresholds)
    sums, found = clip_on_devices(samples, thresholds, [[1, 3], [0, 2]])
    assert torch.allclose(found, reference, rtol=1e-6, equal_nan=True)
    for mine, other in zip(sums, expected, strict=True):
        if not bad or isinstance(thresholds, float):
            assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
        assert torch.isfinite(mine).all()
    total = norms({str(i): g.nan_to_num().double() for i, g in enumerate(samples)})
    assert (total > 2).any()
