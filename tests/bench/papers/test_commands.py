"""`python -m bench.papers` says in a sentence what it needs, and does what it says."""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.papers import search as searching
from bench.papers.__main__ import _without_folder, main
from bench.papers.data import breast_cancer
from bench.papers.experiments import DEFAULT, EXPERIMENTS
from bench.papers.running import plan
from bench.papers.search import LEARNING_RATES, LOWER_BOUNDS, price, with_validation
from bench.papers.strategies import NON_PRIVATE, STRATEGIES
from fastclip import clipping
from fastclip.accounting import TruncatedNegativeBinomial, epsilon, hpo_epsilon
from fastclip.errors import ArgumentError


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*EXPERIMENTS, *STRATEGIES))
    for name in DEFAULT:
        assert EXPERIMENTS[name].generate is None


def test_every_preset_is_a_strategy() -> None:
    presets = set(clipping.__all__) - {"resolve"}
    functions = {name for name in presets if name.islower()}
    assert functions <= set(STRATEGIES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "nothing"], "No experiment nothing; there are: digits,"),
        (["run", "adult-xu"], "Adult"),
        (["run", "adult-xu", "--data", "nowhere"], "nowhere"),
        (["run", "digits", "--paper-sigma"], "the paper of digits states no noise multiplier"),
        (["report"], "holds no results; make some with"),
    ],
)
def test_what_is_missing_is_said_at_once(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [["run", "--seeds", "0"], ["run", "--epsilon", "-1"], ["sing"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert "error:" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_and_their_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seeds", "2", "--epochs", "2", "--epsilon", "8", "--out", str(tmp_path)]
    strategies = ["--strategy", "dp_sgd", "soft_ada_clip", "adaptive"]
    assert main(["run", "breast-cancer", *strategies, *options, "--jobs", "1"]) == 0
    assert main(["run", "breast-cancer", *strategies, *options, "--jobs", "1"]) == 0  # nothing left
    assert "0 runs" in capsys.readouterr().err
    about = json.loads((tmp_path / "about.json").read_text())["breast-cancer"]
    (origin,) = about["made"]
    assert origin["command"].endswith("--out FOLDER --jobs 1")
    assert about["settings"]["private"]["epochs"] == 2
    assert about["strategies"]["dp_sgd"].startswith("Clipping(scale=Hard(")
    longer = [*options[:2], "--epochs", "3", *options[4:]]
    assert main(["run", "breast-cancer", *strategies, *longer]) == 2
    assert "pass another folder with --out" in capsys.readouterr().err
    assert main(["report", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "SoftAdaClip: smaller loss gap than dp_sgd" in page
    assert "Not judged, because runs are missing" in page
    assert "breast-cancer" in (tmp_path / "report.md").read_text()


def test_no_folder_of_a_machine_is_written_down() -> None:
    words = ["run", "adult-xu", "--data=/data/a", "--out", "/results/b", "--seeds=2"]
    shown = _without_folder(words)
    assert shown == ["run", "adult-xu", "--data", "FOLDER", "--out", "FOLDER", "--seeds=2"]
    with pytest.raises(SystemExit):
        main(["run", "adult-xu", "--dat", "/data/a"])


def test_a_number_of_epochs_that_is_the_experiments_own_names_the_same_runs() -> None:
    of = EXPERIMENTS["income-simple"]  # 30 epochs, 15 without privacy
    asked = {
        epochs: [run.key for run in plan(of, [NON_PRIVATE, "dp_sgd"], [8.0], 1, epochs)]
        for epochs in (None, 30, 15)
    }
    assert asked[30][1] == asked[None][1] != asked[15][1]
    assert asked[15][0] == asked[None][0] != asked[30][0]


def options(**told: Any) -> argparse.Namespace:
    """Of a search."""
    default = {
        "command": "search", "name": "breast-cancer", "strategy": "bounded_adaptive",
        "epsilon": 2.0, "mean_trials": 3.0, "eta": 0.0, "epochs": 2, "data": None,
        "synthetic": False,
    }  # fmt: skip
    return argparse.Namespace(**{**default, **told})


@pytest.mark.extras
def test_a_search_costs_what_the_theorem_says() -> None:
    experiment = EXPERIMENTS["breast-cancer"]
    data = with_validation(breast_cancer.load())
    trials = TruncatedNegativeBinomial.from_mean(3.0)
    cost, noise = price(experiment, options(), data, trials)
    one = epsilon([(noise, 1.0, 1)], experiment.delta)
    assert 1.98 < one <= 2.0  # a score alone has the budget of a run
    steps = -(-len(data.train) // 64)
    from bench.papers.training import noise as multiplier

    schedule = STRATEGIES["dp_sgd"](experiment.plan(1, 2, False)).noise
    sigma = multiplier(2.0, experiment.delta, 1 / steps, 2 * steps, schedule)
    history = [(sigma, 1 / steps, 2 * steps)]
    expected = hpo_epsilon(history, experiment.delta, trials, others=[[(noise, 1.0, 1)]])
    assert cost == expected
    assert cost.epsilon > cost.base_epsilon >= one


@pytest.mark.extras
def test_a_search_goes_on_where_it_was_killed_and_shows_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TruncatedNegativeBinomial, "sample", lambda self, rng=None: 3)
    asked = options(out=tmp_path)
    scored, calls = searching.scored, 0

    def twice(*told: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        scored(*told)

    monkeypatch.setattr(searching, "scored", twice)
    with pytest.raises(KeyboardInterrupt):
        searching.search(asked)
    (secret,) = tmp_path.glob("*.secret")
    assert secret.stat().st_mode & 0o077 == 0
    before = json.loads((secret / "trials.json").read_text())
    assert [trial["score"] is None for trial in before] == [False, False, True]
    monkeypatch.setattr(searching, "scored", scored)
    said = searching.search(asked)
    assert not list(tmp_path.glob("*.secret"))
    result = json.loads((tmp_path / "search-breast-cancer.json").read_text())
    best = result["released"]
    known = [trial for trial in before if trial["score"] is not None]
    assert set(best) == {"lr", "lower", "score", "test"}  # no seed: noise follows from it
    assert best["score"] >= max(trial["score"] for trial in known)
    assert all(isinstance(trial["score"], int) for trial in (best, *known))
    for trial in known:  # the third may have the same score, by chance
        if all(trial[name] == best[name] for name in ("lr", "lower", "score")):
            assert best.items() <= trial.items()
    shapes = {name: t.shape for name, t in torch.load(tmp_path / "search-breast-cancer.pt").items()}
    assert shapes == {"weight": (1, 30), "bias": (1,)}
    assert math.isclose(min(abs(np.array(LEARNING_RATES) - best["lr"])), 0)
    assert math.isclose(min(abs(np.array(LOWER_BOUNDS) - best["lower"])), 0)
    assert f"epsilon of the whole search {result['epsilon']:.3f}" in said
    assert set(result["trials"]) == {"mean", "eta", "gamma"}  # of the distribution, not K
    killed, other = (tmp_path / f"search-breast-cancer{n}-0123456789ab.secret" for n in ("", "-2"))
    killed.mkdir()
    other.mkdir()
    with pytest.raises(ArgumentError, match="another search costs its own epsilon on top"):
        searching.search(asked)
    assert not killed.exists()  # and secrets of another experiment's search are left alone
    assert other.exists()


@pytest.mark.extras
def test_a_released_model_is_the_one_that_was_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TruncatedNegativeBinomial, "sample", lambda self, rng=None: 4)
    monkeypatch.setattr(searching, "_PRIVATE", Known(0))
    searching.search(options(out=tmp_path))
    released = json.loads((tmp_path / "search-breast-cancer.json").read_text())["released"]
    data = with_validation(breast_cancer.load())
    linear = torch.nn.Linear(30, 1)
    linear.load_state_dict(torch.load(tmp_path / "search-breast-cancer.pt"))
    assert data.validation is not None
    found = (linear(data.validation.x[0])[:, 0] > 0) == data.validation.y.bool()
    assert released["score"] == int(found.sum())
    right = (linear(data.test.x[0])[:, 0] > 0) == data.test.y.bool()
    assert released["test"]["accuracy"] == pytest.approx(right.double().mean().item())


class Known(random.Random):
    """Scores without noise."""

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return mu


def test_validation_rows_are_no_training_rows() -> None:
    data = breast_cancer.load()
    made = with_validation(data)
    assert made.validation is not None
    assert len(made.train) + len(made.validation) == len(data.train)
    everybody = {tuple(row.tolist()) for row in data.train.x[0]}
    apart = [{tuple(row.tolist()) for row in part.x[0]} for part in (made.train, made.validation)]
    assert not apart[0] & apart[1]
    assert apart[0] | apart[1] == everybody
    assert with_validation(made) is made
