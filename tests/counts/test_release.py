"""Noisy answers: the law of their noise, what they cost, and that they are paid for first."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.accounting import epsilon
from fastclip.accounting.ledger_file import WriteAheadLog
from fastclip.accounting.transforms import gaussian_epsilon
from fastclip.counts import (
    TRAINING_SET,
    CountQuery,
    PaidCounts,
    PrivateData,
    PublicData,
    accuracy_query,
)
from fastclip.counts.query import GRID
from fastclip.counts.release import noise_of_counts
from fastclip.errors import StepError
from fastclip.ops.noise import SecureNoise
from tests.counts.runs import APART, DELTA, SAME, accuracy, predictions, trained
from tests.ops.noise.test_forks import in_a_fork
from tests.refusal import refused

ROUNDING = 1e-8


def line(engine: FastPrivacyEngine, name: str) -> float:
    """Epsilon of the people of a data set."""
    (found,) = (x for x in engine.privacy_by_data_set(DELTA).lines if name in x.data_sets)
    return found.epsilon


# The noise


@pytest.mark.parametrize("secure", [False, True])
def test_the_law_of_the_noise(secure: bool) -> None:
    """10^4 counts of 1,250 answers: mean, variance and normality to 5 standard deviations.

    The counts of one answer, and of two that follow each other, are independent.
    """
    torch.manual_seed(1)
    engine, answers = FastPrivacyEngine(secure_mode=secure), 1250
    query, given = accuracy_query(APART, tuple("abcd"), 3.0, "row"), predictions()
    paid, given["groups"] = engine.prepay(query, answers), torch.arange(40) % 4
    found = [paid.count(**given) for _ in range(answers)]
    assert {answer.std for answer in found} == {3 * math.sqrt(2)}
    noise = torch.stack([answer.counts for answer in found]).numpy().reshape(answers, 8)
    noise = (noise - [8, 10] * 4) / found[0].std
    n = noise.size
    assert abs(noise.mean()) < 5 / math.sqrt(n)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / n)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-6
    pairs = np.concatenate([noise[1:], noise[:-1]], 1)
    together = np.corrcoef(pairs.T) - np.eye(16)
    assert np.abs(together).max() < 5 / math.sqrt(answers)


def test_every_answer_lies_on_the_grid() -> None:
    """Its low bits are those of no sum: all answers are whole steps of 2^-20."""
    engine = FastPrivacyEngine()
    for rows in (3, 4000):
        steps = engine.count(accuracy(APART), **predictions(rows)).counts * GRID
        assert (steps == steps.round()).all()
    fine = steps.long() % 64  # noise reaches the last bit
    assert len(set(fine.ravel().tolist())) > 1


def test_counts_draw_from_a_stream_of_their_own() -> None:
    """Seeded alike, noise of gradients and of counts are made of other words; two engines' repeat."""
    like = torch.zeros(8, dtype=torch.float64)
    drawn = []
    for source in (noise_of_counts(False), noise_of_counts(False), FastPrivacyEngine()):
        torch.manual_seed(3)
        if isinstance(source, FastPrivacyEngine):
            _, optimizer = trained(source, steps=0)
            source = optimizer.grad_state.clipping.noise
            torch.manual_seed(3)
        drawn.append(source.draw(like, 1.0))
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    assert isinstance(noise_of_counts(True), SecureNoise)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_never_repeats_noise(copied: Any) -> None:
    """A copy that is seeded as the original was finds out, unless it keeps a ledger of its own."""
    engine = FastPrivacyEngine()
    torch.manual_seed(3)
    first = engine.count(accuracy(APART), **predictions())
    twin = copied(engine)
    other = twin.count(accuracy(APART), **predictions())
    assert not first.counts.equal(other.counts)
    shared = copy.deepcopy(engine)
    torch.manual_seed(3)
    with pytest.raises(StepError, match="secure_mode"):
        shared.count(accuracy(APART), **predictions())


# What it costs


