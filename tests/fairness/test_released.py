"""Evaluations that may be published: noisy counts in the recorder's table and on the page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip import FastPrivacyEngine
from fastclip.counts import PrivateData, PublicData
from fastclip.fairness import FairnessRecorder, fairness_report
from tests.refusal import refused

VALIDATION = PrivateData("validation", overlap=())
ATTRIBUTES = {"sex": ("female", "male"), "age": ("young", "old", "very old")}
N = 60


def recorder(classes: tuple[str, ...] = ("no", "yes")) -> FairnessRecorder:
    return FairnessRecorder(ATTRIBUTES, classes)


def given(classes: int = 2) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    of = {n: torch.randint(len(g), (N,), generator=draw) for n, g in ATTRIBUTES.items()}
    labels, predictions = torch.randint(classes, (2, N), generator=draw)
    return {"labels": labels, "predictions": predictions, "groups": of}


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("public", [False, True])
def test_with_hardly_any_noise_it_is_the_evaluation(classes: int, public: bool) -> None:
    seen = recorder(tuple(map(str, range(classes))))
    data: dict[str, Any] = {"data": VALIDATION, "noise_multiplier": 1e-7}
    if public:
        data = {"data": PublicData("demo"), "noise_multiplier": 0}
    seen.release(3, FastPrivacyEngine(), unit="row", **data, **given(classes))
    seen.evaluate(3, losses=torch.zeros(N), **given(classes))
    frame = seen.frame()
    assert frame[frame["part"] == "released"]["private"].all()
    assert not frame[frame["part"] == "test"]["private"].any()
    columns = ["attribute", "group", "measure"]
    noisy, exact = (  # sorted, to be asked for a group
        frame[frame["part"] == part].set_index(columns)["value"].sort_index()
        for part in ("released", "test")
    )
    shown = ["rows", "accuracy", "selection_rate", "true_positive_rate", "false_positive_rate"]
    wanted = {
        place for place in exact.index
        if place[0] != "class" and place[2] in shown[: 5 if classes == 2 else 2]
    }  # fmt: skip
    assert {place for place in noisy.index if "accuracy_" not in place[2]} == wanted
    for place in wanted:
        assert noisy[place] == pytest.approx(exact[place], abs=1e-5)
    for group in ATTRIBUTES["age"]:
        of = noisy["age", group]
        assert of["accuracy_low"] < of["accuracy"] < of["accuracy_high"]


def test_all_attributes_and_measures_are_paid_for_together() -> None:
    engine, seen = FastPrivacyEngine(), recorder()
    answer = seen.release(0, engine, data=VALIDATION, noise_multiplier=4.0, unit="row", **given())
    assert answer.query.sensitivity == pytest.approx(math.sqrt(2 * 5))
    assert answer.std == pytest.approx(4 * math.sqrt(10))
    assert engine.accountant.lines["validation"].history == [(4.0, 1.0, 1)]


def test_patients() -> None:
    """Of 20 samples each: with hardly any noise three patients are three."""
    seen, own = recorder(), given()
    own["groups"] = {name: torch.arange(N) // 20 % 2 for name in ATTRIBUTES}
    answer = seen.release(
        0, FastPrivacyEngine(), data=VALIDATION, noise_multiplier=1e-6, unit="unit",
        unit_ids=torch.arange(N) // 20, **own,
    )  # fmt: skip
    assert answer.counts[:, 1].tolist() == pytest.approx([2, 1, 2, 1, 0], abs=1e-3)
    right = (own["labels"] == own["predictions"]).double().view(3, 20).mean(1)
    assert answer.count("sex: female", "correct") == pytest.approx(
        float(right[0] + right[2]), abs=1e-3
    )


def test_a_part_is_noisy_or_not() -> None:
    seen, engine = recorder(), FastPrivacyEngine()
    options: dict[str, Any] = {
        "data": VALIDATION,
        "noise_multiplier": 4.0,
        "unit": "row",
        **given(),
    }
    seen.evaluate(0, losses=torch.zeros(N), part="validation", **given())
    with refused("another name"):
        seen.release(0, engine, part="validation", **options)
    with refused("another name"):
        seen.release(0, engine, part="training", **options)
    seen.release(0, engine, **options)
    with refused("another name"):
        seen.evaluate(0, losses=torch.zeros(N), part="released", **given())
    with refused("numbers from 0 to 1"):
        seen.release(0, engine, **{**options, "labels": torch.full((N,), 2)})
    with refused("has no attribute"):
        FairnessRecorder({}, ("no", "yes")).release(0, engine, **options)
    assert engine.accountant.lines["validation"].history == [(4.0, 1.0, 1)]


def test_a_published_page_holds_nothing_else(tmp_path: Path) -> None:
    seen = recorder()
    seen.evaluate(1, losses=torch.zeros(N), **given())
    seen._note(1, "training", "sex", "male", "norm_before", 0.123456)
    fairness_report(seen, tmp_path / "page.html", publish=True)
    assert "Evaluated parts: none" in (tmp_path / "page.md").read_text()
    seen.release(
        1, FastPrivacyEngine(), data=VALIDATION, noise_multiplier=1.0, unit="row", **given()
    )
    baseline = recorder()
    baseline.evaluate(1, losses=torch.zeros(N), part="released", **given())
    with refused("baseline expects an evaluation"):
        fairness_report(
            seen, tmp_path / "page.html", part="released", publish=True, baseline=baseline
        )
    fairness_report(seen, tmp_path / "page.html", part="released", publish=True)
    text = (tmp_path / "page.md").read_text()
    assert "> **Not private" not in text
    assert "0.1235" not in text
    assert "Evaluated parts" not in text


def test_the_page_says_that_it_may_be_published(tmp_path: Path) -> None:
    seen, engine = recorder(), FastPrivacyEngine()
    for step in (1, 2):
        seen.release(step, engine, data=VALIDATION, noise_multiplier=9.0, unit="row", **given())
    fairness_report(seen, tmp_path / "page.html", part="released")
    text = (tmp_path / "page.md").read_text()
    assert "figures of 'released' follow from noisy counts" in text.lower().replace("\n", " ")
    assert "depend on samples of" not in text
    assert "accuracy_low" in text.replace("\\", "")
