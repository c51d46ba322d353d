"""An engine's ledger through checkpoints, copies and other accountants; what epsilon is asked of."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant, create_accountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.accounting.ledger import keep_ledger
from fastclip.core.opacus_names import HANDLES
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.oracle import sample_loss
from tests.refusal import refused

ROWS, BATCH, SIGMA = 24, 6, 1.0
MODES = ["fast", "hooks"]


def start(
    engine: PrivacyEngine | None = None, mode: str = "fast", sigma: float = SIGMA, seed: int = 0, **told
):  # fmt: skip
    """(engine, model, optimizer) of a network of its own; two under one ledger need two seeds."""
    engine = engine or FastPrivacyEngine(accountant="rdp")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(ROWS, 6)), BATCH), noise_multiplier=sigma,
        max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode, **told,
    )  # fmt: skip
    return engine, private, optimizer


def walk(run, steps: int):
    _, model, optimizer = run
    for _ in range(steps):
        optimizer.zero_grad()
        sample_loss(model(torch.randn(BATCH, 6))).mean().backward()
        optimizer.step()
    return run


def saved(run) -> io.BytesIO:
    file = io.BytesIO()
    run[0].save_checkpoint(path=file, module=run[1], optimizer=run[2])
    return file


def load(run, file: io.BytesIO, **options: Any):
    file.seek(0)
    run[0].load_checkpoint(path=file, module=run[1], optimizer=run[2], **options)
    return run


def history(steps: int, sigma: float = SIGMA) -> list[tuple[float, float, int]]:
    """Steps on batches of which no loader tells: nothing is amplified."""
    return [(sigma, 1.0, steps)]


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_never_shrinks_the_ledger(mode: str) -> None:
    """12 steps, set back to the fourth: 12 were seen, and what follows comes on top."""
    run = walk(start(mode=mode), 4)
    early = saved(run)
    walk(run, 8)
    load(run, early)
    assert run[0].accountant.history == history(12)
    walk(run, 1)
    assert run[0].accountant.history == history(13)
    assert load(start(mode=mode), saved(run))[0].accountant.history == history(13)


def test_two_engines_that_resume_one_checkpoint_are_two_forks() -> None:
    trunk = saved(walk(start(), 4))
    left, right = (walk(load(start(), trunk), 3) for _ in range(2))
    assert load(left, saved(right))[0].accountant.history == history(10)


def test_a_checkpoint_of_plain_opacus() -> None:
    theirs = walk(start(PrivacyEngine(accountant="rdp"), "hooks"), 4)
    trusted = {} if HANDLES else {"torch_load_kwargs": {"weights_only": False}}  # it holds a method
    run = walk(load(start(mode="hooks"), saved(theirs), **trusted), 2)
    both = [(SIGMA, BATCH / ROWS, 4), *history(2)]
    assert run[0].accountant.history == both
    if HANDLES:  # and ours by Opacus; before 1.6 it expects that method
        assert load(theirs, saved(run))[0].accountant.history == both


def test_a_checkpoint_that_does_not_say_what_was_spent() -> None:
    """Nothing is loaded: neither weights nor steps."""
    run = walk(start(), 2)
    zeros = {name: torch.zeros_like(p) for name, p in run[1].state_dict().items()}
    for content in (
        {"module_state_dict": zeros},
        {"module_state_dict": zeros, "privacy_accountant_state_dict": {"mechanism": "rdp"}},
        {
            "module_state_dict": zeros,
            "privacy_accountant_state_dict": keep_ledger(create_accountant("prv")).state_dict(),
        },
        [],
    ):
        file = io.BytesIO()
        torch.save(content, file)
        with refused("engine.save_checkpoint wrote|Resume (from|with)"):
            load(run, file)
    assert run[0].accountant.history == history(2)
    assert all(p.any() for p in run[1].parameters())


def test_weights_that_do_not_fit_are_spent_all_the_same() -> None:
    """A module that fails halfway has got some of them."""
    file = saved(walk(start(), 4))
    other = FastPrivacyEngine(accountant="rdp")
    file.seek(0)
    with pytest.raises(RuntimeError, match="state_dict"):
        other.load_checkpoint(path=file, module=nn.Linear(6, 4))
    assert other.accountant.history == history(4)


def test_thresholds_that_are_left_behind_are_warned_of() -> None:
    run = walk(start(clipping=clipping.sad_dpsgd(total_steps=10)), 2)
    file = saved(run)
    file.seek(0)
    with pytest.warns(UserWarning, match="no optimizer, so .* noise schedules keep .*#checkpoints"):
        run[0].load_checkpoint(path=file, module=run[1])


@pytest.mark.parametrize("mode", MODES)
def test_steps_go_to_the_accountant_that_the_engine_has(mode: str) -> None:
    run = walk(start(mode=mode), 3)
    run[0].accountant = PRVAccountant()
    assert run[0].accountant.history == history(3)
    walk(run, 2)
    assert run[0].accountant.history == history(5)
    assert run[0].get_epsilon(1e-3) == pytest.approx(
        walk(start(FastPrivacyEngine()), 5)[0].get_epsilon(1e-3)
    )


def test_an_accountant_that_is_shared() -> None:
    """Steps of both engines, each once, whoever is given the other's."""
    first, second = walk(start(), 3), walk(start(seed=1), 2)
    second[0].accountant = first[0].accountant
    first[0].accountant = second[0].accountant
    walk(first, 1)
    walk(second, 1)
    assert first[0].accountant.history == second[0].accountant.history == history(7)


