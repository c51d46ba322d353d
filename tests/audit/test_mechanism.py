"""The audit of the mechanism: exact laws of its scores, what it proves, what it does not accuse."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from fastclip.accounting import RandomAllocation, TruncatedPoisson
from fastclip.audit import CanaryScoreAuditor, neighbors
from fastclip.audit.bounds import (
    MESH,
    Step,
    advantage,
    p_of_guesses,
    power,
    provable_epsilon,
    refuted_epsilon,
    tight_epsilon,
)
from fastclip.audit.laws import p_values_of_noise
from fastclip.audit.mechanism import (
    ALARM,
    EVERY,
    FEWEST,
    MADE,
    Attacked,
    Entries,
    Setting,
    Tables,
    attack,
    audit,
    judge,
    loudness,
)
from fastclip.audit.mutants import MUTANTS
from fastclip.audit.neighbors import NEIGHBORS, SETTINGS, audit_neighbors
from fastclip.engine.privacy_engine import FastPrivacyEngine

FEW = 2500
FULL = [(1.0, 1.0, 1)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.ranks == 1], ids=lambda s: s.name)
def test_no_setting_is_refuted(setting: Setting) -> None:
    torch.manual_seed(0)
    found = audit(setting, canaries=FEW, seed=1)
    assert not found.refuted
    assert not found.says_nothing
    assert (0.65 if setting.weighted else 0.9) * FEW < found.canaries < FEW
    assert found.bound < 1.2 * found.tight  # few canaries: +- 15%
    # What a cut costs is of rows that take each other's place, which no canary sees.
    assert setting.cut is not None or 0.6 * found.tight < found.bound
    assert found.tight - MESH <= found.claimed <= found.tight + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.ranks > 1], ids=lambda s: s.name)
def test_several_ranks(setting: Setting) -> None:
    found = audit(setting, canaries=FEW, seed=1)
    assert not found.refuted
    assert found.bound > 0.6 * found.tight
    assert {"draws: whole", "noise: entries"} <= found.tests.keys()


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 4)])
def test_the_law_of_the_scores(sigma: float, steps: int) -> None:
    """At q = 1 the log-likelihood ratio is N(+- mu^2 / 2, mu^2), mu = sqrt(T) / sigma, but for the
    share of a canary's gradient that is the bias's."""
    torch.manual_seed(0)
    inside = torch.arange(FEW) % 2 == 0
    seen = attack(Setting("", sigma, steps), inside, 1e-5)
    mu = math.sqrt(steps * 2 / (2 + 1 / 256)) / sigma
    for coin, mean in ((inside, mu**2 / 2), (~inside, -(mu**2) / 2)):
        found = seen.scores[coin & seen.loud].numpy()
        assert stats.kstest(found, stats.norm(mean, mu).cdf).pvalue > 1e-3
    assert seen.history == [(sigma, 1.0, steps)]


@pytest.mark.parametrize("model", [Entries(5), Entries(5, tied=True), Tables(5)])
def test_what_canaries_add_is_known_exactly(model: Entries | Tables) -> None:
    """Sums of canaries of given lengths, against autograd."""
    lengths = torch.rand(25, dtype=torch.float64)
    loss = (model(torch.arange(25)) * lengths.float()).sum()
    exact = torch.autograd.grad(loss, list(model.parameters()))
    for found, gradient in zip(model.sums(lengths * model.parts[:, None]), exact, strict=True):
        torch.testing.assert_close(found.float(), gradient.reshape(-1))


def test_norms_of_canaries_are_spread() -> None:
    """One in eleven: from a tenth of C to 1e4 C, as many in each decade; none of one group alone."""
    loud, guessed = loudness(110_000, 2.0, 0.5)
    norms = loud[~guessed].double() * 2 / 0.5
    assert len(norms) == 110_000 // EVERY
    assert ((norms >= 0.0999) & (norms <= 1.001e4)).all()
    assert norms.log10().histc(5, -1, 4) == pytest.approx([2000.0] * 5, abs=5)
    assert {int(k) % 2 for k in (~guessed).nonzero()} == {0, 1}
    assert (loud[guessed] == 1e4).all()


def entry_of(setting: Setting) -> Step:
    """What the engine records of it, with batches that are not cut."""
    turn = setting.groups_in_turn
    sigma, rate = setting.noise_multiplier, setting.rate * turn
    steps = setting.steps // turn
    if setting.sampling == "allocation":
        a_pass = round(1 / rate)
        return sigma, RandomAllocation(a_pass), -(-steps // a_pass)
    return sigma, rate, steps


UNCUT = {(entry_of(s), s.weighted) for s in SETTINGS if s.cut is None}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("entry", "weighted"), sorted(UNCUT, key=str), ids=str)
def test_halved_noise_is_seen_by_the_fewest_canaries(entry: Step, weighted: bool) -> None:
    """In 99 of 100 audits of every setting, by its guesses alone, but where draws are cut."""
    guesses = FEWEST * (EVERY - 1) // EVERY * (3 if weighted else 4) // 4
    assert power([entry], guesses, ALARM / MADE / 12) > 0.99


def test_too_few_canaries_see_nothing() -> None:
    assert power(FULL, 40, ALARM / MADE) < 0.1
    assert len(SETTINGS) + len(NEIGHBORS) == MADE


def seen(right: int, claimed: float = 4.387, history: object = None, **given: object) -> Attacked:
    """Of 1000 canaries, half of them in, this many guessed right; all else is as it should be."""
    inside = torch.arange(1000) % 2 == 0
    scores = torch.where(inside, 1.0, -1.0)
    scores[right:] *= -1
    noise = torch.randn(1, 2000, dtype=torch.float64)
    made = Attacked(
        scores, torch.ones(1000, dtype=torch.bool), noise, [1000, 1000],
        torch.ones(1, 500, dtype=torch.float64), torch.zeros(0), 1.0, history or FULL, claimed,  # type: ignore[arg-type]
    )  # fmt: skip
    return made._replace(**given)  # type: ignore[arg-type]


def judged(found: Attacked) -> object:
    return judge("", found, torch.arange(1000) % 2 == 0, 1e-5, 0.05, ALARM / MADE, 0.0)


def test_a_stated_epsilon_is_held_against_what_is_recorded() -> None:
    torch.manual_seed(0)
    tight = tight_epsilon(FULL, 1e-5)
    assert not judged(seen(690, tight)).refuted
    assert judged(seen(690, tight - MESH - 1e-3)).refuted
    assert "is stated for" in judged(seen(690, tight / 10)).faults[0]
    assert not judged(seen(690, tight * 10)).refuted


def test_guesses_refute_a_stated_epsilon_whatever_the_mechanism() -> None:
    """Recorded with next to no noise, but stated as 0.5: 950 of 1000 right prove more than that."""
    torch.manual_seed(0)
    found = judged(seen(950, 0.5, [(0.3, 1.0, 1)]))
    assert found.proven > 0.5
    assert found.refuted


def test_releases_that_are_not_numbers_do_not_pass() -> None:
    torch.manual_seed(0)
    for value in (math.nan, math.inf):
        noise = torch.randn(1, 2000, dtype=torch.float64)
        noise[0, 7] = value
        assert judged(seen(690, noise=noise)).refuted
    (mutant,) = (m for m in MUTANTS if m.name == "NaN where a row is")
    assert mutant.audited(canaries=FEW, runs=0).refuted


def test_an_attack_that_does_not_work_says_nothing() -> None:
    torch.manual_seed(0)
    assert judged(seen(500)).says_nothing
    assert not judged(seen(690)).says_nothing
    assert not judged(seen(980)).says_nothing  # it is refuted


@pytest.mark.parametrize("given", [{"reach": 1.01}, {"history": [(1.0, 1.0, 2)]}, {"history": []}])
def test_a_contribution_beyond_the_sensitivity_and_steps_that_are_not_there(given: dict) -> None:
    torch.manual_seed(0)
    found = judged(seen(600, 9.0)._replace(**given))
    assert found.refuted
    assert found.faults


def test_what_was_broken_is_whole_again() -> None:
    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError), MUTANTS[0].broken():
        raise ZeroDivisionError
    assert not audit(SETTINGS[0], canaries=FEW, seed=1).refuted


@pytest.mark.slow
def test_settings_beyond_one_rate_and_one_threshold() -> None:
    """Who is drawn, at which rate and with which contribution, is what the setting says."""
    torch.manual_seed(0)
    inside, by_name = torch.arange(900) % 2 == 0, {s.name: s for s in SETTINGS}
    weighted = attack(by_name["weighted draws"], torch.ones_like(inside), 1e-5)
    came = weighted.draws.reshape(-1, 4).mean(0) / 0.2
    assert came[:3].mean() == pytest.approx(1, abs=0.1)
    assert came[3] == pytest.approx(0.25, abs=0.1)
    assert not weighted.loud[3::4].any()
    assert weighted.history == [(1.0, 0.2, 10)]
    cut = attack(by_name["cut draws"], inside, 1e-5)
    assert cut.history == [(2.0, TruncatedPoisson(0.2, 900, 162), 10)]
    assert cut.draws.shape == (10, 900)
    assert cut.draws.sum(1).max() == 162
    for name in ("per layer", "groups, same step", "reweighted, same step"):
        found = attack(by_name[name], inside, 1e-5)
        assert found.reach == pytest.approx(1, abs=1e-5)
        assert p_values_of_noise(found.noise, found.sizes)["entries"] > 1e-4


@pytest.mark.slow
def test_no_false_alarm_in_a_hundred_audits() -> None:
    torch.manual_seed(0)
    assert not any(audit(SETTINGS[1], canaries=10_000, seed=seed).refuted for seed in range(100))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setting", NEIGHBORS, ids=lambda s: s.name)
def test_neighbors_are_not_told_apart(setting: object) -> None:
    torch.manual_seed(0)
    found = audit_neighbors(setting, runs=10)  # type: ignore[arg-type]
    assert not found.refuted
    assert 0.1 < found.claimed < 0.3


def test_a_number_that_shows_the_row_in_half_of_the_fewest_runs_is_found() -> None:
    claimed, numbers = tight_epsilon([(24.0, 0.8, 8)], 1e-3), 35  # so many share the level
    inside, outside = torch.arange(neighbors.FEWEST) % 2, torch.zeros(neighbors.FEWEST)
    for _ in range(20):
        auditor = CanaryScoreAuditor(inside, outside)
        assert auditor.epsilon_clopper_pearson(ALARM / MADE / numbers, 1e-3) > claimed


def test_the_batches_of_a_pass_are_counted() -> None:
    """Two rows, of which a pass has one step, but two where its steps follow the rows."""
    (mutant,) = (m for m in MUTANTS if m.name == "a pass of as many steps as rows")
    released = neighbors.one_run(NEIGHBORS[0], True, FastPrivacyEngine())
    assert released["len(loader)"] == released["batches of a pass"] == 1
    with mutant.broken():
        released = neighbors.one_run(NEIGHBORS[0], True, FastPrivacyEngine())
    assert released["len(loader)"] == released["batches of a pass"] == 2


def test_neighbors_of_a_stated_epsilon_that_is_too_low() -> None:
    (mutant,) = (m for m in MUTANTS if m.name == "the stated epsilon is a tenth")
    with mutant.broken():
        found = audit_neighbors(NEIGHBORS[0], runs=4)
    assert found.refuted
    assert "is stated for" in found.faults[0]


def test_the_best_attack_on_a_claim() -> None:
    """delta(0) of one Gaussian: 2 Phi(mu / 2) - 1; epsilon by closed form; drawn rows tell less."""
    assert advantage([(2.0, 1.0, 4)]) == pytest.approx(2 * stats.norm.cdf(0.5) - 1)
    assert advantage([(1.0, 0.2, 1)]) == pytest.approx(
        0.2 * (2 * stats.norm.cdf(0.5) - 1), rel=1e-3
    )
    assert tight_epsilon([(2.0, 1.0, 1), (2.0, 1.0, 3)], 1e-5) == pytest.approx(4.3770, abs=1e-3)


@pytest.mark.parametrize("history", [FULL, pytest.param([(1.0, 0.2, 10)], marks=pytest.mark.slow)])
def test_a_bound_from_guesses(history: list) -> None:
    """As many right guesses as the claim allows, less what 5% take off: near the claim, and below it."""
    expected = int(10**6 * (1 + advantage(history)) / 2)
    bound = refuted_epsilon(history, expected, 10**6, 0.05, 1e-5)
    assert 0.97 < bound / tight_epsilon(history, 1e-5) < 1
    assert p_of_guesses(history, expected, 10**6) == pytest.approx(0.5, abs=0.01)
    assert refuted_epsilon(history, 10**6 // 2, 10**6, 0.05, 1e-5) == 0
    assert p_of_guesses(history, 0, 10) == 1


def test_a_bound_of_any_mechanism() -> None:
    """Randomized response tells as much as epsilon allows: right with probability 1 / (1 + e^-eps)."""
    right = int(10**6 / (1 + math.exp(-2.0)))
    assert provable_epsilon(right, 10**6, 0.05, 0.0) == pytest.approx(2.0, abs=0.01)
    assert provable_epsilon(right, 10**6, 0.05, 0.01) < provable_epsilon(right, 10**6, 0.05, 0.0)
    assert provable_epsilon(500, 1000, 0.05, 1e-5) == provable_epsilon(0, 10, 0.05, 0.0) == 0


@pytest.mark.slow
def test_more_right_guesses_than_any_noise_explains() -> None:
    """At q = 0.1 nine of ten canaries are never drawn; near that limit a bound is a least one."""
    drawn = [(1.0, 0.1, 1)]
    assert refuted_epsilon(drawn, 9_000, 10_000, 0.05, 1e-5) == math.inf
    assert 10 < refuted_epsilon(drawn, 544_000, 10**6, 0.05, 1e-5) < math.inf


@pytest.mark.slow
def test_where_a_claim_is_refuted_the_bound_is_one_of_any_mechanism() -> None:
    """Batches in order, accounted as draws: one Gaussian step of mu = 1/2 has epsilon 1.99."""
    torch.manual_seed(0)
    found = judged(seen(600, 1.22, [(2.0, 0.2, 5)], draws=torch.ones(5, 500, dtype=torch.float64),
                        noise=torch.randn(5, 2000, dtype=torch.float64)))  # fmt: skip
    assert found.refuted
    assert found.bound <= provable_epsilon(600, 1000, 0.05, 1e-5) < 1.99