def test_counts_of_the_training_set_add_to_training() -> None:
    """By dp-accounting: 3 steps of DP-SGD and 2 counts, one Gaussian mechanism each."""
    engine = FastPrivacyEngine(accountant="rdp")
    trained(engine)
    for _ in range(2):
        engine.count(accuracy(TRAINING_SET, sigma=2.0), **predictions())
    assert engine.accountant.history == [(1.0, 1 / 8, 3), (2.0, 1.0, 2)]
    orders = list(range(2, 64))
    book = RdpAccountant(orders).compose(
        dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(1 / 8, dp.GaussianDpEvent(1.0)), 3),
                dp.SelfComposedDpEvent(dp.GaussianDpEvent(2.0), 2),
            ]
        )
    )
    assert epsilon(engine.accountant.history, DELTA, "rdp", alphas=orders) == pytest.approx(
        book.get_epsilon(DELTA), rel=1e-6
    )
    prv = epsilon(engine.accountant.history, DELTA)
    tight = dp.pld.PLDAccountant().compose(
        dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(1 / 8, dp.GaussianDpEvent(1.0)), 3),
                dp.SelfComposedDpEvent(dp.GaussianDpEvent(2.0), 2),
            ]
        )
    )
    assert prv == pytest.approx(tight.get_epsilon(DELTA), rel=0.01)
    assert engine.get_epsilon(DELTA) >= prv


