"""The demo: every engine trains the same task, and its third part tells digit by digit."""

from __future__ import annotations

import dataclasses

import pytest
from matplotlib.figure import Figure

from bench.demo import fairness
from bench.demo.picture import WIDTH, caption
from bench.demo.tasks import TASKS
from bench.demo.train import ENGINES, train
from bench.measure import busy_warning


@pytest.mark.extras
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


@pytest.mark.extras
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


def test_seeds_that_agree_are_drawn() -> None:
    """The mean of equal numbers may be off by their last bit, on either side."""
    classes = [k / 36 for k in range(27, 37)]
    found = {name: [classes] * 3 for name in fairness.COMPARED}
    assert any(
        mean < value for mean, value in zip(fairness.means([classes] * 3), classes, strict=True)
    )
    axes = Figure().subplots()
    fairness.panel(axes, found)
    assert len(axes.get_lines()) == len(fairness.COMPARED)


def test_the_caption_has_room() -> None:
    """Where every run was disturbed, as where none was."""
    warning = busy_warning((f"{task} {engine}", 0.9) for task in TASKS for engine in ENGINES)
    assert warning is not None
    lines = caption("a machine of 2 cores", warning).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(lines).endswith(warning)
    assert len(caption("a machine of 2 cores", None).splitlines()) == 1
