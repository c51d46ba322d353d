"""Hooks of a step, in the fast mode and in Opacus' own: the accountant sees every real step once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from tests.oracle import sample_loss

LOADED = "optimizer.load_state_dict loaded the state of earlier steps, but"

pytestmark = pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])


def start(mode: str, kind=torch.optim.SGD, **told):
    torch.manual_seed(0)
    engine, model = FastPrivacyEngine(accountant="rdp"), nn.Linear(6, 2)
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=kind(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(24, 6)), 6), noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode, **told,
    )  # fmt: skip
    return engine, private, optimizer


def step(private: nn.Module, optimizer) -> None:
    optimizer.zero_grad()
    sample_loss(private(torch.randn(6, 6))).mean().backward()
    optimizer.step()


def assigned(optimizer, seen: list) -> None:
    optimizer.step_hook = lambda _: seen.append("hook")


def removed(optimizer, seen: list) -> None:
    optimizer.step_hook = None
    seen.append("hook")


def attached(optimizer, seen: list) -> None:
    optimizer.attach_step_hook(lambda _: seen.append("hook"))


def chained(optimizer, seen: list) -> None:
    """As a user of Opacus keeps the accountant's hook."""
    before = optimizer.step_hook

    def both(given) -> None:
        before(given)
        seen.append("hook")

    optimizer.step_hook = both


def never_called(optimizer, seen: list) -> None:
    """A hook that would leave the accountant's out."""
    before = optimizer.step_hook
    optimizer.step_hook = lambda given: seen.append("hook") or (len(seen) > 5 and before(given))


def twice(optimizer, seen: list) -> None:
    chained(optimizer, [])
    chained(optimizer, seen)


@pytest.mark.parametrize("way", [assigned, removed, attached, chained, never_called, twice])
def test_every_step_is_recorded_once(mode: str, way: Callable) -> None:
    engine, private, optimizer = start(mode)
    seen: list = []
    way(optimizer, seen)
    for steps in (1, 2):
        step(private, optimizer)
        assert engine.accountant.history == [(1.0, 1.0, steps)]
    assert len(seen) == (1 if way is removed else 2)


def test_hooks_run_in_order_after_the_accountant(mode: str) -> None:
    engine, private, optimizer = start(mode)
    seen: list = []
    optimizer.step_hook = lambda _: seen.append((0, len(engine.accountant)))
    for number in (1, 2):
        optimizer.attach_step_hook(lambda _, n=number: seen.append((n, len(engine.accountant))))
    step(private, optimizer)
    assert seen == [(0, 1), (1, 1), (2, 1)]
    optimizer.step_hook = None
    step(private, optimizer)
    assert len(seen) == 3


def test_a_hook_that_fails_releases_nothing_and_the_next_step_is_recorded(mode: str) -> None:
    engine, private, optimizer = start(mode)
    before = [p.detach().clone() for p in optimizer.params]

    def fails(_) -> None:
        raise KeyboardInterrupt

    optimizer.step_hook = fails
    with pytest.raises(KeyboardInterrupt):
        step(private, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(optimizer.params, before, strict=True))
    optimizer.step_hook = None
    recorded = sum(steps for *_, steps in engine.accountant.history)
    step(private, optimizer)
    assert engine.accountant.history == [(1.0, 1.0, recorded + 1)]


def test_an_accountant_that_fails_releases_nothing(mode: str, monkeypatch) -> None:
    engine, private, optimizer = start(mode)
    before = [p.detach().clone() for p in optimizer.params]
    step_of = type(engine.accountant).__mro__[2].step

    def half(self, **kwargs) -> None:
        step_of(self, **kwargs)
        raise ArithmeticError

    monkeypatch.setattr(type(engine.accountant).__mro__[2], "step", half)
    with pytest.raises(ArithmeticError):
        step(private, optimizer)
    assert engine.accountant.history == []
    assert all(torch.equal(p, old) for p, old in zip(optimizer.params, before, strict=True))


def test_loading_the_optimizer_s_state_keeps_the_hooks(mode: str) -> None:
    engine, private, optimizer = start(mode)
    seen: list = []
    attached(optimizer, seen)
    optimizer.load_state_dict(optimizer.state_dict())
    step(private, optimizer)
    assert len(engine.accountant) == len(seen) == 1


MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize("kind", [torch.optim.Adam, MOMENTUM, torch.optim.Adagrad])
def test_a_state_of_steps_without_a_ledger(mode: str, kind) -> None:
    """The first step after it warns, once, whatever optimizer it is of."""
    _, private, optimizer = start(mode, kind)
    fresh = copy.deepcopy(optimizer.state_dict())
    step(private, optimizer)
    saved = optimizer.state_dict()
    engine, private, optimizer = start(mode, kind)
    optimizer.load_state_dict(fresh)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", LOADED)
        step(private, optimizer)
    engine, private, optimizer = start(mode, kind)
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match=LOADED + ".* engine.load_checkpoint.*#checkpoints$"):
        step(private, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", LOADED)
        step(private, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # as a divergent run is set back
        step(private, optimizer)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("ledger_first", [True, False])
def test_a_state_of_steps_with_its_ledger(mode: str, ledger_first: bool, tmp_path: Path) -> None:
    """In either order, and by load_checkpoint."""
    engine, private, optimizer = start(mode, torch.optim.Adam)
    step(private, optimizer)
    saved = [
        (optimizer, optimizer.state_dict()),
        (engine.accountant, engine.accountant.state_dict()),
    ]
    engine.save_checkpoint(path=tmp_path / "run.pt", module=private, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", LOADED)
        later, private, resumed = start(mode, torch.optim.Adam)
        of = {id(optimizer): resumed, id(engine.accountant): later.accountant}
        for source, state in reversed(saved) if ledger_first else saved:
            of[id(source)].load_state_dict(state)
        step(private, resumed)
        later, private, resumed = start(mode, torch.optim.Adam)
        later.load_checkpoint(path=tmp_path / "run.pt", module=private, optimizer=resumed)
        step(private, resumed)
