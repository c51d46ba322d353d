"""Measures of an evaluation, by attribute, group and class, beside plain numpy on the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness import FairnessRecorder

SEX = ("female", "male", "unknown")
REGION = ("north", "south")
ATTRIBUTES = {"sex": SEX, "region": REGION}


def names(classes: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(classes))


def case(n: int, classes: int, seed: int = 0, groups: int = 2) -> dict[str, Any]:
    """Rows of which none is of unknown sex."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(below: int) -> torch.Tensor:
        return torch.randint(below, (n,), generator=generator)

    return {
        "losses": torch.rand(n, generator=generator), "predictions": numbers(classes),
        "labels": numbers(classes), "groups": {"sex": numbers(groups), "region": numbers(2)},
    }  # fmt: skip


def measured(given: dict[str, Any], classes: int) -> dict[tuple[str, str, str], float]:
    recorder = FairnessRecorder(ATTRIBUTES, names(classes))
    recorder.evaluate(7, part="validation", epsilon=1.5, **given)
    frame = recorder.frame()
    assert set(frame["step"]) == {7}
    assert set(frame["part"]) == {"validation"}
    assert set(frame["epsilon"]) == {1.5}
    assert not frame["private"].any()
    keys = frame[["attribute", "group", "measure"]].itertuples(index=False, name=None)
    found = dict(zip(keys, frame["value"], strict=True))
    assert len(found) == len(frame)  # nothing is written twice
    return found


def expected(given: dict[str, Any], classes: int) -> dict[tuple[str, str, str], float]:
    """0 / 0 is NaN, as in numpy."""
    losses = given["losses"].double().numpy()
    y, found = given["labels"].numpy(), given["predictions"].numpy()
    everybody = np.zeros(len(y), int)
    attributes = {
        "all": (("all",), everybody), "class": (names(classes), y),
        "sex": (SEX, given["groups"]["sex"].numpy()),
        "region": (REGION, given["groups"]["region"].numpy()),
    }  # fmt: skip
    values = {}
    for attribute, (groups, members) in attributes.items():
        for number, group in enumerate(groups):
            mine = members == number
            some = bool(mine.any())
            of: dict[str, float] = {
                "rows": float(mine.sum()),
                "accuracy": (found == y)[mine].mean() if some else math.nan,
                "loss_sum": losses[mine].sum() if some else math.nan,
                "loss_mean": losses[mine].mean() if some else math.nan,
            }
            if classes == 2:
                shares = {
                    "selection_rate": mine, "true_positive_rate": mine & (y == 1),
                    "false_positive_rate": mine & (y == 0),
                }  # fmt: skip
                for name, among in shares.items():
                    of[name] = (found == 1)[among].mean() if among.any() else math.nan
            values |= {(attribute, group, name): value for name, value in of.items()}
    classed = [values["class", name, "accuracy"] for name in names(classes)]
    known = [value for value in classed if not math.isnan(value)]
    values["all", "all", "macro_accuracy"] = float(np.mean(known)) if known else math.nan
    values["all", "all", "worst_class_accuracy"] = min(known) if known else math.nan
    return values


def check(given: dict[str, Any], classes: int) -> dict[tuple[str, str, str], float]:
    found, truth = measured(given, classes), expected(given, classes)
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        assert found[key] == pytest.approx(value, rel=1e-12, nan_ok=True), key
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("n", [0, 1, 2, 9, 200])
def test_measures_are_those_of_the_rows(n: int, classes: int, seed: int) -> None:
    found = check(case(n, classes, seed), classes)
    assert found["sex", "unknown", "rows"] == 0
    assert math.isnan(found["sex", "unknown", "accuracy"])


@pytest.mark.parametrize("classes", [2, 10])
def test_everybody_in_one_group(classes: int) -> None:
    found = check(case(50, classes, groups=1), classes)
    for measure in ("accuracy", "loss_sum", "loss_mean"):
        assert found["sex", "female", measure] == pytest.approx(found["all", "all", measure])


