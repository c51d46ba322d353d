"""`fastclip.plan`: sigma of every choice, the marked one, its words, code, JSON and picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastclip.accounting import epsilon, find_noise_multiplier
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.plan import Plan, plan
from fastclip.plan.__main__ import main
from fastclip.plan.choices import SAMPLERS
from fastclip.plan.picture import COLORS

BUDGET = {"epsilon": 2.0, "delta": 1e-5}


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(3000, **BUDGET, epochs=4, max_physical=100, min_steps=40)


def test_every_sigma_is_that_of_the_calibration(found: Plan) -> None:
    for choice in found.choices:
        ((_, rate, count),) = choice.history()
        real = choice.steps if choice.sampler == "allocation" else count
        assert choice.sigma == find_noise_multiplier(
            target_epsilon=2.0, target_delta=1e-5, sample_rate=rate, steps=real
        )
        assert 0.98 * 2.0 <= epsilon(choice.history(), 1e-5) <= 2.0


def test_batch_sizes_and_steps(found: Plan) -> None:
    sizes = sorted({choice.batch_size for choice in found.choices})
    assert sizes == [64, 130, 250, 500, 1000]
    for choice in found.choices:
        t = round(3000 / choice.batch_size)  # the loader's own batches have B samples exactly
        assert choice.steps_per_epoch == (
            -(-3000 // choice.batch_size) if choice.sampler == "loader" else t
        )
        assert choice.steps == 4 * choice.steps_per_epoch
        assert choice.epochs == choice.passes == 4
    assert [c.sampler for c in found.choices] == list(SAMPLERS) * len(sizes)


def test_the_marked_choice(found: Plan) -> None:
    """The least noise of those with enough steps; without enough steps anywhere, of the most steps."""
    enough = [choice for choice in found.choices if choice.steps >= 40]
    assert found.best.noise == min(choice.noise for choice in enough)
    assert (found.best.sampler, found.best.steps) == ("allocation", 48)
    few = plan(3000, **BUDGET, epochs=4, sampling="poisson", min_steps=1000)
    assert few.best.steps == max(choice.steps for choice in few.choices) == 188
    assert "No choice has 1000 steps" in str(few)
    least = plan(3000, **BUDGET, epochs=4, sampling="poisson", min_steps=1)
    assert least.best.noise == min(choice.noise for choice in least.choices)


def test_amplification(found: Plan) -> None:
    by_size: dict[int, dict[str, float]] = {}
    for choice in found.choices:
        by_size.setdefault(choice.batch_size, {})[choice.sampler] = choice.sigma
    for sigmas in by_size.values():
        assert max(sigmas["poisson"], sigmas["allocation"]) < sigmas["loader"]
    assert len({sigmas["loader"] for sigmas in by_size.values()}) == 1


def test_more_helps() -> None:
    """More samples, a larger epsilon or fewer epochs mean less noise of a step at one batch size."""

    def noise(samples: int, target: float, epochs: float) -> float:
        only = {"batch_sizes": [100], "sampling": ["poisson"]}
        return plan(samples, target, 1e-5, epochs=epochs, **only).best.noise

    first = noise(2000, 2.0, 4)
    assert noise(8000, 2.0, 4) < first
    assert noise(2000, 4.0, 4) < first
    assert noise(2000, 2.0, 2) < first


def test_compute(found: Plan) -> None:
    """Two passes and a half: a sampler that is accounted by the pass pays for three."""
    limited = plan(3000, **BUDGET, gpu_hours=0.5, samples_per_second=25 / 6, batch_sizes=[300, 75])
    assert limited.compute == pytest.approx(7500)
    for choice in limited.choices:
        assert choice.steps * choice.batch_size == 7500
        ((_, _, count),) = choice.history()
        assert count == (choice.steps if choice.sampler == "poisson" else 3)
    more = plan(3000, **BUDGET, gpu_hours=1, samples_per_second=25 / 6, batch_sizes=[300, 75])
    for few, many in zip(limited.choices, more.choices, strict=True):
        assert few.noise < many.noise
        assert few.noise_of_mean > many.noise_of_mean


def test_units() -> None:
    """Compute counts samples, of which a unit has several; N, B and epsilon count units."""
    units = plan(
        500, **BUDGET, gpu_hours=1, samples_per_second=5, unit_size=6, max_physical=30,
        batch_sizes=[50],
    )  # fmt: skip
    assert {choice.sampler for choice in units.choices} == {"poisson", "allocation"}
    assert {choice.steps for choice in units.choices} == {60}
    assert units.best.physical_batches == pytest.approx(50 / 5 + 0.5, rel=0.02)
    assert "Each unit has up to 6 samples" in str(units)
    assert "max_samples_per_unit=6" in units.code()


def test_physical_batches(found: Plan) -> None:
    for choice in found.choices:
        exact = choice.batch_size / 100
        assert exact <= choice.physical_batches <= exact + 1
        if choice.sampler == "loader":
            assert choice.physical_batches == -(-choice.batch_size // 100)
    assert plan(500, **BUDGET, epochs=1, sampling="loader").best.physical_batches is None


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"epochs": None}, "either epochs, or gpu_hours"),
        ({"gpu_hours": 1.0, "samples_per_second": 3.0}, "either epochs, or gpu_hours"),
        ({"epochs": None, "gpu_hours": 1.0}, "either epochs, or gpu_hours"),
        ({"epochs": 0}, "epochs expects"),
        ({"samples": 3}, "samples expects"),
        ({"samples": 3.5}, "samples expects"),
        ({"epsilon": 0}, "epsilon expects"),
        ({"delta": 1}, "delta expects"),
        ({"unit_size": 0}, "unit_size expects"),
        ({"min_steps": 0}, "min_steps expects"),
        ({"max_physical": 0}, "max_physical expects"),
        ({"max_physical": 4, "unit_size": 5}, "at least unit_size=5"),
        ({"sampling": ["uniform"]}, "sampling expects"),
        ({"sampling": []}, "sampling expects"),
        ({"sampling": ["loader"], "unit_size": 2}, "does not support units"),
        ({"batch_sizes": [64, 251]}, "at most half of samples=500"),
        ({"batch_sizes": []}, "batch_sizes expects"),
        ({"batch_sizes": [0]}, "batch_sizes expects"),
        ({"epochs": None, "gpu_hours": 1e-6, "samples_per_second": 1.0}, "less than one batch"),
    ],
)
def test_errors(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=names) as raised:
        plan(**{"samples": 500, **BUDGET, "epochs": 2, **wrong})
    message = str(raised.value).split(" See errors.html")[0]
    assert len(message.split()) <= 40


# The code


CASES = {
    "allocation": {"sampling": "allocation", "epochs": 2},
    "poisson": {"sampling": "poisson", "gpu_hours": 1 / 60, "samples_per_second": 13.7},
    "loader": {"sampling": "loader", "epochs": 2},
    "split": {"sampling": "allocation", "epochs": 2, "max_physical": 20},
    "part of a pass": {"sampling": "allocation", "gpu_hours": 1 / 60, "samples_per_second": 13.7},
    "loader, part of a pass, split": {
        "sampling": "loader", "gpu_hours": 1 / 60, "samples_per_second": 13.7, "max_physical": 20,
    },
    "units": {"sampling": "poisson", "epochs": 2, "unit_size": 2, "max_physical": 30},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_code_runs(name: str) -> None:
    """It finds the plan's noise, takes its steps and keeps the budget."""
    asked = {**CASES[name]}
    size = asked.get("unit_size", 1)
    found = plan(500, **BUDGET, batch_sizes=[47], **asked)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    known: dict[str, Any] = {
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "train_set": TensorDataset(torch.randn(500 * size, 4), torch.randint(2, (500 * size,))),
        "unit_of_sample": torch.arange(500 * size) // size,
    }  # fmt: skip
    exec(found.code(), known)
    assert known["optimizer"].noise_multiplier == found.best.sigma
    assert known["optimizer"].real_steps == found.best.steps
    assert known["optimizer"].expected_batch_size == found.best.batch_size
    assert known["engine"].get_epsilon(1e-5) == pytest.approx(found.spent)
    assert found.spent <= 2.0


