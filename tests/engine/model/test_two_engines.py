"""One engine a parameter: whatever two engines share, no sample is released by both in silence."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any

import opacus
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.backward.sums import ClippedSums
from fastclip.errors import StepError, UnsupportedLayerError
from tests.oracle import per_sample_gradients, relative_error, sample_loss
from tests.refusal import refused

D = 4
SHARED = ("model", "submodule", "container", "parameter")
MODES = ("fast", "hooks", "functorch", "ew")


class Tied(nn.Module):
    """A layer whose weight may be another model's, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        self.layer.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied(nn.Parameter(torch.randn(D, D)))


def sharing(first: Any, how: str) -> nn.Module:
    """Another model that has something of `first`."""
    parts = {
        "model": lambda: first, "submodule": lambda: first.layer,
        "container": lambda: nn.Sequential(nn.Linear(D, D), first),
        "parameter": lambda: Tied(first.layer.weight),
    }  # fmt: skip
    return parts[how]()


def private(net: nn.Module, mode: str, kind: Any = FastPrivacyEngine, **kwargs: Any) -> tuple:
    """(engine, model, optimizer) of noise 0 and C = 1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        engine = kind()
    inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)
    inner = kwargs.pop("optimizer", inner)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    made = engine.make_private(
        module=net, optimizer=inner, grad_sample_mode=mode,
        data_loader=DataLoader(TensorDataset(torch.zeros(8, D)), batch_size=4), **options | kwargs,
    )  # fmt: skip
    return engine, made[0], made[1]


def backward(net: nn.Module, rows: int = 3, scale: float = 100.0) -> Tensor:
    torch.manual_seed(5)
    x = torch.randn(rows, D)
    (sample_loss(net(x)).mean() * scale).backward()
    return x


@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.one_in(18)
def test_what_a_living_engine_owns_is_refused(first: str, second: str, how: str) -> None:
    """Whole, in part or by one parameter; the first goes on; after cleanup() the second may."""
    net = model()
    _, held, optimizer = private(net, first)
    other = sharing(net, how)
    state = {name: set(vars(m)) for name, m in other.named_modules()}
    with refused(r"cleanup\(\)", UnsupportedLayerError):
        private(other, second)
    assert {name: set(vars(m)) for name, m in other.named_modules()} == state
    before = [p.detach().clone() for p in net.parameters()]
    backward(held, rows=1)
    optimizer.step()
    moved = [p.detach() - b for p, b in zip(net.parameters(), before, strict=True)]
    divisor = 4  # the expected batch; one row contributes C / B, and no more
    assert torch.cat([m.flatten() for m in moved]).norm() * divisor == pytest.approx(1, abs=1e-4)
    held.cleanup()
    _, held, optimizer = private(other, second)
    if how == "container" and second == "ew":
        return  # Opacus' ExpandedWeights do not know the layer's module
    backward(held, rows=1)
    optimizer.step()


@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_plain_opacus_on_a_private_model(mode: str, how: str) -> None:
    """It cannot be stopped at its make_private: the fast mode refuses at its next pass."""
    net = model()
    _, held, optimizer = private(net, "fast")
    private(sharing(net, how), mode, opacus.PrivacyEngine, criterion=nn.CrossEntropyLoss())
    with refused(r"a second engine \(Opacus'\).*cleanup\(\)", StepError):
        backward(held)
    assert all(p.grad is None for p in net.parameters())
    with refused("second engine", StepError):
        optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_plain_opacus_through_its_own_wrapper(mode: str) -> None:
    """Neither of the two releases anything."""
    net = model()
    _, _, optimizer = private(net, "fast")
    _, wrapper, theirs = private(net, mode, opacus.PrivacyEngine)
    before = [p.detach().clone() for p in net.parameters()]
    with refused("second engine", StepError):
        backward(wrapper)
    for each in (optimizer, theirs):
        with pytest.raises(ValueError):
            each.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def test_plain_opacus_between_backward_and_step() -> None:
    net = model()
    _, held, optimizer = private(net, "fast")
    backward(held)
    _, wrapper, _ = private(net, "hooks", opacus.PrivacyEngine)
    with refused("second engine", StepError):
        optimizer.step()
    wrapper.cleanup()
    optimizer.zero_grad()
    backward(held)
    optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_plain_opacus_first(mode: str) -> None:
    """Its hooks are seen; an "ew" wrapper, which has none, was dropped or fails when it is used."""
    net = model()
    _, wrapper, _ = private(net, mode, opacus.PrivacyEngine)
    if mode == "hooks":
        with refused(r"GradSampleModule.*cleanup\(\)", UnsupportedLayerError):
            private(net, "fast")
        with refused(r"GradSampleModule.*cleanup\(\)", UnsupportedLayerError):
            private(wrapper, "fast")
        wrapper.cleanup()
    _, held, optimizer = private(net, "fast")
    backward(held)
    optimizer.step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_is_gone_owns_nothing(mode: str) -> None:
    """Models refer to themselves; dropping them is enough all the same."""
    gc.disable()
    try:
        weight = nn.Parameter(torch.randn(D, D))
        for _ in range(3):
            _, held, optimizer = private(Tied(weight), mode)
            backward(held)
            optimizer.step()
            del held, optimizer, _
    finally:
        gc.enable()


def test_a_frozen_parameter_belongs_to_nobody() -> None:
    """Two heads on one frozen backbone, each private by itself."""
    weight = nn.Parameter(torch.randn(D, D), requires_grad=False)
    made = [private(Tied(weight), mode) for mode in MODES]
    for _, held, optimizer in made:
        backward(held)
        optimizer.step()


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch", "ew"])
def test_made_private_again(mode: str) -> None:
    """The wrapper that make_private returned, with a new optimizer: the earlier one is retired."""
    net = model()
    _, held, first = private(net, mode)
    _, held, second = private(held, mode)
    backward(held)
    with pytest.raises(StepError, match="made private again or cleaned up"):
        first.step()
    second.step()


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_after_cleanup_in_another_mode(first: str, second: str) -> None:
    """The same inner optimizer goes on; the private one of before releases nothing any more."""
    net = model()
    _, held, earlier = private(net, first)
    backward(held)
    earlier.step()
    earlier.zero_grad()
    held.cleanup()
    _, again, optimizer = private(net, second, optimizer=earlier)
    assert optimizer.original_optimizer is earlier.original_optimizer
    before = [p.detach().clone() for p in net.parameters()]
    backward(again)
    with pytest.raises(ValueError, match=r"made private again or cleaned up|not initialized"):
        earlier.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    optimizer.step()
    assert not all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def test_two_optimizers_of_one_model() -> None:
    """One for each half: the second make_private retires the first, which says so."""
    net = model()
    parts = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (net.layer, net.head)]
    _, held, first = private(net, "fast", optimizer=parts[0])
    _, held, second = private(held, "fast", optimizer=parts[1])
    backward(held)
    second.step()
    with pytest.raises(StepError, match="made private again or cleaned up"):
        first.step()


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_a_make_private_that_fails_owns_nothing(mode: str) -> None:
    """Adaptive clipping without its keywords: the hooks that were on already come off."""
    net = model()
    hooks = [len(m._forward_hooks) for m in net.modules()]
    for _ in range(2):
        with pytest.raises(TypeError, match="target_unclipped_quantile"):
            private(net, mode, clipping="adaptive")
        assert [len(m._forward_hooks) for m in net.modules()] == hooks
    _, held, optimizer = private(net, "fast")
    backward(held)
    optimizer.step()


CHANGES = {
    "set": lambda p: setattr(p, "summed_grad", p.summed_grad * 1000),
    "in place": lambda p: p.summed_grad.mul_(1000),
    "added": lambda p: setattr(p, "summed_grad", p.summed_grad + torch.ones_like(p)),
    "none": lambda p: setattr(p, "summed_grad", None),
    "deleted": lambda p: delattr(p, "summed_grad"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_summed_grad_is_there_to_be_read(mode: str, change: str) -> None:
    """Nothing that is put in its place is released; zero_grad() and the next batch go on."""
    net = model()
    _, held, optimizer = private(net, mode)
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):  # in Opacus' modes the sums of a split batch are written by step()
        optimizer.signal_skip_step(True)
        backward(held)
        optimizer.step()
        optimizer.zero_grad()
    CHANGES[change](net.layer.weight)
    with refused(r"summed_grad .* was changed after", StepError):
        backward(held)
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    optimizer.discard_logical_batch()
    backward(held, rows=1)
    optimizer.step()
    moved = [p.detach() - b for p, b in zip(net.parameters(), before, strict=True)]
    assert torch.cat([m.flatten() for m in moved]).norm() * 4 <= 1 + 1e-5


def test_copies_and_pickles_have_no_sums() -> None:
    """A copy gathers its own; it never releases what the original has summed."""
    net = model()
    _, held, _ = private(net, "fast")
    backward(held)
    twin = copy.deepcopy(held)
    assert not twin.grad_state.sums
    assert twin.grad_state.batch.fresh
    assert all("summed_grad" not in vars(p) for p in twin._module.parameters())
    state = pickle.loads(pickle.dumps(held.grad_state.sums))
    assert not state
    x = backward(twin)
    reference = per_sample_gradients(model(), x, lambda y, _: sample_loss(y) * 100)
    flat = torch.cat([g.flatten(1) for g in reference.values()], dim=1)
    rows = flat * (1 / flat.norm(dim=1)).clamp(max=1)[:, None]
    found = torch.cat([p.summed_grad.flatten() for p in twin._module.parameters()])
    assert relative_error(found, rows.sum(0)) < 1e-5


def test_a_pickled_model_is_no_way_around() -> None:
    """Parameters that come back with somebody's sums as an attribute start from none."""
    weight = nn.Parameter(torch.zeros(D, D))
    weight.summed_grad = torch.full((D, D), 1e6)
    file = io.BytesIO()
    torch.save(Tied(weight), file)
    file.seek(0)
    net = torch.load(file, weights_only=False)
    assert net.layer.weight.summed_grad is not None
    _, held, optimizer = private(net, "fast")
    before = net.layer.weight.detach().clone()
    backward(held, rows=1)
    optimizer.step()
    assert (net.layer.weight - before).norm() * 4 <= 1 + 1e-5


