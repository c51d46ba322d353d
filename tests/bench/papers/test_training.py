"""Runs of experiments: what they train, that they repeat, and that they go on where they were killed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from bench.papers.data import breast_cancer
from bench.papers.data.dataset import Dataset, Rows
from bench.papers.experiments import EXPERIMENTS
from bench.papers.running import SYNTHETIC, read
from bench.papers.settings import Experiment, Loss
from bench.papers.strategies import NON_PRIVATE, STRATEGIES
from bench.papers.training import Run, Trainer

EPOCHS = 3
NAME = "breast-cancer"


def small(**options: Any) -> Experiment:
    """A few hundred rows, a linear model, and no search for the noise of a budget."""
    return dataclasses.replace(EXPERIMENTS[NAME], **{"noise_multiplier": 1.5, **options})


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Breast cancer."""
    return breast_cancer.load()


def trainer(data: Dataset, strategy: str = "dp_sgd", seed: int = 0, **options: Any) -> Trainer:
    """A run of a few epochs."""
    return Trainer(small(**options), Run(NAME, strategy, None, seed, EPOCHS), data)


def weights(made: Trainer) -> list[torch.Tensor]:
    """As trained."""
    return [p.detach().clone() for p in made.model.parameters()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "strategy", [NON_PRIVATE, "per_layer", "soft_ada_clip", "dpsgd_f", "auto_s"]
)
def test_a_run_that_was_interrupted_ends_with_the_same_bits(
    data: Dataset, strategy: str, tmp_path: Path
) -> None:
    whole = trainer(data, strategy)
    expected = whole.train(None, lambda epoch: None)

    class Killed(Exception):
        pass

    def kill(epoch: int) -> None:
        if epoch == 2:
            raise Killed

    path = tmp_path / "run.checkpoint"
    with pytest.raises(Killed):
        trainer(data, strategy).train(path, kill)
    torch.manual_seed(999)  # as another process would find it
    again = trainer(data, strategy)
    epochs: list[int] = []
    found = again.train(path, epochs.append)
    assert epochs == [2, 3]
    assert_close(weights(again), weights(whole), rtol=0, atol=0)
    pd.testing.assert_frame_equal(found, expected)


def test_dropout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    name = "eicu"
    made = read(name, SYNTHETIC)
    run = Run(name, "dp_sgd", None, 0, 2)
    experiment = dataclasses.replace(EXPERIMENTS[name], noise_multiplier=1.0)
    whole = Trainer(experiment, run, made)
    whole.pass_over()
    whole.pass_over()
    half = Trainer(experiment, run, made)
    half.pass_over()
    half.save(tmp_path / "half")
    torch.manual_seed(1)
    other = Trainer(experiment, run, made)
    other.load(tmp_path / "half")
    other.pass_over()
    assert_close(weights(other), weights(whole), rtol=0, atol=0)


def test_strategies_of_a_seed_start_alike_and_draw_alike(data: Dataset) -> None:
    one, other = trainer(data, "dp_sgd"), trainer(data, "sad_dpsgd")
    assert_close(weights(one), weights(other), rtol=0, atol=0)
    drawn = [[len(batch[0]) for batch in made.loader] for made in (one, other)]
    assert drawn[0] == drawn[1]
    assert not torch.equal(weights(one)[0], weights(trainer(data, seed=1))[0])


@pytest.mark.extras
def test_epsilon_is_the_target(data: Dataset) -> None:
    made = Trainer(EXPERIMENTS[NAME], Run(NAME, "dp_sgd", 8.0, 0, EPOCHS), data)
    table = made.train(None, lambda epoch: None)
    assert made.engine is not None
    spent = made.engine.get_epsilon(made.experiment.delta)
    assert 7.9 < spent <= 8.0
    assert table["epsilon"].max() == spent
    assert made.step == made.steps == EPOCHS * len(made.loader)