# The command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    arguments = ["--samples", "3000", "--epsilon", "2", "--delta", "1e-5", "--epochs", "4"]
    arguments += ["--max-physical", "100", "--min-steps", "40", "--json", str(path)]
    assert main(arguments) == 0
    found = plan(3000, **BUDGET, epochs=4, max_physical=100, min_steps=40)
    assert capsys.readouterr().out == f"{found}\n\nPaste this:\n\n{found.code()}"
    assert json.loads(path.read_text()) == json.loads(json.dumps(found.as_json()))
    assert "steps" in str(found)
    assert max(map(len, str(found).splitlines())) <= 110


def test_json_has_these_names(found: Plan) -> None:
    plain = found.as_json()
    assert list(plain) == [
        "samples", "epsilon", "delta", "unit_size", "epochs", "compute", "max_physical", "min_steps",
        "choices", "best", "code",
    ]  # fmt: skip
    names = [
        "sampler", "batch_size", "steps_per_epoch", "steps", "sigma", "physical_batches", "epochs",
        "noise", "noise_of_mean", "noise_of_sum",
    ]  # fmt: skip
    assert all(list(choice) == names for choice in plain["choices"])
    assert list(plain["best"]) == [*names, "epsilon"]
    best = plain["best"]
    assert best["noise"] == best["sigma"] / best["batch_size"]
    assert best["noise_of_mean"] * best["steps"] == pytest.approx(best["noise_of_sum"])


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--samples", "500", "--epsilon", "2", "--sampling", "loader"]
    for wrong in (
        [], ["--epochs", "2", "--json", str(tmp_path)],
        ["--epochs", "2", "--picture", str(tmp_path / "plan.docx")],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([*run, *wrong])
        assert ended.value.code == 2
        assert "expects" in capsys.readouterr().err
    assert main([*run, "--epochs", "2", "--delta", "0.1"]) == 0
    assert "at least 1 / N" in capsys.readouterr().err


def test_the_picture_is_xml_that_names_the_samplers(tmp_path: Path, found: Plan) -> None:
    path = tmp_path / "plan.svg"
    found.draw(path)
    root = ET.parse(path).getroot()
    assert root.get("width") == "390pt"
    text = "".join(root.itertext())
    assert all(name in text for name in SAMPLERS)
    assert f"B = {found.best.batch_size}" in text
    source = path.read_text()
    assert all(color in source for color in COLORS.values())
    found.draw(tmp_path / "again.svg")
    assert source == (tmp_path / "again.svg").read_text()
