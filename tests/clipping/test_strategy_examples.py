"""Clipping strategies as users meet them: the papers' toy, and the example that compares them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.papers import bounded_toy
from examples import strategies
from fastclip.clipping import bounded_adaptive, dp_sgd, unbounded_adaptive

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
CHOSEN = ("dp_sgd", "bounded_adaptive", "dpsgd_f")


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, list[dict]]]:
    """A run of the example in two epochs; its tensors are too small for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield strategies.run(CHOSEN, seeds=1, epochs=2)
    torch.set_num_threads(threads)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "mean"),
    [
        (dp_sgd(), bounded_toy.TRUE_MEAN),
        (unbounded_adaptive(tau=1), 0.0),
        (bounded_adaptive(lower=0.6, tau=1), bounded_toy.TRUE_MEAN),
        (bounded_adaptive(lower=0.5, tau=1), bounded_toy.LOW_BOUND_MEAN),
    ],
)
def test_the_toy_ends_where_the_paper_says(strategy, mean: float) -> None:
    """Zhao et al. 2025, section 3.2: a threshold without a bound loses the minority."""
    estimates, thresholds = bounded_toy.run(strategy)
    assert abs(estimates[-1] - mean) < 0.05
    assert thresholds[0] == 1.0
    assert len(estimates) == len(thresholds) == bounded_toy.STEPS + 1
    lower = getattr(strategy.threshold, "lower", None)
    if lower is not None:
        assert min(thresholds) == pytest.approx(lower)
        assert min(thresholds) >= lower


def test_the_threshold_without_a_bound_goes_on_shrinking() -> None:
    _, thresholds = bounded_toy.run(unbounded_adaptive(tau=1))
    assert thresholds[-1] < thresholds[len(thresholds) // 2] / 3 < 0.1


def test_the_toys_first_steps_by_hand() -> None:
    """At mu = 0.5 no gradient exceeds C = 1: mu falls by 0.05 * 0.1, C by exp(0.2 * -0.5)."""
    estimates, thresholds = bounded_toy.run(bounded_adaptive(lower=0.6, tau=1), steps=1)
    assert estimates[1] == pytest.approx(0.5 - 0.05 * 0.1)
    assert thresholds[1] == pytest.approx(torch.tensor(-0.1).exp().item())


@pytest.mark.extras
def test_the_example_keeps_its_budget(results) -> None:
    for (one,) in results.values():
        assert 0 < one["epsilon"] <= strategies.EPSILON
        assert one["noise_multiplier"] > 0
        assert 0 <= one["worst"] <= one["rare"] <= 1
    groups = {
        name: len(torch.tensor(one["thresholds"][-1]).reshape(-1))
        for name, (one,) in results.items()
    }
    assert groups == {"dp_sgd": 1, "bounded_adaptive": 1, "dpsgd_f": 2}


def test_strategies_of_a_seed_spend_the_same(results) -> None:
    """Counting takes its share of sigma: the total, and so epsilon, is that of dp_sgd."""
    assert len({(one["noise_multiplier"], one["epsilon"]) for (one,) in results.values()}) == 1


def test_the_example_reports(results, tmp_path: Path) -> None:
    lines = strategies.table(results).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(CHOSEN)
    assert "nan" not in "".join(lines)
    strategies.draw(results, tmp_path / "strategies.png")
    assert (tmp_path / "strategies.png").stat().st_size > 0


def test_a_tenth_of_the_rare_class_is_trained_on_and_the_rest_tested() -> None:
    train_set, test_set = strategies.data(seed=0)
    trained, tested = (part.tensors[1].bincount() for part in (train_set, test_set))
    assert trained[strategies.RARE] == 14
    assert trained.sum() + tested.sum() == 1797
    rows = [
        {tuple(x.flatten().tolist()) for x in part.tensors[0]} for part in (train_set, test_set)
    ]
    assert not rows[0] & rows[1]
