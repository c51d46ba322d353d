"""Opacus' modes on batches that no loader has told of: epsilon is of what they are, and it is said."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import StepError
from tests.oracle import sample_loss
from tests.refusal import refused

MODES = ("hooks", "functorch", "ew")
SAID = "returned by make_private has not drawn"
N, B, SIGMA, DELTA = 32, 8, 1.5, 1e-5


def run(mode: str, model: nn.Module | None = None, **options: Any) -> tuple:
    """(engine, private model, optimizer, returned loader, the loader that was given)."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) if model is None else model
    given = DataLoader(TensorDataset(torch.randn(N, 6)), batch_size=B, shuffle=True)
    engine = options.pop("engine", None) or FastPrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=options.pop("data_loader", given), noise_multiplier=SIGMA, max_grad_norm=1.0,
        grad_sample_mode=mode, **options,
    )  # fmt: skip
    return engine, private, optimizer, loader, given


def step(private: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    sample_loss(private(x)).mean().backward()
    optimizer.step()


def train(private: nn.Module, optimizer: Any, batches: Iterable[Any]) -> None:
    for (x,) in batches:
        step(private, optimizer, x)


def join(private: nn.Module, optimizer: Any, x: torch.Tensor, *skips: bool) -> None:
    for skip in skips:
        optimizer.signal_skip_step(skip)
        step(private, optimizer, x)


def of_gaussians(*steps: tuple[float, float, int]) -> float:
    engine = FastPrivacyEngine(accountant="rdp")
    engine.accountant.history = list(steps)
    return engine.get_epsilon(DELTA)


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_batch_many_times(mode: str) -> None:
    """Every step is a Gaussian mechanism of its rows; said once."""
    engine, private, optimizer, _, given = run(mode)
    (x,) = next(iter(given))
    with pytest.warns(UserWarning, match=SAID):
        step(private, optimizer, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAID)
        for _ in range(4):
            step(private, optimizer, x)
    assert engine.accountant.history == [(SIGMA, 1.0, 5)]
    assert engine.get_epsilon(DELTA) == pytest.approx(of_gaussians((SIGMA, 1.0, 5)))


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_over_the_loader_that_was_given(mode: str) -> None:
    engine, private, optimizer, loader, given = run(mode)
    with pytest.warns(UserWarning, match=SAID):
        train(private, optimizer, given)
    assert engine.accountant.history == [(SIGMA, 1.0, N // B)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAID)
        train(private, optimizer, loader)
    assert engine.accountant.history[1:] == [(SIGMA, B / N, N // B)]
    with refused("a batch of the data loader that make_private returned", StepError):
        step(private, optimizer, next(iter(given))[0])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_returned_loader_is_accounted_as_before(mode: str, split: bool) -> None:
    engine, private, optimizer, loader, _ = run(mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAID)
        if split:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
            ) as parts:
                train(private, optimizer, parts)
        else:
            train(private, optimizer, loader)
    assert engine.accountant.history == [(SIGMA, B / N, N // B)]


@pytest.mark.parametrize("mode", MODES)
def test_without_poisson_sampling_nothing_is_amplified_anyway(mode: str) -> None:
    engine, private, optimizer, _, given = run(mode, poisson_sampling=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAID)
        train(private, optimizer, given)  # whose sampler is the returned one's
        assert engine.accountant.history == [(SIGMA, 1.0, 1)]
        engine, private, optimizer, _, given = run(mode, poisson_sampling=False)
        train(private, optimizer, [(torch.randn(B, 6),)] * 3)
    assert engine.accountant.history == [(SIGMA, 1.0, 3)]


def test_passes_that_one_step_joins() -> None:
    """A row may be in each: n C for the noise of C. What is given up is not counted."""
    engine, private, optimizer, _, given = run("hooks")
    (x,) = next(iter(given))
    join(private, optimizer, x, True, True)
    optimizer.discard_logical_batch()
    with pytest.warns(UserWarning, match=SAID):
        join(private, optimizer, x, True, True, False)
    assert engine.accountant.history == [(SIGMA / 3, 1.0, 1)]
    row = private._module[0].weight
    optimizer.zero_grad()
    join(private, optimizer, x[:1], True)
    once = row.summed_grad.clone()
    join(private, optimizer, x[:1], True, True)
    assert torch.allclose(row.summed_grad, 3 * once)


def test_a_known_draw_joined_with_an_unknown_batch() -> None:
    engine, private, optimizer, loader, given = run("hooks")
    optimizer.signal_skip_step(True)
    step(private, optimizer, next(iter(given))[0])
    (x,) = next(iter(loader))
    optimizer.signal_skip_step(False)
    with pytest.warns(UserWarning, match=SAID):
        step(private, optimizer, x)
    assert engine.accountant.history == [(SIGMA / 2, 1.0, 1)]


@pytest.mark.parametrize("mode", MODES)
def test_two_models_on_one_draw(mode: str) -> None:
    """The draws of one loader, of which the other model has not heard: one is amplified, one is not.

    True are subsampled Gaussian mechanisms at both noises together, sqrt(2) C of noise sigma C.
    """
    engine = FastPrivacyEngine(accountant="rdp")
    encoder, head = nn.Linear(6, 5), nn.Linear(5, 3)
    _, encode, first, _, given = run(mode, encoder, engine=engine)
    _, decode, second, loader, _ = run(mode, head, engine=engine, data_loader=given)

    def together() -> None:
        for (x,) in loader:
            first.zero_grad()
            second.zero_grad()
            sample_loss(decode(encode(x).relu())).mean().backward()
            first.step()
            second.step()

    with pytest.warns(UserWarning, match=SAID):
        together()
    steps = N // B
    assert sorted(engine.accountant.history) == sorted([(SIGMA, 1.0, 1), (SIGMA, B / N, 1)] * steps)
    true = of_gaussians((SIGMA / 2**0.5, B / N, steps))
    assert engine.get_epsilon(DELTA) > true > of_gaussians((SIGMA, B / N, 2 * steps))


@pytest.mark.parametrize("mode", ["fast", *MODES])
def test_two_models_that_hear_of_one_draw(mode: str) -> None:
    """A second release of it is refused in every mode."""
    engine = FastPrivacyEngine(accountant="rdp")
    _, first, one, loader, _ = run(mode, engine=engine)
    _, second, two, both, _ = run(mode, engine=engine, data_loader=loader, poisson_sampling=False)
    (x,) = next(iter(both))
    step(first, one, x)
    with refused("a data loader of its own", StepError):
        step(second, two, x)


def test_noise_that_is_added_by_hand() -> None:
    engine, private, optimizer, _, given = run("hooks")
    sample_loss(private(next(iter(given))[0])).mean().backward()
    optimizer.clip_and_accumulate()
    with pytest.warns(UserWarning, match=SAID):
        optimizer.add_noise()
    assert engine.accountant.history == [(SIGMA, 1.0, 1)]


@pytest.mark.parametrize("mode", ["fast", *MODES])
def test_passes_that_one_step_joins_without_poisson_sampling(mode: str) -> None:
    """Batches made by hand, four passes a step: a row may be in each, 4 C for the noise of C."""
    engine, private, optimizer, _, _ = run(mode, poisson_sampling=False)
    x = torch.randn(B, 6)
    with pytest.warns(UserWarning, match=SAID):
        join(private, optimizer, x, True, True, True, False)
    assert engine.accountant.history == [(SIGMA / 4, 1.0, 1)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAID)
        step(private, optimizer, x)
    assert engine.accountant.history[1:] == [(SIGMA, 1.0, 1)]


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
def test_four_backward_passes_before_a_step(mode: str) -> None:
    engine, private, optimizer, _, _ = run(mode, poisson_sampling=False)
    optimizer.zero_grad()
    for _ in range(4):
        sample_loss(private(torch.randn(B, 6))).mean().backward()
    with pytest.warns(UserWarning, match=SAID):
        optimizer.step()
    assert engine.accountant.history == [(SIGMA / 4, 1.0, 1)]


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_a_draw_joined_with_a_batch_made_by_hand(mode: str) -> None:
    """Without Poisson sampling a row of the draw may be in that batch, too."""
    engine, private, optimizer, loader, _ = run(mode, poisson_sampling=False)
    join(private, optimizer, torch.randn(B, 6), True)
    optimizer.discard_logical_batch()
    join(private, optimizer, torch.randn(B, 6), True)
    batches = iter(loader)
    with pytest.warns(UserWarning, match=SAID):
        join(private, optimizer, next(batches)[0], False)
    assert engine.accountant.history == [(SIGMA / 2, 1.0, 1)]
    join(private, optimizer, next(batches)[0], True)
    join(private, optimizer, next(batches)[0], False)  # two of one pass
    assert engine.accountant.history[1:] == [(SIGMA, 1.0, 1)]
