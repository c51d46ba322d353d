"""What users copy: the custom layer's rule is exact, and every engine trains the same task."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from examples import fairness
from examples.custom_layer import Scale
from examples.data import digits, functions
from examples.tasks import TASKS
from examples.train import ENGINES, train
from tests.oracle import DTYPES, check_exact, make_private, row_loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 6)])
def test_the_custom_layer_is_exact(shape: tuple, dtype: torch.dtype) -> None:
    check_exact(
        nn.Sequential(nn.Linear(6, 6), Scale(6), nn.Tanh()), torch.randn(shape), dtype=dtype
    )


@pytest.mark.parametrize("shape", [(0, 6), (0, 4, 6)])
def test_the_custom_layer_takes_an_empty_batch(shape: tuple) -> None:
    _, private, optimizer, _ = make_private(nn.Sequential(nn.Linear(6, 6), Scale(6)))
    row_loss(private(torch.randn(5, *shape[1:]))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    row_loss(private(torch.randn(shape))).sum().backward()
    assert all(not p.summed_grad.any() for p in private.parameters())


def test_the_custom_layer_uses_its_rule() -> None:
    engine, private, _, _ = make_private(nn.Sequential(nn.Linear(6, 6), Scale(6)))
    row_loss(private(torch.randn(5, 6))).mean().backward()
    assert [row.rule for row in engine.plan().rows] == ["linear", "scale"]


@pytest.mark.parametrize("data", [digits, functions])
def test_no_row_is_trained_and_tested_on(data) -> None:
    """Both splits hold every class, and no sample twice."""
    train_set, test_set, names = data()
    rows = [tuple(row.flatten().tolist()) for row in train_set.tensors[0]]
    tested = [tuple(row.flatten().tolist()) for row in test_set.tensors[0]]
    assert not set(rows) & set(tested)
    for split in (train_set, test_set):
        assert set(split.tensors[1].tolist()) == set(range(len(names)))


def test_a_short_run_of_the_demo() -> None:
    """One epoch spends what it says; the private engines agree on the noise that affords it."""
    task = dataclasses.replace(TASKS["digits"], epochs=1)
    results = {name: train(task, ENGINES[name]) for name in ("not_private", "fastclip")}
    assert results["not_private"]["epsilon"] is None
    private = results["fastclip"]
    assert 0 < private["epsilon"] <= task.target_epsilon
    assert private["noise_multiplier"] > 0
    assert private["steps"] == results["not_private"]["steps"]
    assert 0 <= private["accuracy"] <= 1


def test_the_demo_shows_what_clipping_does_to_each_digit() -> None:
    found = fairness.measure(seeds=1, epochs=1)
    assert {len(of) for runs in found.values() for of in runs} == {10}
    shown = fairness.table(found)
    assert all(name in shown for name, _, _ in fairness.COMPARED.values())
    axes = Figure().subplots()
    fairness.panel(axes, found)
    _, labels = axes.get_legend_handles_labels()
    assert len(labels) == len(fairness.COMPARED)
    made = {"dp_sgd": [[0.0, 1.0], [1.0, 1.0]]}
    assert fairness.means(made["dp_sgd"]) == [0.5, 1.0]