def test_an_accountant_that_is_none() -> None:
    engine = FastPrivacyEngine()
    with pytest.raises(ArgumentTypeError, match="create_accountant"):
        engine.accountant = "rdp"
    engine = walk(start(), 2)[0]
    stranger = RDPAccountant()
    stranger.history = history(2)  # whose steps these are is not known
    engine.accountant = stranger
    assert engine.accountant.history == history(4)


def test_a_copied_engine_goes_on_in_the_same_ledger() -> None:
    """Optimizers record there, whichever copy they belong to."""
    run = walk(start(), 1)
    engine, twin = run[0], copy.deepcopy(run[0])
    walk(start(twin, seed=1), 2)
    walk(run, 2)
    assert engine.accountant.history == twin.accountant.history == history(5)
    elsewhere = pickle.loads(pickle.dumps(FastPrivacyEngine(accountant="rdp")))
    elsewhere.accountant.load_state_dict(engine.accountant.state_dict())
    assert walk(start(elsewhere), 1)[0].accountant.history == history(6)
    assert engine.accountant.history == history(5)


def test_two_models_and_a_model_made_private_twice() -> None:
    engine, model, optimizer = walk(start(), 2)
    other = walk(start(engine, sigma=2.0, seed=1), 1)
    walk((engine, model, optimizer), 1)
    assert engine.accountant.history == [*history(2), *history(1, 2.0), *history(1)]
    again = engine.make_private(
        module=other[1], optimizer=other[2], noise_multiplier=SIGMA, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.zeros(ROWS, 6)), BATCH), poisson_sampling=False,
    )  # fmt: skip
    walk((engine, again[0], again[1]), 1)
    assert engine.accountant.history == [*history(2), *history(1, 2.0), *history(2)]


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_of_nothing_and_without_noise(accountant: str) -> None:
    engine = FastPrivacyEngine(accountant=accountant)
    assert engine.get_epsilon(1e-5) == 0
    walk(start(engine, sigma=0.0), 1)
    assert engine.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2.0, math.nan, math.inf, "1e-5", None, True])
def test_a_delta_that_is_none(delta) -> None:
    engine = FastPrivacyEngine(accountant="rdp")
    with pytest.raises((ArgumentError, ArgumentTypeError), match="delta expects a number in"):
        engine.get_epsilon(delta)
