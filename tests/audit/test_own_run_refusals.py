"""What an audit of a run would print and must not: bounds of other runs, of chosen scores, of ties."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.audit import CanaryScoreAuditor, OwnRun, Report, mix_in
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.audit.test_own_run import canaries, losses, rows, trained

D, COUNT, DRAWS = 8, 256, 400


def squares(model: Any, batch: Any) -> torch.Tensor:
    return model(batch[0]).squeeze(1) ** 2


def loader_of(data_set: Any) -> DataLoader:
    return DataLoader(data_set, batch_size=64)


def run(
    sigma: float = 1.0, steps: int = 1, *, of: Any = squares, loader: Any = loader_of,
    watched: bool = True, before_step: Any = lambda step, optimizer: None, **options: Any,
) -> tuple[OwnRun, Any, nn.Module, Any]:  # fmt: skip
    """(audit, engine, model, optimizer): a small run with public sizes."""
    torch.manual_seed(0)
    mixed, audit = mix_in(TensorDataset(torch.randn(64, D)), TensorDataset(torch.randn(COUNT, D)))
    model, engine = nn.Linear(D, 1), FastPrivacyEngine(accountant="rdp")
    options = {"sample_rate": 0.5, "expected_batch_size": 64} | options
    private, optimizer, drawn = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader(mixed), noise_multiplier=sigma, max_grad_norm=1.0,
        **{name: value for name, value in options.items() if value is not None},
    )  # fmt: skip
    if watched:
        audit.watch(private, optimizer, of)
    batches = iter(drawn)
    for step in range(steps):
        before_step(step, optimizer)
        optimizer.zero_grad()
        squares(private, next(batches)).mean().backward()
        optimizer.step()
    return audit, engine, model, optimizer


def coins(draw: np.random.Generator) -> np.ndarray:
    return draw.random(COUNT) < 0.5


def rarely(found: list[bool], rate: float) -> None:
    assert sum(found) <= stats.binom.ppf(1 - 1e-6, len(found), rate)


LARGE = [pytest.param(count, marks=pytest.mark.slow) for count in (256, 1000, 1010)]


@pytest.mark.parametrize("count", [70, *LARGE])
def test_scores_that_say_nothing_find_nothing(count: int) -> None:
    """Whatever the number of canaries: what breaks ties follows neither the coins nor the count."""
    draw = np.random.default_rng(count)
    apart, numbered = [], []
    for _ in range(DRAWS):
        inside = draw.random(count) < 0.5
        scores = np.zeros(count)
        apart.append(
            CanaryScoreAuditor(scores[inside], scores[~inside]).epsilon_one_run(0.2, 0) > 0
        )
        one = CanaryScoreAuditor.of_run(scores, inside)
        assert one.epsilon_one_run(0.2, 0) == one.epsilon_one_run(0.2, 0)
        numbered.append(one.epsilon_one_run(0.2, 0) > 0)
    rarely(apart, 0.2)
    rarely(numbered, 0.2)


def test_ties_that_tell_are_used() -> None:
    """Scores of two values: who is told apart is found, whichever of the equal ones are guessed."""
    inside = coins(np.random.default_rng(1))
    for auditor in (
        CanaryScoreAuditor(inside[inside], inside[~inside]),
        CanaryScoreAuditor.of_run(inside, inside),
    ):
        assert auditor.epsilon_one_run(0.05, 1e-6) > 1.5
    assert CanaryScoreAuditor.of_run(~inside, inside).epsilon_one_run(0.05, 1e-6) == 0


def test_the_numbered_ones_are_those_of_two_lists() -> None:
    draw = np.random.default_rng(2)
    inside = coins(draw)
    scores = draw.normal(size=COUNT) + 2 * inside
    one, two = (
        CanaryScoreAuditor.of_run(scores, inside),
        CanaryScoreAuditor(scores[inside], scores[~inside]),
    )
    assert one.epsilon_one_run(0.05, 1e-5) == two.epsilon_one_run(0.05, 1e-5) > 0
    assert one.attack_auroc() == two.attack_auroc()


def test_one_set_of_scores_is_reported() -> None:
    audit, engine, *_ = run()
    scores = audit.gradient_scores
    first = audit.report(engine, scores, delta=1e-5)
    assert audit.report(engine, scores, delta=1e-5) == first  # the same again
    for other, delta in ((scores**3, 1e-5), (scores, 1e-6)):
        with pytest.raises(ArgumentError, match=r"best of several .* reports=2"):
            audit.report(engine, other, delta=delta)


def test_several_share_the_significance() -> None:
    audit, engine, *_ = trained()
    audit, coin = copy.deepcopy(audit), audit._inside.double()
    first = audit.report(engine, coin, delta=1e-5, significance=0.1, reports=2)
    expected = CanaryScoreAuditor.of_run(coin, audit._inside).epsilon_one_run(0.05, 1e-5)
    assert first.bound == first.most == expected
    assert any("One of 2 reports" in note for note in first.notes)
    common: dict[str, Any] = {"delta": 1e-5, "significance": 0.1, "reports": 2}
    audit.report(engine, audit.gradient_scores, **common)
    with pytest.raises(ArgumentError, match="best of several"):
        audit.report(engine, -coin, **common)


@pytest.mark.parametrize("given", [{"significance": 0.2}, {"significance": 0.01}, {"reports": 2}])
def test_what_was_announced_stays(given: dict[str, Any]) -> None:
    """A significance that is chosen after a look at the bound is none."""
    audit, engine, *_ = run()
    first = audit.report(engine, audit.gradient_scores, delta=1e-5)
    with pytest.raises(
        ArgumentError, match=f"^{next(iter(given))}=.* was announced .* cannot change"
    ):
        audit.report(engine, audit.gradient_scores, delta=1e-5, **given)
    assert audit.report(engine, audit.gradient_scores, delta=1e-5) == first


@pytest.mark.parametrize("by_file", [False, True])
def test_copies_share_their_reports(by_file: bool) -> None:
    """Of the same coins: a copy for each kind of scores would be the best of several."""
    audit, engine, *_ = run()

    def copied(one: OwnRun) -> OwnRun:
        return pickle.loads(pickle.dumps(one)) if by_file else copy.deepcopy(one)

    before, scores = copied(audit), audit.gradient_scores
    audit.report(engine, scores, delta=1e-5)
    for each in (before, copied(before), copied(audit)):
        assert each.report(engine, scores, delta=1e-5).inside
        with pytest.raises(ArgumentError, match="best of several"):
            each.report(engine, scores**3, delta=1e-5)
        with pytest.raises(ArgumentError, match="cannot change"):
            each.report(engine, scores, delta=1e-5, significance=0.2)


def test_before_any_step() -> None:
    audit, engine, model, _ = run(steps=0)
    with pytest.raises(ArgumentError, match=r"no step was taken since watch"):
        audit.gradient_scores  # noqa: B018
    with pytest.raises(ArgumentError, match=r"has taken no step"):
        audit.report(engine, audit.loss_scores(model, squares), delta=1e-5)


def test_the_engine_of_the_run() -> None:
    audit, engine, *_ = run()
    other = run()[1]
    with pytest.raises(ArgumentError, match="engine of the run that was watched"):
        audit.report(other, audit.gradient_scores, delta=1e-5)
    with pytest.raises(ArgumentTypeError, match="engine expects a FastPrivacyEngine"):
        audit.report(None, audit.gradient_scores, delta=1e-5)
    kept = pickle.loads(pickle.dumps(audit))
    assert kept.report(engine, audit.gradient_scores, delta=1e-5).inside


@pytest.mark.parametrize(
    "options",
    [
        {"sample_rate": None}, {"expected_batch_size": None},
        {"sample_rate": None, "expected_batch_size": None},
        {"sample_rate": None, "poisson_sampling": False},
    ],
)  # fmt: skip
def test_a_claim_for_a_public_number_of_rows(options: dict[str, Any]) -> None:
    """It says nothing of rows that are there or not, which is what the coins are of."""
    audit, engine, *_ = run(**options)
    with pytest.raises(ArgumentError, match=r"sample_rate and expected_batch_size"):
        audit.report(engine, audit.gradient_scores, delta=1e-5)


def test_what_is_watched() -> None:
    audit, _, model, optimizer = run()
    with pytest.raises(ArgumentError, match=r"watched already.*mix_in"):
        audit.watch(model, optimizer, squares)
    fresh = mix_in(rows(), canaries())[1]
    with pytest.raises(ArgumentError, match="trains other parameters"):
        fresh.watch(nn.Linear(D, 1), optimizer, losses)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scores", [
    [0.0] * COUNT, torch.full((COUNT,), -3.0), [True] * COUNT,
    [math.nan] * COUNT, [math.inf] * COUNT, ["a"] * COUNT, [1j] * COUNT, [0.0], [[0.0]] * COUNT,
    torch.zeros(COUNT, dtype=torch.complex64), [None] * COUNT,
])  # fmt: skip
def test_refused_scores(scores: Any) -> None:
    audit, engine, *_ = run()
    with pytest.raises((ArgumentError, ArgumentTypeError), match=r"^scores expects"):
        audit.report(engine, scores, delta=1e-5)
    asked = torch.arange(COUNT, dtype=torch.float32).requires_grad_()
    found = audit.report(engine, asked, delta=1e-5)  # which numpy alone refuses
    assert found == audit.report(engine, asked.detach(), delta=1e-5)


@pytest.mark.parametrize("wrong", [
    {"delta": 0}, {"delta": 1}, {"delta": math.nan}, {"significance": 0}, {"significance": 0.5},
    {"significance": "5%"}, {"reports": 0}, {"reports": 1.5},
])  # fmt: skip
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    audit, engine, *_ = run()
    with pytest.raises((ArgumentError, ArgumentTypeError), match=next(iter(wrong))):
        audit.report(engine, audit.gradient_scores, **({"delta": 1e-5} | wrong))
    audit.report(engine, audit.gradient_scores, delta=1e-5)  # that was no report


def test_losses_of_another_number_of_rows() -> None:
    """One for all rows would be added to every canary alike."""
    audit, _, model, _ = run(steps=0)
    with pytest.raises(ArgumentError, match=r"one loss per sample, \[256\], got shape \(1,\)"):
        audit.loss_scores(model, lambda model, batch: squares(model, batch).mean().view(1))
    with pytest.raises(ArgumentError, match=r"one loss per sample, \[256\], got shape \(1,\)"):
        run(of=lambda model, batch: squares(model, batch).mean().view(1))


def test_losses_of_a_model_from_outside() -> None:
    """Every score would be 0, and the claim stand, whatever the run does."""
    outside = nn.Linear(D, 1)
    with pytest.raises(ArgumentError, match=r"losses\(model, batch\), not a model from outside"):
        run(of=lambda _, batch: squares(outside, batch))


def test_the_start_is_another_model() -> None:
    audit, _, model, _ = run(steps=0)
    with pytest.raises(ArgumentError, match="before expects the model as it was"):
        audit.loss_scores(model, squares, before=model)


def test_modes_of_parts_stay() -> None:
    audit, *_ = run(steps=0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, 1)).train()
    model[0].eval()
    audit.loss_scores(model, squares)
    assert model.training
    assert model[1].training
    assert not model[0].training


@pytest.mark.parametrize("inside", [
    torch.ones(COUNT), torch.ones(COUNT - 1) > 0, torch.ones(COUNT, 1) > 0, [True] * COUNT,
])  # fmt: skip
def test_coins_are_one_a_canary(inside: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="inside expects"):
        OwnRun(TensorDataset(torch.randn(COUNT, D)), inside)


def test_no_claim_does_not_stand() -> None:
    audit, engine, *_ = run(sigma=0.0)
    report = audit.report(engine, audit.gradient_scores, delta=1e-5)
    assert report.claimed == math.inf
    assert "Nothing is claimed" in report.verdict
    assert "verdict held" not in report.html()


def test_scores_of_the_wrong_sign_are_said() -> None:
    common: dict[str, Any] = {
        "claimed": 2.0, "delta": 1e-5, "significance": 0.05, "bound": 0.0, "most": 4.0, "tpr": 0.0,
        "canaries": 1000, "inside": 500, "neighbors": "rows",
    }  # fmt: skip
    assert any("Turn their sign" in note for note in Report(auroc=0.1, **common).notes)
    assert not any("Turn their sign" in note for note in Report(auroc=0.48, **common).notes)
