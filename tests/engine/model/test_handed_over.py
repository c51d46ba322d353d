"""A model that one engine has trained goes on in another: what it has spent goes with it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError

MODES = ["fast", "hooks"]


def private(engine: FastPrivacyEngine, made: Any = None, mode: str = "fast", **options: Any) -> Any:
    if made is None:
        model = nn.Linear(4, 2)
        made = (
            model, torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=8),
        )  # fmt: skip
    module, optimizer, loader = made
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "rand_on_empty": True}
    return engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode,
        **arguments | options,
    )  # fmt: skip


def epoch(made: Any) -> None:
    module, optimizer, loader = made
    for (x,) in loader:
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()


def engine(accountant: str = "rdp") -> FastPrivacyEngine:
    return FastPrivacyEngine(accountant=accountant)


def planned(*entries: tuple[float, float, int]) -> float:
    one = engine()
    one.accountant.history = list(entries)
    return one.get_epsilon(1e-5)


@pytest.mark.parametrize("optimizer", ["old", "new"])
@pytest.mark.parametrize("mode", MODES)
def test_a_cell_that_is_run_again(mode: str, optimizer: str) -> None:
    """One epsilon of all steps that are in the weights; each counts once, however often it is run."""
    made = private(first := engine(), mode=mode)
    for _ in range(3):
        epoch(made)
    assert first.get_epsilon(1e-5) == pytest.approx(planned((1.0, 0.25, 12)))
    second = engine()
    for _ in range(2):
        if optimizer == "new":
            made = made[0], torch.optim.SGD(made[0].parameters(), lr=0.1), made[2]
        made = private(second, made, mode)
    epoch(made)
    assert second.get_epsilon(1e-5) == pytest.approx(planned((1.0, 0.25, 16)))
    third = engine()
    epoch(private(third, made, mode))
    assert third.get_epsilon(1e-5) == pytest.approx(planned((1.0, 0.25, 20)))


@pytest.mark.parametrize("mode", MODES)
def test_it_is_said_once_and_only_where_steps_were_taken(mode: str, recwarn) -> None:
    def said() -> int:
        return sum("counts those steps" in str(w.message) for w in recwarn.list)

    made = private(engine(), mode=mode)
    made = private(second := engine(), made, mode)
    assert not said()
    assert not second.accountant.history
    epoch(made)
    made = private(second, made, mode)
    assert not said()
    private(engine(), made, mode)
    assert said() == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_counted_is_refused(mode: str) -> None:
    """And the first engine goes on."""
    made = private(first := engine(), mode=mode)
    epoch(made)
    made[1].noise_multiplier = 2.0
    epoch(made)
    with pytest.raises(ArgumentError, match="constant"):
        private(engine("gdp"), made, mode)
    epoch(made)
    assert sum(steps for *_, steps in first.accountant.history) == 12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("held", ["wrapper", "model", "part"])
def test_what_was_let_go_is_counted(mode: str, held: str, recwarn) -> None:
    """cleanup() takes no step out of the weights, whoever holds them and whatever they are put into."""
    made = private(first := engine(), mode=mode)
    epoch(made)
    made[0].cleanup()
    wrapper, module, loader = made[0], made[0]._module, made[2]
    del made, first
    if held != "wrapper":
        del wrapper
        gc.collect()
    if held == "part":
        module = nn.Sequential(nn.Linear(4, 4), module)
    for number in (1, 2):
        given = wrapper if held == "wrapper" and mode == "fast" else module
        inner = torch.optim.SGD(given.parameters(), lr=0.1)
        made = private(last := engine(), (given, inner, loader), mode)
        epoch(made)
        wrapper = made[0]
        wrapper.cleanup()
        assert sum(steps for *_, steps in last.accountant.history) == 4 + 4 * number
    assert sum("counts those steps" in str(w.message) for w in recwarn.list) == 2


@pytest.mark.parametrize("mode", MODES)
def test_what_begins_anew(mode: str, recwarn) -> None:
    """A copy that is made afterwards, and a part that was not trained, beside a new one."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    body.requires_grad_(False)
    model = nn.Sequential(body, head)
    loader = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=8)
    made = private(engine(), (model, torch.optim.SGD(head.parameters(), lr=0.1), loader), mode)
    epoch(made)
    made[0].cleanup()
    for net in (copy.deepcopy(model), nn.Sequential(body, nn.Linear(4, 2))):
        inner = torch.optim.SGD(net[1].parameters(), lr=0.1)
        epoch(private(last := engine(), (net, inner, loader), mode))
        assert sum(steps for *_, steps in last.accountant.history) == 4
    assert not any("counts those steps" in str(w.message) for w in recwarn.list)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_let_go_and_cannot_be_counted_is_refused(mode: str) -> None:
    made = private(engine(), mode=mode)
    epoch(made)
    made[1].noise_multiplier = 2.0
    epoch(made)
    made[0].cleanup()
    module = made[0]._module
    given = module, torch.optim.SGD(module.parameters(), lr=0.1), made[2]
    with pytest.raises(ArgumentError, match="pass a copy"):
        private(engine("gdp"), given, mode)
    module = copy.deepcopy(module)
    epoch(
        private(
            engine("gdp"), (module, torch.optim.SGD(module.parameters(), lr=0.1), made[2]), mode
        )
    )