def balle_wang(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism of sensitivity / noise = mu, by bisection of its closed form."""
    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        found = stats.norm.cdf(mu / 2 - middle / mu) - math.exp(middle) * stats.norm.cdf(
            -mu / 2 - middle / mu
        )
        low, high = (middle, high) if found > delta else (low, middle)
    return high


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "pld"])
def test_other_people_have_a_line_of_their_own(accountant: str) -> None:
    """Exact, whatever accountant the engine has; the training set's people pay nothing."""
    engine = FastPrivacyEngine(accountant=accountant)
    trained(engine)
    before = engine.get_epsilon(DELTA)
    for _ in range(4):
        engine.count(accuracy(APART, sigma=2.0), **predictions())
    assert engine.get_epsilon(DELTA) == before == line(engine, "training")
    expected = balle_wang(math.sqrt(4) / 2.0, DELTA)
    assert line(engine, "validation") == pytest.approx(expected, rel=ROUNDING)
    assert line(engine, "validation") == gaussian_epsilon(1.0, DELTA)
    found = engine.privacy_by_data_set(DELTA)
    assert found.epsilon == max(before, gaussian_epsilon(1.0, DELTA))
    assert "everybody in training, validation" in str(found)
    assert [each["releases"] for each in found.as_json()["lines"]] == [3, 4]


def test_the_same_people_pay_for_both() -> None:
    engine = FastPrivacyEngine()
    trained(engine)
    before = engine.get_epsilon(DELTA)
    engine.count(accuracy(SAME, sigma=2.0), **predictions())
    assert engine.get_epsilon(DELTA) > before
    assert engine.accountant.history[-1] == (2.0, 1.0, 1)
    assert not engine.accountant.lines
    (found,) = engine.privacy_by_data_set(DELTA).lines
    assert found.data_sets == ("training", "validation")
    assert found.epsilon == engine.get_epsilon(DELTA)


def test_data_sets_that_share_people_share_a_line() -> None:
    engine = FastPrivacyEngine()
    engine.count(accuracy(APART), **predictions())
    engine.count(accuracy(PrivateData("test", overlap="validation")), **predictions())
    engine.count(accuracy(PrivateData("hospital", overlap=())), **predictions())
    lines = engine.privacy_by_data_set(DELTA).lines
    assert [found.data_sets for found in lines] == [
        ("training",), ("test", "validation"), ("hospital",),
    ]  # fmt: skip
    assert [found.releases for found in lines] == [0, 2, 1]


def test_overlaps_that_contradict_each_other_are_errors() -> None:
    engine = FastPrivacyEngine()
    engine.count(accuracy(APART), **predictions())
    engine.count(accuracy(PrivateData("hospital", overlap=())), **predictions())
    for data, text in (
        (SAME, "was counted with the people of 'validation'"),
        (PrivateData("validation", overlap="hospital"), "Pass the same overlap"),
        (PrivateData("test", overlap=("validation", "hospital")), "separate privacy accounts"),
        (PrivateData("test", overlap=("validation", "training")), "separate privacy accounts"),
        (PrivateData("test", overlap="somewhere"), "has no counts yet"),
    ):
        with refused(text):
            engine.count(accuracy(data), **predictions())
    assert [found.releases for found in engine.privacy_by_data_set(DELTA).lines] == [0, 1, 1]


def test_disjoint_groups_cost_once_and_intersections_add_up() -> None:
    """At one standard deviation of the noise: epsilon of 50 disjoint groups is that of one."""

    def spent(groups: int, disjoint: bool) -> float:
        engine = FastPrivacyEngine()
        names, rows = [str(k) for k in range(groups)], torch.arange(100) % groups
        query = CountQuery(APART, names, 1.0, "row", disjoint=disjoint)
        query = CountQuery(APART, names, 8.0 / query.sensitivity, "row", disjoint=disjoint)
        assert query.std == pytest.approx(8.0)
        engine.count(query, groups=rows if disjoint else torch.ones(100, groups))
        return line(engine, "validation")

    one = spent(1, True)
    assert spent(50, True) == one
    assert spent(4, False) == pytest.approx(balle_wang(math.sqrt(4) / 8.0, DELTA))


def test_public_data_are_counted_exactly_and_for_nothing() -> None:
    engine = FastPrivacyEngine()
    found = engine.count(accuracy(PublicData("demo"), sigma=0.0), **predictions())
    assert found.counts.tolist() == [[16, 20], [16, 20]]
    assert found.std == 0
    assert not engine.accountant.history
    assert not engine.accountant.lines


# Whom it protects


def test_units_of_counts_are_those_of_training() -> None:
    engine = FastPrivacyEngine()
    trained(engine, steps=0, unit_ids=torch.arange(64) // 2)
    ids = {"unit_ids": torch.arange(40) // 4}
    with refused("Count by the same unit"):
        engine.count(accuracy(TRAINING_SET), **predictions())
    with refused("Count by the same unit"):
        engine.count(accuracy(SAME), **predictions())
    engine.count(accuracy(TRAINING_SET, unit="unit"), **predictions(), **ids)
    engine.count(accuracy(APART), **predictions())  # other people, by rows
    with refused("Count by the same unit"):
        engine.count(accuracy(APART, unit="unit"), **predictions(), **ids)
    units = [found.unit for found in engine.privacy_by_data_set(DELTA).lines]
    assert units == ["unit", "row"]


def test_gdp_cannot_compose_counts_with_training() -> None:
    engine = FastPrivacyEngine(accountant="gdp")
    trained(engine)
    before = engine.get_epsilon(DELTA)
    for data in (TRAINING_SET, SAME):
        with refused("accountant='prv'"):
            engine.count(accuracy(data), **predictions())
    assert engine.get_epsilon(DELTA) == before


def test_an_error_costs_nothing() -> None:
    engine = FastPrivacyEngine()
    with refused("0 or 1"):
        engine.count(accuracy(APART), groups=[0, 1], measures={"correct": [1.0, float("nan")]})
    with pytest.raises(TypeError, match="CountQuery"):
        engine.count("accuracy", groups=[0])  # type: ignore[arg-type]
    with refused("at least 1"):
        engine.prepay(accuracy(APART), 0)
    assert not engine.accountant.lines


# Paid for first


def none_left(paid: PaidCounts) -> None:
    """Its parent draws what was paid for."""
    with refused("Pay for more"):
        paid.count(**predictions())


def test_answers_that_are_paid_for() -> None:
    engine = FastPrivacyEngine()
    paid = engine.prepay(accuracy(TRAINING_SET, sigma=4.0), 3)
    assert engine.accountant.history == [(4.0, 1.0, 3)]
    with refused("0 or 1"):
        paid.count(groups=[0], measures={"correct": [2]})
    for left in (2, 1, 0):
        paid.count(**predictions())
        assert paid.left == left
    with refused("Pay for more"):
        paid.count(**predictions())
    assert engine.accountant.history == [(4.0, 1.0, 3)]
    more = engine.prepay(accuracy(APART), 2)
    in_a_fork(lambda: none_left(more))
    assert more.left == 2
    for twin in (copy.copy(more), copy.deepcopy(more), pickle.loads(pickle.dumps(more))):
        with refused("Pay for more"):
            twin.count(**predictions())


def test_the_file_has_an_answer_before_it_is_drawn(tmp_path: Path) -> None:
    """Where it cannot be written, nothing is drawn."""
    engine = FastPrivacyEngine()
    engine.write_ahead(tmp_path / "ledger")
    engine.count(accuracy(APART), **predictions())
    engine.count(accuracy(TRAINING_SET, sigma=7.0), **predictions())
    log = WriteAheadLog(tmp_path / "ledger", writes=False)
    assert list(log.found("validation").segments.values()) == [[(5.0, 1.0, 1)]]
    assert list(log.found().segments.values()) == [[(7.0, 1.0, 1)]]
    (tmp_path / "ledger").rename(tmp_path / "moved")
    for data in (APART, TRAINING_SET):
        with pytest.raises(StepError, match="not released"):
            engine.count(accuracy(data), **predictions())


KILLED = """
import os, signal, sys
from fastclip import FastPrivacyEngine
from tests.counts.runs import APART, SAME, accuracy, predictions, trained
engine = FastPrivacyEngine()
engine.write_ahead(sys.argv[1])
trained(engine, steps=2)
engine.count(accuracy(APART, sigma=2.0), **predictions())
engine.prepay(accuracy(APART, sigma=3.0), 4).count(**predictions())
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_has_counted_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -9
    engine = FastPrivacyEngine()
    engine.write_ahead(path)
    assert engine.accountant.history == [(1.0, 1 / 8, 2)]
    assert engine.accountant.lines["validation"].history == [(2.0, 1.0, 1), (3.0, 1.0, 4)]
    engine.count(accuracy(APART, sigma=2.0), **predictions())
    expected = balle_wang(math.sqrt(2 / 4 + 4 / 9), DELTA)
    assert line(engine, "validation") == pytest.approx(expected, rel=ROUNDING)
    with refused("was counted with the people of 'validation'"):
        engine.count(accuracy(SAME), **predictions())


# Kept


def test_a_checkpoint_keeps_every_line(tmp_path: Path) -> None:
    engine = FastPrivacyEngine()
    model, optimizer = trained(engine)
    engine.count(accuracy(APART, sigma=2.0), **predictions())
    engine.count(accuracy(PrivateData("test", overlap="training")), **predictions())
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    engine.count(accuracy(APART, sigma=2.0), **predictions())
    later = line(engine, "validation")

    resumed = FastPrivacyEngine()
    model, optimizer = trained(resumed, steps=0)
    resumed.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    assert line(resumed, "validation") == pytest.approx(balle_wang(0.5, DELTA))
    assert resumed.privacy_by_data_set(DELTA).lines[0].data_sets == ("training", "test")
    assert resumed.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    resumed.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    assert line(resumed, "validation") == pytest.approx(balle_wang(0.5, DELTA))  # once
    resumed.count(accuracy(APART, sigma=2.0), **predictions())
    assert line(resumed, "validation") == later
    assert line(engine, "validation") == later  # the one that goes on knows more

    spread = FastPrivacyEngine()
    model, optimizer = trained(spread, steps=0)
    saved = engine.run_state(module=model, optimizer=optimizer).state_dict()
    spread.run_state(module=model, optimizer=optimizer).load_state_dict(saved)
    assert line(spread, "validation") == later

    state = engine.accountant.state_dict()
    state["fastclip_lines"] = {}
    with refused("is damaged"):
        FastPrivacyEngine().accountant.load_state_dict(state)
    state = engine.accountant.state_dict()
    state["fastclip_lines"]["validation"]["history"] = []
    with refused("is damaged"):
        FastPrivacyEngine().accountant.load_state_dict(state)


def test_a_state_by_way_of_json() -> None:
    """As a Trainer saves it."""
    engine, resumed = FastPrivacyEngine(), FastPrivacyEngine()
    engine.count(accuracy(APART), **predictions())
    engine.count(accuracy(PrivateData("test", overlap="training")), **predictions())
    resumed.accountant.load_state_dict(json.loads(json.dumps(engine.accountant.state_dict())))
    assert resumed.privacy_by_data_set(DELTA) == engine.privacy_by_data_set(DELTA)
    state = engine.accountant.state_dict()
    for data in ("test", [1], 3):
        state["fastclip_protected"]["data"] = data
        with refused("damaged"):
            FastPrivacyEngine().accountant.load_state_dict(state)


def test_the_mechanism_says_what_is_taken_on_faith() -> None:
    engine = FastPrivacyEngine()
    trained(engine, steps=1)
    assert not any("overlap" in text for text in engine.mechanism().trusted)
    engine.count(accuracy(APART), **predictions())
    engine.count(accuracy(PrivateData("test", overlap="training")), **predictions())
    first, second = engine.mechanism().trusted[-2:]
    assert "'test', declared to overlap" in first
    assert second.startswith("nobody of 'validation' is in the training set")


def test_a_checkpoint_is_written_to_the_file_of_who_loads_it(tmp_path: Path) -> None:
    engine, other = FastPrivacyEngine(), FastPrivacyEngine()
    engine.count(accuracy(APART), **predictions())
    other.write_ahead(tmp_path / "ledger")
    other.accountant.load_state_dict(engine.accountant.state_dict())
    assert WriteAheadLog(tmp_path / "ledger", writes=False).found("validation").segments


def test_another_accountant_takes_over_every_line(tmp_path: Path) -> None:
    engine = FastPrivacyEngine()
    engine.write_ahead(tmp_path / "ledger")
    engine.count(accuracy(APART), **predictions())
    engine.accountant = FastPrivacyEngine(accountant="rdp").accountant
    engine.count(accuracy(APART), **predictions())
    assert engine.accountant.lines["validation"].history == [(5.0, 1.0, 2)]
    engine.write_ahead(None)
    again = FastPrivacyEngine()
    again.write_ahead(tmp_path / "ledger")
    assert again.accountant.lines["validation"].history == [(5.0, 1.0, 2)]


def test_a_copy_of_an_engine_shares_its_lines_and_a_pickled_one_counts_them() -> None:
    engine = FastPrivacyEngine()
    engine.count(accuracy(APART), **predictions())
    shared, alone = copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))
    shared.count(accuracy(APART), **predictions())
    assert engine.accountant.lines["validation"].history == [(5.0, 1.0, 2)]
    assert alone.accountant.lines["validation"].history == [(5.0, 1.0, 1)]
    alone.count(accuracy(APART), **predictions())
    engine.accountant.load_state_dict(alone.accountant.state_dict())
    assert engine.accountant.lines["validation"].history == [(5.0, 1.0, 3)]


def test_secure_mode_draws_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FastPrivacyEngine(secure_mode=True)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(engine.count(accuracy(APART), **predictions()).counts)
    assert not found[0].equal(found[1])
    state = torch.get_rng_state()
    engine.count(accuracy(APART), **predictions())
    assert torch.get_rng_state().equal(state)


def test_patients_weigh_once_in_each_group() -> None:
    """With noise far below a sample: 3 patients, one of 30 rows."""
    engine = FastPrivacyEngine()
    ids = ["p"] * 30 + ["q", "r"]
    query = accuracy_query(APART, ("f", "m"), 1e-3, "unit", groups_per_unit=1)
    right = torch.tensor([1] * 20 + [0] * 10 + [1, 1])
    found = engine.count(
        query, groups=[0] * 31 + [1], measures={"correct": right}, unit_ids=ids
    ).counts
    assert found.tolist() == pytest.approx(np.array([[1 + 2 / 3, 2], [1, 1]]), abs=0.02)


# A budget that covers both


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_budget_reserves_counts(accountant: str) -> None:
    """All of it is spent once the reserved counts and the planned steps are taken."""
    engine, query = FastPrivacyEngine(accountant=accountant), accuracy(TRAINING_SET, sigma=6.0)
    model = torch.nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        target_epsilon=3.0, target_delta=DELTA, epochs=1, max_grad_norm=1.0,
        reserve=[(query, 4), (accuracy(PublicData("demo"), sigma=0.0), 9)],
    )  # fmt: skip
    assert engine.mechanism().planned_epsilon == pytest.approx(3.0, rel=0.011)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    assert engine.get_epsilon(DELTA) < 2.9
    paid = engine.prepay(query, 4)
    assert 2.97 <= engine.get_epsilon(DELTA) <= 3.0
    assert paid.left == 4


def test_budgets_that_cannot_be_kept() -> None:
    engine = FastPrivacyEngine()
    options = {
        "module": torch.nn.Linear(4, 2), "optimizer": None, "target_epsilon": 1.0, "max_grad_norm": 1.0,
        "data_loader": DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8), "epochs": 1,
        "target_delta": DELTA,
    }  # fmt: skip
    with refused("Raise their noise_multiplier"):
        engine.make_private_with_epsilon(
            reserve=[(accuracy(TRAINING_SET, sigma=1.0), 1)], **options
        )
    with refused("Leave it out"):
        engine.make_private_with_epsilon(reserve=[(accuracy(APART, sigma=9.0), 1)], **options)
    assert not engine.accountant.lines