def test_normalized_gradients_take_the_same_first_step(data: Dataset) -> None:
    """At C = C_0 plain SGD moves as far; C_0 is not 1 here."""
    found = []
    for strategy in ("dp_sgd", "normalized_dp_sgd"):
        made = trainer(data, strategy, max_grad_norm=0.25)
        before = weights(made)
        batch = next(iter(made.loader))
        made.optimizer.noise_multiplier = 0.0
        losses = made.experiment.loss.rows(made.model(batch[0]), batch[1])
        losses.mean().backward()
        made.optimizer.step()
        found.append([after - start for after, start in zip(weights(made), before, strict=True)])
    assert_close(found[0], found[1])


def test_layers_thresholds_bound_the_whole_gradient_by_c(data: Dataset) -> None:
    made = trainer(data, "per_layer", max_grad_norm=0.5)
    assert math.isclose(float(made.optimizer.sensitivity), 0.5, rel_tol=1e-12)


@pytest.mark.parametrize("strategy", ["dp_sgd", NON_PRIVATE])
def test_physical_batches_train_the_same_model(data: Dataset, strategy: str) -> None:
    whole, split = trainer(data, strategy), trainer(data, strategy, physical_batch=40)
    assert split.split == (strategy == "dp_sgd")
    assert not whole.split
    assert split.steps == whole.steps
    for made in (whole, split):
        made.pass_over()
    assert_close(weights(whole), weights(split), rtol=1e-4, atol=1e-5)


def test_weights_of_classes_multiply_losses_of_rows() -> None:
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 1, 0])
    loss, plain = Loss((0.5, 2.0)), Loss()
    for logits in (torch.randn(4, 2), torch.randn(4, 1)):
        expected = plain.rows(logits, y) * torch.tensor([0.5, 2.0, 2.0, 0.5])
        assert_close(loss.rows(logits, y), expected)
    two = torch.randn(4, 1)
    as_two = torch.cat([torch.zeros_like(two), two], 1)
    assert_close(plain.rows(two, y), plain.rows(as_two, y))
    assert_close(plain.classes(two), plain.classes(as_two))


def few(rows: Rows, count: int) -> Rows:
    """The first rows."""
    groups = {name: of[:count] for name, of in rows.groups.items()}
    return Rows(tuple(x[:count] for x in rows.x), rows.y[:count], groups)


def finishes(name: str, strategies: tuple[str, ...]) -> None:
    """Ten steps on a few generated rows with each strategy: thresholds, measures, and a budget."""
    whole = read(name, SYNTHETIC)
    made = dataclasses.replace(
        whole, train=few(whole.train, 12), test=few(whole.test, 12), validation=None
    )
    experiment = dataclasses.replace(EXPERIMENTS[name], noise_multiplier=1.0)
    for strategy in strategies:
        of = Trainer(experiment, Run(name, strategy, None, 0, 10), made)
        table = of.train(None, lambda epoch: None)
        test = table[(table["part"] == "test") & (table["attribute"] == "all")]
        assert set(test["measure"]) >= {"accuracy", "loss_sum", "worst_class_accuracy"}
        assert made.synthetic == (experiment.generate is not None)
        if of.engine is not None:
            assert 0 < of.engine.get_epsilon(experiment.delta) < math.inf
            thresholds = table[table["measure"] == "threshold"]["value"]
            assert len(thresholds) >= 10
            assert bool((thresholds > 0).all())


LARGE = ("mnist-zhao-resnet", "fashion-zhao-resnet", "ham10000-sad", "celeba-esipova")
"""Networks that take tens of seconds for ten steps."""


@pytest.mark.extras
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in EXPERIMENTS]
)
@pytest.mark.one_in(12)
def test_every_experiment_runs_on_generated_data(name: str) -> None:
    finishes(name, ("dpsgd_f",))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_strategy_runs_in_every_experiment(name: str) -> None:
    finishes(name, (NON_PRIVATE, *STRATEGIES))
