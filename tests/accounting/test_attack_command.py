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
    assert " of the samples at 2% false alarms, " in printed
    assert f"mu = {found.mu:.4f}" in printed
    assert main(RUN) == 0
    assert "attacker" not in capsys.readouterr().out


def test_the_usual_rates(capsys: pytest.CaptureFixture) -> None:
    assert main([*RUN, "--attack", "--accountant", "pld", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [pair["false"] for pair in printed["attack"]["positive_rates"]] == list(RATES)
    assert printed["epsilon"] == printed["stages"][-1]["epsilon"]["pld"]


def test_priors(capsys: pytest.CaptureFixture) -> None:
    assert main([*RUN, "--priors", "0.2", "0.05", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["attack"]["reconstruction"]
    known = strongest_attack(ENTRIES, DELTA, priors=[0.2, 0.05]).reconstruction
    assert printed == [{"prior": prior, "success": known[prior]} for prior in (0.2, 0.05)]


def test_a_picture(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """It shows the curve and its points, and SVG holds the rates as text of a page's width."""
    path = tmp_path / "attack.png"
    assert main([*RUN, "--picture", str(path)]) == 0
    assert "attacker" in capsys.readouterr().out
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[0] > 500
    blue = np.abs(pixels - np.array([0x00, 0x72, 0xB2]) / 255).sum(-1) < 0.1
    orange = np.abs(pixels - np.array([0xD5, 0x5E, 0x00]) / 255).sum(-1) < 0.1
    assert blue.sum() > 500
    assert orange.sum() > 100
    assert main([*RUN, "--picture", str(tmp_path / "attack.svg")]) == 0
    assert "<svg" in (tmp_path / "attack.svg").read_text()


@pytest.mark.parametrize("sigma", [0.3, 2.0])
def test_the_picture_has_the_curve_and_chance(sigma: float) -> None:
    found = strongest_attack([(sigma, 0.02, 60)], DELTA)
    (axes,) = found.plot("a run").axes
    curve, chance, *points = axes.lines
    assert axes.get_xscale() == "log"
    assert axes.get_yscale() == "linear"
    rates = np.asarray(curve.get_xdata())
    np.testing.assert_array_equal(curve.get_ydata(), found.trade_off(rates))
    np.testing.assert_array_equal(chance.get_ydata(), rates)
    drawn = [(float(point.get_xdata()[0]), float(point.get_ydata()[0])) for point in points]
    assert drawn == list(found.true_positive_rates.items())
    assert axes.get_title(loc="left") == "a run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "0"], "false_positive_rates expects"),
        (["--attack", "0.1", "1.5"], "false_positive_rates expects"),
        (["--priors", "1"], "priors expects"),
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
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main([*RUN, "--picture", str(tmp_path / "a.png")])
    assert "pip install matplotlib" in capsys.readouterr().err
