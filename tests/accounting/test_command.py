"""`python -m fastclip.accounting`: its numbers are the functions', its errors one sentence."""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import pytest

from fastclip.accounting import (
    Poisson,
    RandomAllocation,
    TruncatedNegativeBinomial,
    TruncatedPoisson,
    epsilon,
    find_noise_multiplier,
    history,
    hpo_epsilon,
    split,
)
from fastclip.accounting.__main__ import main
from fastclip.accounting.steps import encoded
from fastclip.clipping.schedules import (
    ConstantNoise,
    ExponentialNoise,
    LinearNoise,
    NoiseSchedule,
    StagedNoise,
    StepNoise,
    TimeNoise,
)

RUN = ["--samples", "5000", "--batch-size", "100", "--epochs", "1.2"]
SIGMA = ["--noise-multiplier", "2"]
TWO = ["--stages", "2"]
STEPS, RATE, DELTA = 60, 100 / 5000, 1 / 50_000


def as_json(capsys: pytest.CaptureFixture, *arguments: str) -> dict[str, Any]:
    assert main([*RUN, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "schedule"),
    [
        ([], ConstantNoise()),
        (["--schedule", "staged"], StagedNoise(STEPS, 3)),
        (
            ["--schedule", "staged", "--noise-decay", "0.6", "--length-decay", "0.7", *TWO],
            StagedNoise(STEPS, 2, 0.6, 0.7),
        ),
        (["--schedule", "step", "--noise-decay", "0.9", *TWO], StepNoise(STEPS, 2, 0.9)),
        (["--schedule", "linear", "--final-noise", "0.8", *TWO], LinearNoise(STEPS, 2, 0.8)),
        (["--schedule", "exponential", "--rate", "0.2", *TWO], ExponentialNoise(STEPS, 2, 0.2)),
        (["--schedule", "time", "--rate", "0.2", *TWO], TimeNoise(STEPS, 2, 0.2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_stages_are_the_functions(
    capsys: pytest.CaptureFixture, arguments: list[str], schedule: NoiseSchedule
) -> None:
    printed = as_json(capsys, *SIGMA, "--count-noise-ratio", "10", *arguments)
    entries = history(schedule, 2.0, RATE, STEPS)
    assert (printed["steps"], printed["sample_rate"]) == (STEPS, RATE)
    assert printed["delta"] == pytest.approx(DELTA)
    assert len(printed["stages"]) == len(entries)
    for end, (row, (sigma, _, steps)) in enumerate(zip(printed["stages"], entries, strict=True), 1):
        levels = split(sigma, 10)
        assert (row["steps"], row["sigma"]) == (steps, sigma)
        assert (row["sigma_gradients"], row["sigma_counts"]) == levels[1:]
        delta = printed["delta"]
        assert row["epsilon"]["rdp"] == epsilon(entries[:end], delta, "rdp")
        assert row["epsilon"]["prv"] == epsilon(entries[:end], delta, "prv")
    assert printed["epsilon"] == printed["stages"][-1]["epsilon"]["prv"]
    assert printed["search"] is None


def test_a_target_is_solved_for(capsys: pytest.CaptureFixture) -> None:
    printed = as_json(
        capsys,
        "--epsilon",
        "2",
        "--delta",
        "1e-5",
        "--accountant",
        "rdp",
        "--schedule",
        "staged",
        *TWO,
    )
    sigma = find_noise_multiplier(
        target_epsilon=2,
        target_delta=1e-5,
        sample_rate=RATE,
        steps=STEPS,
        schedule=StagedNoise(STEPS, 2),
        accountant="rdp",
    )
    assert printed["stages"][0]["sigma"] == sigma
    assert printed["stages"][0]["sigma_counts"] is None
    assert 1.99 <= printed["epsilon"] <= 2


@pytest.mark.parametrize(
    ("arguments", "trials"),
    [
        ([], TruncatedNegativeBinomial.from_mean(8, 0)),
        (["--eta", "1"], TruncatedNegativeBinomial.from_mean(8, 1)),
        (["--trials-distribution", "poisson"], Poisson(8)),
    ],
)
def test_a_search_is_charged(
    capsys: pytest.CaptureFixture, arguments: list[str], trials: Any
) -> None:
    printed = as_json(capsys, *SIGMA, "--trials", "8", *arguments)
    charged = hpo_epsilon([(2.0, RATE, STEPS)], printed["delta"], trials)
    assert printed["search"] == charged._asdict()


@pytest.mark.slow
def test_draws_that_are_cut(capsys: pytest.CaptureFixture) -> None:
    """The cut's own price, by the one accountant that knows it; dearer than no cut."""
    pytest.importorskip("dp_accounting")
    cut = ["--max-batch-size", "100", "--accountant", "pld"]
    found = as_json(capsys, *SIGMA, *cut, "--attack", "0.01")
    draws = TruncatedPoisson(RATE, 5000, 100)
    assert found["epsilon"] == epsilon(history(ConstantNoise(), 2.0, draws, STEPS), DELTA, "pld")
    assert found["sample_rate"] == encoded(draws)
    uncut = as_json(capsys, *SIGMA, *cut[2:], "--attack", "0.01")
    assert found["epsilon"] > 1.2 * uncut["epsilon"]
    assert found["attack"]["mu"] > uncut["attack"]["mu"]
    solved = as_json(capsys, "--epsilon", "1", *cut)
    assert solved["stages"][0]["sigma"] == find_noise_multiplier(
        target_epsilon=1, target_delta=DELTA, sample_rate=draws, steps=STEPS, accountant="pld"
    )


def test_random_allocation(capsys: pytest.CaptureFixture) -> None:
    """A part of an epoch counts in full."""
    found = as_json(capsys, *SIGMA, "--allocation", "2", "--attack", "0.01")
    allocated = RandomAllocation(100, 2)
    assert (found["steps"], found["sample_rate"]) == (120, encoded(allocated))
    assert found["stages"][0]["epsilon"] == {"prv": epsilon([(2.0, allocated, 2)], DELTA)}
    assert found["attack"]["mu"] > 0
    assert main([*RUN, *SIGMA, "--allocation", "1"]) == 0
    assert "60 steps at 1 of 50 steps of an epoch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", [["--max-batch-size", "100"], ["--trials", "8"], ["--accountant", "rdp"]]
)
def test_what_no_accounting_is_known_for(capsys: pytest.CaptureFixture, other: list[str]) -> None:
    with pytest.raises(SystemExit):
        main([*RUN, *SIGMA, "--allocation", "1", *other])
    assert "llocation" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_the_table_shows_the_same_numbers(capsys: pytest.CaptureFixture) -> None:
    arguments = [*SIGMA, "--accountant", "gdp", "--count-noise-ratio", "10", "--trials", "8"]
    printed = as_json(capsys, *arguments)
    assert main([*RUN, *arguments]) == 0
    text = capsys.readouterr().out.splitlines()
    (stage,) = printed["stages"]
    levels = [stage["sigma"], stage["sigma_gradients"], stage["sigma_counts"]]
    spent = [stage["epsilon"][name] for name in ("rdp", "prv", "gdp")]
    row = next(line for line in text if line.split()[:2] == ["1", str(STEPS)])
    assert row.split()[2:] == [f"{number:.4f}" for number in [*levels, *spent]]
    assert f"epsilon = {printed['epsilon']:.4f} (gdp)" in "\n".join(text)
    assert f"epsilon = {printed['search']['epsilon']:.4f} for the released" in "\n".join(text)
    assert "1 / 50)" in text[0]  # the sample rate of Opacus' loader


@pytest.mark.parametrize(("delta", "warned"), [("2e-4", True), ("1.9e-4", False), (None, False)])
def test_a_delta_that_allows_to_publish_a_sample(
    capsys: pytest.CaptureFixture, delta: str | None, warned: bool
) -> None:
    assert main([*RUN, *SIGMA, *(["--delta", delta] if delta else [])]) == 0
    assert ("at least 1 / N" in capsys.readouterr().err) == warned


def test_infinite_epsilon_is_not_json() -> None:
    from fastclip.accounting.forecast import forecast

    planned = forecast(ConstantNoise(), 0.0, RATE, 5, DELTA, trials=Poisson(2)).as_json()
    assert planned["epsilon"] is None
    assert planned["search"]["epsilon"] is None
    json.dumps(planned, allow_nan=False)


@pytest.mark.filterwarnings("ignore:Optimal order", "ignore:GDP accounting")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*RUN], "one of the arguments --noise-multiplier --epsilon/--target-epsilon is required"),
        ([*RUN, *SIGMA, "--epsilon", "1"], "not allowed with argument"),
        ([*RUN, "--steps", "5", *SIGMA], "not allowed with argument"),
        ([*RUN, "--noise-multiplier", "0"], "--noise-multiplier expects a positive"),
        ([*RUN, "--noise-multiplier", "1e-200", "--accountant", "rdp"], "Use more noise"),
        ([*RUN, "--epsilon", "-1"], "target_epsilon expects"),
        ([*RUN, "--epsilon", "1e-5", "--accountant", "rdp"], "No noise multiplier reaches"),
        ([*RUN, *SIGMA, "--delta", "0"], "delta expects"),
        ([*RUN, *SIGMA, "--schedule", "cosine"], "invalid choice"),
        ([*RUN, *SIGMA, "--stages", "3"], "--stages expects --schedule staged or step"),
        ([*RUN, *SIGMA, "--schedule", "time", "--noise-decay", "1"], "--noise-decay expects"),
        ([*RUN, *SIGMA, "--schedule", "step", "--noise-decay", "2"], "noise_decay expects"),
        ([*RUN, *SIGMA, "--schedule", "step", "--stages", "99"], "total_steps expects"),
        ([*RUN, *SIGMA, "--schedule", "step", "--accountant", "gdp"], "'prv' or 'rdp'"),
        ([*RUN, *SIGMA, "--count-noise-ratio", "0"], "count_noise_ratio expects"),
        ([*RUN, *SIGMA, "--trials", "1"], "mean expects"),
        ([*RUN, *SIGMA, "--eta", "1"], "--trials, which is missing"),
        ([*RUN, *SIGMA, "--trials", "5", "--eta", "-1"], "eta expects"),
        (
            [*RUN, *SIGMA, "--trials", "5", "--eta", "1", "--trials-distribution", "poisson"],
            "--eta expects",
        ),
        ([*RUN, *SIGMA, "--max-batch-size", "0"], "--max-batch-size expects"),
        ([*RUN, *SIGMA, "--max-batch-size", "150"], "Use accountant='pld'"),
        (
            [*RUN, *SIGMA, "--max-batch-size", "150", "--accountant", "pld", "--trials", "5"],
            "Omit --max-batch-size",
        ),
        (["--samples", "9", "--batch-size", "10", "--steps", "5", *SIGMA], "--batch-size expects"),
        (["--samples", "0", "--batch-size", "1", "--steps", "5", *SIGMA], "--samples expects"),
        (["--samples", "9", "--batch-size", "1", "--steps", "0", *SIGMA], "steps expects"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("python -m fastclip.accounting: error: ")
    assert message in last
    assert printed.out == ""


def test_as_a_module(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["accounting", *RUN, *SIGMA, "--json"])
    with pytest.raises(SystemExit) as caught, pytest.warns(RuntimeWarning, match="sys.modules"):
        runpy.run_module("fastclip.accounting.__main__", run_name="__main__")
    assert caught.value.code == 0
    spent = json.loads(capsys.readouterr().out)["epsilon"]
    assert spent == epsilon([(2.0, RATE, STEPS)], 1 / (10 * 5000))


def test_a_run_that_another_accountant_cannot_compose(capsys: pytest.CaptureFixture) -> None:
    """RDP divides by a square that is 0; "prv" was asked for, and tells."""
    none = ["--noise-multiplier", "1e-200"]
    assert main([*RUN, *none]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[-2:] == ["-", "inf"]
    with pytest.raises(SystemExit):
        main([*RUN, *none, "--accountant", "rdp"])
    assert "Use more noise" in capsys.readouterr().err


def test_little_noise_has_an_upper_bound(capsys: pytest.CaptureFixture) -> None:
    spent = as_json(capsys, "--noise-multiplier", "1e-3")["stages"][0]["epsilon"]
    assert 1e6 < spent["prv"] < spent["rdp"]
