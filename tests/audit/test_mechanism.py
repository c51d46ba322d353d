"""The audit of the mechanism: exact laws of its scores, what it proves, what it does not accuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from fastclip.audit.__main__ import main
from fastclip.audit.claims import advantage, p_of_guesses, refuted_epsilon, tight_epsilon
from fastclip.audit.mechanism import Setting, attack, audit
from fastclip.audit.mutants import MUTANTS
from fastclip.audit.neighbours import audit_neighbours
from fastclip.audit.noise_law import p_value
from fastclip.audit.settings import NEIGHBOURS, SETTINGS

FEW = 2500


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.ranks == 1], ids=lambda s: s.name)
def test_no_setting_is_refuted(setting: Setting) -> None:
    torch.manual_seed(0)
    found = audit(setting, canaries=FEW, seed=1)
    assert not found.refuted
    assert found.canaries == FEW
    assert 0.6 * found.tight < found.bound < 1.2 * found.tight  # few canaries: +- 15%
    assert found.tight <= found.claimed <= found.tight + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.ranks > 1], ids=lambda s: s.name)
def test_several_ranks(setting: Setting) -> None:
    found = audit(setting, canaries=FEW, seed=1)
    assert not found.refuted
    assert found.bound > 0.6 * found.tight


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (2.0, 4)])
def test_the_law_of_the_scores(sigma: float, steps: int) -> None:
    """At q = 1 the log-likelihood ratio is N(+- mu^2 / 2, mu^2), mu = sqrt(T) / sigma."""
    torch.manual_seed(0)
    inside = torch.arange(FEW) % 2 == 0
    seen = attack(Setting("", sigma, steps), inside, 1e-5)
    mu = math.sqrt(steps) / sigma
    for found, mean in ((seen.scores[inside], mu**2 / 2), (seen.scores[~inside], -(mu**2) / 2)):
        assert stats.kstest(found.numpy(), stats.norm(mean, mu).cdf).pvalue > 1e-3
    assert seen.history == [(sigma, 1.0, steps)]


@pytest.mark.one_in(2)
def test_a_mutant_is_refuted() -> None:
    """Each of the mechanism's, with few canaries; the neighbours' take long, and are in a slow test."""
    torch.manual_seed(0)
    passed = [
        mutant.name
        for mutant in MUTANTS
        if isinstance(mutant.setting, Setting)
        and mutant.name != "sigma recorded as 1.1 sigma"  # which so few do not show
        and not mutant.audited(canaries=10_000, runs=0).refuted
    ]
    assert not passed
    assert len(MUTANTS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if not isinstance(m.setting, Setting)], ids=lambda m: m.name
)
def test_a_mutant_of_neighbours_is_refuted(mutant: object) -> None:
    torch.manual_seed(0)
    assert mutant.audited(canaries=0, runs=400).refuted  # type: ignore[attr-defined]


def test_what_was_broken_is_whole_again() -> None:
    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError), MUTANTS[0].broken():
        raise ZeroDivisionError
    assert not audit(SETTINGS[0], canaries=FEW, seed=1).refuted


@pytest.mark.slow
def test_no_false_alarm_in_a_hundred_audits() -> None:
    torch.manual_seed(0)
    assert not any(audit(SETTINGS[1], canaries=10_000, seed=seed).refuted for seed in range(100))


@pytest.mark.parametrize("setting", NEIGHBOURS, ids=lambda s: s.name)
def test_neighbours_are_not_told_apart(setting: object) -> None:
    torch.manual_seed(0)
    found = audit_neighbours(setting, runs=40)  # type: ignore[arg-type]
    assert not found.refuted
    assert 0.15 < found.claimed < 0.3


def test_the_best_attack_on_a_claim() -> None:
    """delta(0) of one Gaussian: 2 Phi(mu / 2) - 1; epsilon by closed form; drawn rows tell less."""
    assert advantage([(2.0, 1.0, 4)]) == pytest.approx(2 * stats.norm.cdf(0.5) - 1)
    assert advantage([(1.0, 0.2, 1)]) == pytest.approx(
        0.2 * (2 * stats.norm.cdf(0.5) - 1), rel=1e-3
    )
    assert tight_epsilon([(2.0, 1.0, 1), (2.0, 1.0, 3)], 1e-5) == pytest.approx(4.3770, abs=1e-3)


def test_a_bound_from_guesses() -> None:
    """As many right guesses as the claim allows, less what 5% take off: near the claim, and below it."""
    for history in ([(1.0, 1.0, 1)], [(1.0, 0.2, 10)]):
        expected = int(10**6 * (1 + advantage(history)) / 2)
        bound = refuted_epsilon(history, expected, 10**6, 0.05, 1e-5)
        assert 0.97 < bound / tight_epsilon(history, 1e-5) < 1
        assert p_of_guesses(history, expected, 10**6) == pytest.approx(0.5, abs=0.01)
        assert refuted_epsilon(history, 10**6 // 2, 10**6, 0.05, 1e-5) == 0
    assert p_of_guesses(history, 0, 10) == 1


def test_more_right_guesses_than_any_noise_explains() -> None:
    """At q = 0.1 nine of ten canaries are never drawn; near that limit a bound is a least one."""
    drawn = [(1.0, 0.1, 1)]
    assert refuted_epsilon(drawn, 9_000, 10_000, 0.05, 1e-5) == math.inf
    assert 10 < refuted_epsilon(drawn, 544_000, 10**6, 0.05, 1e-5) < math.inf


def test_p_values_of_noise_are_uniform_or_larger() -> None:
    """Of 300 samples of the law: no more below 5% than a binomial law allows but once in 10,000."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(300):
        noise = rng.normal(size=(3, 4000))
        noise[:, rng.random(4000) < 0.3] = math.nan
        found.append(p_value(torch.from_numpy(noise)))
    assert sum(p < 0.05 for p in found) <= stats.binom.ppf(1 - 1e-4, 300, 0.05)


@pytest.mark.parametrize("broken", ["narrow", "uniform", "steps alike", "halves alike", "periodic"])
def test_noise_of_another_law(broken: str) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 10_000))
    if broken == "narrow":
        noise *= 0.9
    elif broken == "uniform":
        noise = math.sqrt(12) * (rng.random(noise.shape) - 0.5)
    elif broken == "steps alike":
        noise[1] = 0.7 * noise[0] + math.sqrt(1 - 0.49) * noise[1]
    elif broken == "halves alike":
        noise[:, 5000:] = noise[:, :5000]
    else:
        noise[:, 100:] = (noise[:, 100:] + noise[:, :-100]) / math.sqrt(2)
    assert p_value(torch.from_numpy(noise)) < 1e-6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    names = ["full batch", "units of 3 rows"]
    torch.manual_seed(0)
    assert main(["--only", *names, "--canaries", "900", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    assert "REFUTED" not in said
    told = json.loads(file.read_text())
    assert [one["name"] for one in told["findings"]] == names
    assert not any(one["refuted"] for one in told["findings"])
