"""Which optimizers a private step can drive, and why a private optimizer is not copied."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.networks import mlp, rows
from tests.oracle import backward, clipped_sum, per_sample_gradients, relative_error
from tests.refusal import refused

Build = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def private_with(build: Build, **changes: Any) -> tuple:
    """(engine, model, optimizer) of make_private with this inner optimizer."""
    model, engine = mlp(), FastPrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, *_ = engine.make_private(
            module=model, optimizer=build(model.parameters()),
            data_loader=DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=4),
            **{"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False, **changes},
        )  # fmt: skip
    return engine, private, optimizer


class NeedsClosure(torch.optim.SGD):
    """An optimizer of a user's, as LBFGS."""

    def step(self, closure: Callable[[], float], *, again: int = 2) -> float:
        return sum(closure() for _ in range(again))


class NeedsLoss(torch.optim.SGD):
    """Takes a value that nothing of a private step is."""

    def step(self, closure: Any = None, *, loss: float) -> None:
        super().step(closure)


class PassesOn(torch.optim.SGD):
    """Any arguments, none needed."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


class Lookahead(torch.optim.Optimizer):
    """Wraps another one, and leaves out what torch's own __init__ makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state, self.defaults = inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("mode", ["fast", "ghost", "hooks", "functorch"])
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.LBFGS, r"LBFGS\.step expects \['closure'\].*such as SGD or Adam"),
        (lambda p: NeedsClosure(p, lr=0.1), r"NeedsClosure\.step expects \['closure'\]"),
        (lambda p: NeedsLoss(p, lr=0.1), r"NeedsLoss\.step expects \['loss'\]"),
        (lambda p: torch.optim.SparseAdam(p), "noise makes every gradient dense"),
        (lambda p: Lookahead(torch.optim.SGD(p, lr=0.1)), r"Lookahead has no step hooks.*wraps? "),
    ],
)
def test_optimizers_that_are_refused(build: Build, message: str, mode: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        private_with(build, grad_sample_mode=mode)


def test_no_optimizer_at_all() -> None:
    for mode in ("fast", "hooks"):
        with pytest.raises(ArgumentTypeError, match=r"torch\.optim\.Optimizer, got generator"):
            private_with(lambda p: p, grad_sample_mode=mode)  # type: ignore[arg-type]


STEPS: dict[str, Build] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adafactor": torch.optim.Adafactor,
    "rprop": torch.optim.Rprop,
    "passes on": lambda p: PassesOn(p, lr=0.1),
    "groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 * q.dim()} for q in p]),
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_inner_one_of_the_clipped_mean(name: str) -> None:
    """Whatever the inner optimizer's flags are; its own hooks see released gradients only."""
    _, private, optimizer = private_with(STEPS[name])
    model = private._module
    twin, x = copy.deepcopy(mlp()), rows()
    twin.load_state_dict(model.state_dict())
    plain = STEPS[name](twin.parameters())
    seen: list[Tensor] = []
    optimizer.original_optimizer.register_step_pre_hook(
        lambda inner, *_: seen.extend(
            p.grad.clone() for g in inner.param_groups for p in g["params"]
        )
    )
    for _ in range(2):
        grads = clipped_sum(per_sample_gradients(twin, x), 1.0)
        for n, p in twin.named_parameters():
            p.grad = grads[n] / 4
        plain.step()
        optimizer.zero_grad()
        backward(private, x)
        optimizer.step()
        for g, p in zip(seen, twin.parameters(), strict=False):
            assert relative_error(g, p.grad) <= 1e-9
        seen.clear()
        for (n, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
            assert relative_error(q.detach(), p.detach()) <= 1e-9, n


def test_a_closure_is_called_once() -> None:
    _, private, optimizer = private_with(lambda p: torch.optim.SGD(p, lr=0.1))
    calls = []

    def closure() -> None:
        calls.append(torch.is_grad_enabled())
        backward(private, rows())

    optimizer.step(closure)
    assert calls == [True]


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps,
    "beside its model": lambda optimizer: copy.deepcopy({"optimizer": optimizer, "step": 3}),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["fast", "hooks", "hooks per_layer"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_optimizer(name: str, mode: str) -> None:
    """It would release the sums again; torch's way to copy one also breaks the class's step."""
    per_layer = {"clipping": "per_layer", "max_grad_norm": [1.0] * 4} if "per" in mode else {}
    engine, private, optimizer = private_with(
        lambda p: torch.optim.SGD(p, lr=0.1), grad_sample_mode=mode.split()[0], noise_multiplier=1.0,
        **per_layer,
    )  # fmt: skip
    backward(private, rows())
    step = type(optimizer).step
    with refused(r"state_dict\(\)", StepError):
        COPIES[name](optimizer)
    assert type(optimizer).step is step
    optimizer.step()
    assert sum(steps for *_, steps in engine.accountant.history) == 1


def test_a_state_dict_is_the_way_out() -> None:
    """Copied in any way, and loaded into an optimizer of another engine."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    _, private, optimizer = private_with(build)
    backward(private, rows())
    optimizer.step()
    state = pickle.loads(pickle.dumps(copy.deepcopy(optimizer.state_dict())))
    _, _, other = private_with(build)
    other.load_state_dict(state)
    for p, q in zip(optimizer.params, other.params, strict=True):
        momentum = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(momentum, other.state[q]["momentum_buffer"])


def test_a_copied_engine_pauses_no_copy_of_the_model() -> None:
    """It has no model: a block that pauses nothing would let its passes contribute."""
    engine, private, _ = private_with(lambda p: torch.optim.SGD(p, lr=0.1))
    with refused("make_private first", StepError), copy.deepcopy(engine).paused():
        backward(private, rows())


@pytest.mark.parametrize(
    ("copied", "steps"), [(copy.deepcopy, 2), (lambda e: pickle.loads(pickle.dumps(e)), 1)]
)
def test_a_copy_of_the_engine(copied: Callable, steps: int) -> None:
    """The same ledger in the same process, and the ledger as it stood in another."""
    engine, private, optimizer = private_with(
        lambda p: torch.optim.SGD(p, lr=0.1), noise_multiplier=1.0
    )
    backward(private, rows())
    optimizer.step()
    twin = copied(engine)
    assert twin.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    with refused("make_private first", StepError):
        twin.plan()
    optimizer.zero_grad()
    backward(private, rows())
    optimizer.step()
    assert sum(taken for *_, taken in engine.accountant.history) == 2
    assert sum(taken for *_, taken in twin.accountant.history) == steps


def test_a_copy_of_the_model_releases_nothing() -> None:
    """A plain optimizer of the copy finds no gradient; the private one does not know it."""
    _, private, optimizer = private_with(lambda p: torch.optim.SGD(p, lr=0.1))
    twin: nn.Module = copy.deepcopy(private)
    before = [p.clone() for p in twin.parameters()]
    backward(twin, rows())
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), before, strict=True))
    with refused("without a backward pass", StepError):
        optimizer.step()