def test_sums_that_are_parts_of_one_buffer() -> None:
    """As a rule may return them for weight and bias: adding to one is no change of the other."""
    buffer = torch.arange(6.0)
    first, second = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    sums = ClippedSums()
    for _ in range(3):
        sums.add(first, buffer[:4])
        sums.add(second, buffer[4:])
    assert torch.equal(sums.take(first), 3 * buffer[:4].view(2, 2))
    assert torch.equal(sums.take(second), 3 * buffer[4:])
    assert torch.equal(buffer, torch.arange(6.0))


# What a copy was trained with


def trained(mode: str) -> tuple:
    """(engine, model, optimizer) after a step."""
    engine, held, optimizer = private(model(), mode, noise_multiplier=1.0)
    backward(held)
    optimizer.step()
    optimizer.zero_grad()
    return engine, held, optimizer


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_takes_the_steps_in_its_weights_along(mode: str) -> None:
    """As of the copy; what the original is trained with later is not in them."""
    engine, held, optimizer = trained(mode)
    twin = copy.deepcopy(held)
    backward(held)
    optimizer.step()
    with pytest.warns(UserWarning, match="^Another FastPrivacyEngine trained this model before"):
        other, again, _ = private(copy.deepcopy(twin), mode, noise_multiplier=1.0)
    assert other.accountant.history == [(1.0, 1.0, 1)]
    assert other.accountant.protected == engine.accountant.protected
    optimizer = torch.optim.SGD(again.parameters(), lr=1.0)
    other, again, optimizer = private(again, mode, type(engine), optimizer=optimizer)
    assert other.accountant.history == [(1.0, 1.0, 1)]


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_an_engine_knows_the_steps_of_its_own_copies(mode: str) -> None:
    engine, held, optimizer = trained(mode)
    twin = copy.deepcopy(held)
    backward(held)
    optimizer.step()
    before = list(engine.accountant.history)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the model is private already")
        private(twin, mode, lambda: engine, noise_multiplier=1.0)
    assert engine.accountant.history == before


def test_a_copy_from_before_the_first_step_owes_nothing() -> None:
    _, held, _ = private(model(), "fast", noise_multiplier=1.0)
    other, _, _ = private(copy.deepcopy(held), "fast", noise_multiplier=1.0)
    assert other.accountant.history == []