def test_no_rate_where_nobody_has_the_label() -> None:
    """A share of nobody is unknown: 0 would read as a difference between groups."""
    given = case(40, 2)
    given["labels"] = given["groups"]["sex"]  # no female of class 1, no male of class 0
    found = check(given, 2)
    assert math.isnan(found["sex", "female", "true_positive_rate"])
    assert math.isnan(found["sex", "male", "false_positive_rate"])
    assert math.isnan(found["class", "class 0", "true_positive_rate"])


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_losses_that_are_not_finite_stay_in_their_group(value: float, classes: int) -> None:
    given = case(60, classes)
    row = int((given["groups"]["sex"] == 1).nonzero()[0])
    given["losses"][row] = value
    found = check(given, classes)
    assert math.isfinite(found["sex", "female", "loss_sum"])
    assert not math.isfinite(found["sex", "male", "loss_mean"])
    assert math.isfinite(found["sex", "male", "accuracy"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_losses_of_every_type(dtype: torch.dtype) -> None:
    given = case(30, 2)
    given["losses"] = given["losses"].to(dtype).requires_grad_()
    check({**given, "losses": given["losses"]} | {"losses": given["losses"].detach()}, 2)
    recorder = FairnessRecorder(ATTRIBUTES, names(2))
    recorder.evaluate(0, **given)  # a graph is not needed


def test_an_attribute_that_is_the_classes() -> None:
    """Whose norms are then observed by class; its measures are not written twice."""
    recorder = FairnessRecorder({"class": names(3)}, names(3))
    given = case(20, 3)
    given["groups"] = {"class": given["labels"]}
    recorder.evaluate(1, **given)
    assert not recorder.frame().duplicated(["attribute", "group", "measure"]).any()
    given["groups"] = {"class": (given["labels"] + 1) % 3}
    with pytest.raises(ArgumentError, match="expects the labels as the groups of 'class'"):
        recorder.evaluate(2, **given)
    assert set(recorder.frame()["step"]) == {1}


@pytest.mark.parametrize(
    ("attributes", "classes", "protected", "error", "message"),
    [
        ({"class": ("a", "c")}, ("a", "b"), None, ArgumentError, "measures 'class' itself"),
        ({"all": ("x", "y")}, ("a", "b"), None, ArgumentError, "measures 'all' itself"),
        ({"layer": ("x", "y")}, ("a", "b"), None, ArgumentError, "measures 'layer' itself"),
        ({"sex": ("x", "x")}, ("a", "b"), None, ArgumentError, "different names.*'sex'"),
        ({"sex": ()}, ("a", "b"), None, ArgumentTypeError, "names of the groups of 'sex'"),
        ({"sex": "xy"}, ("a", "b"), None, ArgumentTypeError, "sequence of str, got 'xy'"),
        ({"sex": (0, 1)}, ("a", "b"), None, ArgumentTypeError, "sequence of str"),
        ({"sex": ("x", "y")}, ("a", "a"), None, ArgumentError, "different names of the classes"),
        ({"sex": ("x", "y")}, ("a", "b"), "age", ArgumentError, "protected expects.*'sex'.*'age'"),
    ],
)
def test_names_that_are_refused(
    attributes: Any, classes: Any, protected: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FairnessRecorder(attributes, classes, protected)


LABELS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"losses": torch.rand(2)}, ArgumentError, r"one value of labels per sample, \[2\], got \[3\]"),
        ({"losses": torch.rand(3, 1)}, ArgumentError, r"of losses per sample, \[3\], got \[3, 1\]"),
        ({"losses": LABELS}, ArgumentTypeError, "losses as a tensor of floats, got torch.int64"),
        ({"losses": [0.1] * 3}, ArgumentTypeError, "losses as a tensor of floats, got list"),
        ({"predictions": LABELS[:2]}, ArgumentError, r"of predictions per sample, \[3\], got \[2\]"),
        ({"predictions": LABELS + 1}, ArgumentError, "from 0 to 1 for predictions, got 1 to 2"),
        ({"predictions": LABELS / 2}, ArgumentTypeError, r"predictions as an int64 tensor \[3\]"),
        ({"labels": LABELS - 1}, ArgumentError, "from 0 to 1 for labels, got -1 to 0"),
        ({"labels": LABELS.numpy()}, ArgumentTypeError, "labels as an int64 .*, got ndarray"),
        ({"groups": {}}, ArgumentError, "evaluate expects groups of .*got none of sex, region"),
        ({"groups": {"sex": LABELS + 2, "region": LABELS}}, ArgumentError, "0 to 2 for sex, got 2 to 3"),
        ({"groups": {"sex": LABELS, "region": LABELS[:1]}}, ArgumentError, r"region per sample.*\[1\]"),
        ({"part": "training"}, ArgumentError, "part='training' is reserved"),
    ],
)  # fmt: skip
def test_evaluations_that_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    recorder = FairnessRecorder(ATTRIBUTES, names(2))
    given = {
        "losses": torch.rand(3), "predictions": LABELS, "labels": LABELS,
        "groups": {"sex": LABELS, "region": LABELS},
    }  # fmt: skip
    with pytest.raises(error, match=message):
        recorder.evaluate(1, **{**given, **changes})
    assert recorder.frame().empty


def test_attributes_may_be_named_like_arguments() -> None:
    recorder = FairnessRecorder({"labels": ("x", "y", "z")}, names(2))
    groups = {"labels": torch.tensor([2, 2, 0]), "others": torch.zeros(9)}
    recorder.evaluate(1, losses=torch.rand(3), predictions=LABELS, labels=LABELS, groups=groups)
    frame = recorder.frame()
    rows = frame[(frame["attribute"] == "labels") & (frame["measure"] == "rows")]
    assert dict(zip(rows["group"], rows["value"], strict=True)) == {"x": 1, "y": 0, "z": 2}
