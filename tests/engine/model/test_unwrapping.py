"""A private model stays the user's: its methods, its names, its files."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, bare_state_dict, unwrap
from tests.opacus_runs import needs_16
from tests.oracle import make_private, norms, per_sample_gradients, sample_loss

D, N, B = 4, 32, 8


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 3))


class Nested(nn.Module):
    """Of which every key begins as a wrapper's would."""

    def __init__(self) -> None:
        super().__init__()
        self.module = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def private(model: nn.Module, **options: Any) -> tuple:
    loader = DataLoader(TensorDataset(torch.randn(N, D)), batch_size=B)
    return FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip


def a_pass(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        optimizer.zero_grad()
        sample_loss(model(x)).mean().backward()
        optimizer.step()


def test_unwrap_gives_the_model_that_was_given() -> None:
    model = mlp()
    wrapped, optimizer, loader = private(model)
    assert unwrap(wrapped) is model
    assert unwrap(torch.compile(wrapped, backend="eager")) is model
    a_pass(wrapped, optimizer, loader)
    assert unwrap(wrapped) is unwrap(model) is model


def test_unwrap_of_a_handle() -> None:
    model = mlp()
    handle, *_ = private(model, wrap_model=False)
    assert unwrap(handle) is model


@pytest.mark.parametrize(
    "mode", ["fast", pytest.param("hooks", marks=needs_16("its own modes wrap the model"))]
)
def test_a_checkpoint_of_a_handle(tmp_path: Path, mode: str) -> None:
    """It stands for its model, whose keys the file has."""
    model = mlp()
    engine, handle, optimizer, _ = make_private(model, wrap_model=False, grad_sample_mode=mode)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=handle, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine.load_checkpoint(path=tmp_path / "run.pt", module=handle, optimizer=optimizer)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    if mode == "fast":
        assert engine.run_state(module=handle, optimizer=optimizer).state_dict()


@pytest.mark.parametrize("wrong", [None, {}, "model"])
def test_unwrap_of_something_else(wrong: Any) -> None:
    sentence = rf"^model expects what make_private returned, got {type(wrong).__name__}\.$"
    with pytest.raises(TypeError, match=sentence):
        unwrap(wrong)


@pytest.mark.parametrize("make", [mlp, Nested])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ddp", [False, True])
def test_a_saved_state_loads_into_the_bare_model(make: Any, compiled: bool, ddp: bool) -> None:
    model = make()
    wrapped, optimizer, loader = private(model)
    a_pass(wrapped, optimizer, loader)
    outer = torch.compile(wrapped, backend="eager") if compiled else wrapped
    saved = io.BytesIO()
    torch.save({("module." * ddp) + key: value for key, value in outer.state_dict().items()}, saved)
    saved.seek(0)
    new = make()
    new.load_state_dict(bare_state_dict(torch.load(saved, weights_only=True), new))
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), model.parameters(), strict=True))
    assert bare_state_dict(model.state_dict(), new).keys() == model.state_dict().keys()


def test_a_state_of_another_model() -> None:
    sentence = "expects keys of Sequential such as '0.weight', got '_module.weight'"
    with pytest.raises(ValueError, match=sentence):
        bare_state_dict(private(nn.Linear(D, 3))[0].state_dict(), mlp())


@pytest.mark.parametrize("make", [mlp, Nested])
def test_a_private_model_loads_the_bare_models_state(make: Any) -> None:
    other = make()
    nn.init.ones_(next(other.parameters()))
    wrapped, *_ = private(make())
    for state in (other.state_dict(), {f"_module.{k}": v for k, v in other.state_dict().items()}):
        result = wrapped.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.equal(next(wrapped.parameters()), next(other.parameters()))
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({})
    assert wrapped.load_state_dict({}, strict=False).missing_keys


@pytest.mark.parametrize("trained", [False, True])
def test_a_private_model_is_not_pickled(trained: bool) -> None:
    """What was written could not have been read: a layer's forward would be missing in its class."""
    model = mlp()
    wrapped, optimizer, loader = private(model)
    if trained:
        a_pass(wrapped, optimizer, loader)
    for of in (wrapped, model, model[0]):
        with pytest.raises(
            RuntimeError, match=r"^A private model cannot be pickled\. Save fastclip\.unwrap"
        ):
            pickle.dumps(of)
        with pytest.raises(RuntimeError, match=r"errors.html#wrapped-model"):
            torch.save(of, io.BytesIO())
    wrapped.cleanup()
    again = pickle.loads(pickle.dumps(unwrap(wrapped)))
    x = torch.randn(2, D)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("trained", [False, True])
def test_a_deep_copy_clips_its_own_rows(trained: bool) -> None:
    wrapped, optimizer, loader = private(mlp(), poisson_sampling=False)
    if trained:
        a_pass(wrapped, optimizer, loader)
    twin = copy.deepcopy(wrapped)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    x = torch.randn(5, D)
    sample_loss(twin(x)).mean().backward()
    plain = mlp()
    plain.load_state_dict(bare_state_dict(twin.state_dict(), plain))
    expected = norms(per_sample_gradients(plain, x))
    torch.testing.assert_close(twin.grad_state.per_sample_norms, expected.float())


def test_loops_that_ask_opacus_whether_a_model_is_wrapped() -> None:
    """isinstance(model, GradSampleModule), as loops written for Opacus unwrap what they save."""
    module = nn.Linear(3, 2)
    private = make_private(module)[1]
    assert isinstance(private, GradSampleModule)
    assert private._module is module
    assert not isinstance(module, GradSampleModule)
