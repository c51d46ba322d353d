"""`python -m fastclip.accounting --attack --picture`: the function's numbers, in words and drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from fastclip.accounting import Attack, strongest_attack
from fastclip.accounting.__main__ import main
from fastclip.accounting.attack import RATES, in_words

RUN = ["--samples", "5000", "--batch-size", "100", "--epochs", "1.2", "--noise-multiplier", "2"]
ENTRIES = [(2.0, 0.02, 60)]
DELTA = 1 / 50_000


@pytest.fixture(scope="module")
def found() -> Attack:
    return strongest_attack(ENTRIES, DELTA, [0.02, 0.2])


def test_json_has_the_function_s_numbers(capsys: pytest.CaptureFixture, found: Attack) -> None:
    assert main([*RUN, "--attack", "0.02", "0.2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["attack"]
    assert printed == found.as_json()
    assert printed["mu"] == found.mu
    assert printed["positive_rates"][0] == {"false": 0.02, "true": found.true_positive_rates[0.02]}
    assert main([*RUN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attack"] is None


def test_words(capsys: pytest.CaptureFixture, found: Attack) -> None:
    assert main([*RUN, "--attack", "0.02", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert in_words(found) in printed
    power = found.true_positive_rates[0.02]
    assert f"with 2 % false alarms, at most {100 * power:.3g} % of the true samples" in printed
    assert f"mu = {found.mu:.4f}" in printed
    assert main(RUN) == 0
    assert "attacker" not in capsys.readouterr().out


def test_the_usual_rates(capsys: pytest.CaptureFixture) -> None:
    assert main([*RUN, "--attack", "--accountant", "pld", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [pair["false"] for pair in printed["attack"]["positive_rates"]] == list(RATES)
    assert printed["epsilon"] == printed["stages"][-1]["epsilon"]["pld"]


def test_a_picture(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """It shows the bound: its color is above the guess everywhere."""
    path = tmp_path / "attack.png"
    assert main([*RUN, "--picture", str(path)]) == 0
    assert "attacker" in capsys.readouterr().out
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[0] > 500
    blue = np.abs(pixels - np.array([31, 119, 180]) / 255).sum(-1) < 0.1
    orange = np.abs(pixels - np.array([255, 127, 14]) / 255).sum(-1) < 0.1
    assert blue.sum() > 500
    assert orange.sum() > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "0"], "false_positive_rates expects"),
        (["--attack", "0.1", "1.5"], "false_positive_rates expects"),
        (["--picture", "no-such-folder/a.png"], "--picture expects a file that can be written"),
        (["--picture", "a.nothing"], "--picture expects a file that can be written"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main([*RUN, *arguments])
    printed = capsys.readouterr()
    assert message in printed.err.splitlines()[-1]
    assert printed.out == ""


def test_without_matplotlib(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit):
        main([*RUN, "--picture", str(tmp_path / "a.png")])
    assert "pip install matplotlib" in capsys.readouterr().err
