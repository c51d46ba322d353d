"""What accountants are told of steps, by how their rows were drawn."""

from __future__ import annotations

import math

import pytest
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine
from fastclip.accounting import epsilon
from fastclip.clipping import Clipping, StepNoise, dp_sgd
from tests.refusal import refused

N, D = 12, 3


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(N, D)

    def __len__(self) -> int:
        return N


def private(engine: FastPrivacyEngine, dataset=None, clipping="flat", **loader):
    model = nn.Linear(D, 1)
    dataset = TensorDataset(torch.ones(N, D)) if dataset is None else dataset
    return engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=4, **loader), noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False, clipping=clipping,
    )  # fmt: skip


def train(made, steps: int | None = None, passes: int = 1) -> None:
    model, optimizer, loader = made
    for _ in range(passes):
        for taken, batch in enumerate(loader):
            if taken == steps:
                break
            optimizer.zero_grad()
            model(batch[0] if isinstance(batch, (list, tuple)) else batch).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_pass_is_one_gaussian_mechanism(shuffle: bool) -> None:
    """Each row is in one batch of a pass: parallel composition, and no amplification."""
    engine = FastPrivacyEngine()
    train(private(engine, shuffle=shuffle), passes=2)
    assert engine.accountant.history == [(1.0, 1.0, 2)]
    assert engine.get_epsilon(1e-5) == epsilon([(1.0, 1.0, 2)], 1e-5)
    found = engine.mechanism(delta=1e-5, epochs=2)
    assert not found.sampled_independently
    assert found.planned == found.taken
    assert "zero-out" in found.neighbors
    assert "without amplification" in str(found)


def test_epsilon_of_a_row_by_its_own_rate() -> None:
    """Weights 1 and 1/2: rows of the smaller rate spend less; other models' steps count as they were."""
    engine = FastPrivacyEngine()
    weights = [1.0] * 6 + [0.5] * 6
    for passes in (1, 2):
        model = nn.Linear(D, 1)
        made = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(torch.ones(N, D)), batch_size=4,
                sampler=WeightedRandomSampler(weights, N),
            ),
            noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, expected_batch_size=4,
        )  # fmt: skip
        train(made, passes=passes)
    rates = engine.sampling.rates
    assert rates is not None
    assert rates.tolist() == [0.5] * 6 + [0.25] * 6
    assert engine.accountant.history == [(1.0, 0.5, 6)]
    assert engine.sample_epsilon(1e-3, 0.5) == engine.get_epsilon(1e-3)
    mixed = epsilon([(1.0, 0.5, 2), (1.0, 0.25, 4)], 1e-3)  # only the last model's at its own
    assert engine.sample_epsilon(1e-3, 0.25) == pytest.approx(mixed, abs=1e-6)
    assert engine.sample_epsilon(1e-3, rates[-1]) == engine.sample_epsilon(1e-3, 0.25)
    for rate in (0.0, 0.6, math.nan, "0.25", rates):
        with refused("rate expects that of a sample of this loader"):
            engine.sample_epsilon(1e-3, rate)


def test_a_pass_that_was_left_counts_whole() -> None:
    engine = FastPrivacyEngine()
    made = private(engine, shuffle=True)
    train(made, steps=1)
    train(made, steps=2)
    train(made)
    assert engine.accountant.history == [(1.0, 1.0, 3)]


def test_a_stream_counts_every_step() -> None:
    engine = FastPrivacyEngine()
    train(private(engine, Stream()))
    assert engine.accountant.history == [(1.0, 1.0, 3)]


def test_a_sampler_that_may_draw_a_row_in_every_step() -> None:
    class Mine(UniformWithReplacementSampler):
        """Rows again and again, at rates of its own."""

    engine, model = FastPrivacyEngine(), nn.Linear(D, 1)
    loader = DataLoader(
        TensorDataset(torch.ones(N, D)),
        batch_sampler=Mine(num_samples=N, sample_rate=0.25, steps=4),
    )
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    train(made, passes=2)
    assert engine.accountant.history == [(1.0, 1.0, 8)]


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_less_noise_within_a_pass(epochs: int) -> None:
    """A row may be in the step of the least noise; what was planned is what was taken."""
    engine = FastPrivacyEngine()
    steps = 3 * epochs
    strategy = Clipping(noise=StepNoise(total_steps=steps, stages=steps, decay=0.9))
    train(private(engine, clipping=strategy, shuffle=True), passes=epochs)
    found = engine.mechanism(delta=1e-5, epochs=epochs)
    assert found.planned == found.taken
    for first in range(0, steps, 3):
        least = min(strategy.noise.factor(step) for step in range(first, first + 3))
        assert any(math.isclose(sigma, least) and q == 1.0 for sigma, q, _ in found.taken)


@pytest.mark.parametrize("epochs", [1, 3])
def test_noise_found_for_a_shuffled_loader_keeps_its_budget(epochs: int) -> None:
    engine, model = FastPrivacyEngine(), nn.Linear(D, 1)
    made = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(N, D)), batch_size=4, shuffle=True),
        target_epsilon=4.0, target_delta=1e-5, epochs=epochs, max_grad_norm=1.0,
        clipping=dp_sgd(), poisson_sampling=False,
    )  # fmt: skip
    train(made, passes=epochs)
    assert 3.9 <= engine.get_epsilon(1e-5) <= 4.0
    assert engine.mechanism().planned_epsilon == pytest.approx(engine.get_epsilon(1e-5))


@pytest.mark.slow
def test_a_poisson_loader_of_opacus_draws_with_the_rate_that_is_accounted() -> None:
    """Opacus' own sampler compares float32 numbers, multiples of 2^-24: it would draw at 2^-24 here."""
    rows, rate = 10**6, 0.05 * 2**-24
    sampler = UniformWithReplacementSampler(num_samples=rows, sample_rate=rate, steps=800)
    engine, model = FastPrivacyEngine(), nn.Linear(D, 1)
    *_, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(rows, D)), batch_sampler=sampler),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    assert engine.sampling.rate == rate
    torch.manual_seed(0)
    drawn = sum(len(rows) for rows in loader.batch_sampler)
    assert drawn <= 12  # 2.4 are expected, and 48 at 2^-24


@pytest.mark.parametrize("forget", [lambda held: held.clear(), lambda held: held.pop()])
def test_a_pass_whose_record_was_taken_away_is_recorded_again(forget) -> None:
    engine = FastPrivacyEngine()
    made = private(engine)
    model, optimizer, loader = made
    for taken, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert engine.accountant.history == [(1.0, 1.0, 1)]
        if not taken:
            forget(engine.accountant.history)
