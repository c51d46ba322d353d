"""The page of a run: what it shows, and what it says may be published."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fastclip import clipping
from fastclip.accounting import TunedEpsilon
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.fairness import FairnessRecorder, fairness_report
from fastclip.fairness.report import NOTES
from tests.fairness.reading import CHROMIUM, Reader, check_page, widths
from tests.oracle import make_private

SEX = ("female", "male", "unknown")


@cache
def run(
    strategy: str = "soft_ada_clip", observe: bool = True, evaluate: bool = True,
    sex: tuple[str, ...] = SEX, passes: int = 3, part: str = "test", sigma: float = 1.0,
) -> FairnessRecorder:  # fmt: skip
    """Rows of which every fourth is male, and harder; nobody is of unknown sex."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    group = (torch.arange(60) % 4 == 3).long() if len(sex) > 1 else torch.zeros(60).long()
    y = ((x[:, 0] + group * x[:, 1]) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    chosen: Any = "per_layer" if strategy == "per_layer" else getattr(clipping, strategy)
    groups = {"num_groups": len(sex)} if strategy == "dpsgd_f" else {}
    engine, private, optimizer, loader = make_private(
        model, clipping=chosen if isinstance(chosen, str) else chosen(**groups),
        max_grad_norm=[0.3] * 4 if strategy == "per_layer" else 0.6, noise_multiplier=sigma,
        dataset=TensorDataset(x, y, group), batch_size=12, poisson_sampling=True,
        generator=generator, noise_generator=torch.Generator().manual_seed(1), lr=0.5,
    )  # fmt: skip
    seen, step = FairnessRecorder({"sex": sex}, ("no", "yes"), "sex"), 0
    for _ in range(passes):
        for rows, labels, own in loader:
            optimizer.zero_grad()
            engine.set_groups(own)
            nn.functional.cross_entropy(private(rows), labels).backward()
            if observe:
                seen.observe(optimizer, {"sex": own})
            optimizer.step()
            step += 1
        seen.close_period(step)
        seen.thresholds(step, optimizer)
        if evaluate:
            with torch.no_grad():
                out = private(x)
            seen.evaluate(
                step, losses=nn.functional.cross_entropy(out, y, reduction="none"),
                predictions=out.argmax(1), labels=y, groups={"sex": group}, part=part,
                epsilon=engine.get_epsilon(1e-3),
            )  # fmt: skip
    return seen


def written(folder: Path, seen: Any, **options: Any) -> tuple[Reader, dict[str, str]]:
    """The page, and the text of its sections by their headings."""
    path, *rest = fairness_report(seen, folder / "page.html", **options)
    assert all(file.exists() for file in (path, *rest))
    page = path.read_text()
    sections = re.split(r"<h2[^>]*>", page)[1:]
    return check_page(page), {
        part.split("</h2>")[0]: Reader(
            part.split("</h2>")[1].replace("</main></body></html>", "")
        ).text
        for part in sections
    }


KINDS = {
    "Groups at the end": "held out",
    "Groups over the steps": "held out",
    "Cost of privacy by group": "held out",
    "Thresholds": "private",
    "Gradients of each group": "not private",
}


def check_kinds(sections: dict[str, str], kinds: dict[str, str]) -> None:
    """Every section but the first says one thing about publishing, the right one."""
    assert list(sections) == ["Privacy cost of this page", *kinds]
    for heading, kind in kinds.items():
        said = [name for name, words in NOTES.items() if words + "." in sections[heading]]
        assert said == [kind], heading


def test_thresholds_of_counts_without_noise(tmp_path: Path) -> None:
    """They are of raw rows, and said to be."""
    _, sections = written(tmp_path, run("dpsgd_f", sigma=0.0), delta=1e-3)
    check_kinds(sections, {
        name: "not private" if name == "Thresholds" else kind
        for name, kind in KINDS.items() if name != "Cost of privacy by group"
    })  # fmt: skip


@pytest.mark.extras
def test_a_run_beside_one_without_privacy(tmp_path: Path) -> None:
    found, sections = written(
        tmp_path, run(), delta=1e-3, baseline=run("dp_sgd"), title="Mine & <yours>"
    )
    check_kinds(sections, KINDS)
    frame = run().frame()
    costs = sections["Privacy cost of this page"]
    assert f"by this run: {frame['epsilon'].max():.4g} at delta 0.001." in costs
    assert "It does not cover this page" in costs
    assert NOTES["caution"] in costs
    assert found.of("title")
    assert "Mine & <yours>" in found.text
    last = frame[(frame["step"] == frame["step"].max()) & (frame["part"] == "test")]
    for attribute in ("sex", "class"):
        of = last[(last["attribute"] == attribute) & (last["measure"] == "accuracy")]
        for row in of.itertuples():
            value = "-" if math.isnan(row.value) else f"{row.value:.4g}"
            assert re.search(rf"{row.group}\d+{value}", sections["Groups at the end"]), row.group
    values = last[(last["attribute"] == "sex") & (last["measure"] == "accuracy")]["value"]
    assert f"accuracy{values.max() - values.min():.4g}" in sections["Groups at the end"]
    assert len(found.of("img")) == 2 + 1 + 2
    assert "false_positive_rate" not in sections["Groups at the end"].split("By class")[1]


def test_a_table_is_as_good_as_its_recorder(tmp_path: Path) -> None:
    _, ours = written(tmp_path / "a", run())
    _, theirs = written(tmp_path / "b", run().frame())
    assert ours == theirs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "by this run: {epsilon:.4g}."),
        ({"epsilon": 2.5, "delta": 1e-6}, "by this run: 2.5 at delta 1e-06."),
    ],
)
def test_what_was_spent(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    _, sections = written(tmp_path, run(), **options)
    epsilon = run().frame()["epsilon"].max()
    assert expected.format(epsilon=epsilon) in sections["Privacy cost of this page"]


def test_a_run_that_was_searched_for(tmp_path: Path) -> None:
    _, sections = written(tmp_path, run(), delta=1e-5, searched=TunedEpsilon(4.5, 8.0, 1.5))
    costs = sections["Privacy cost of this page"]
    assert "the model has epsilon 4.5 at delta 1e-05 in all. One run alone has 1.5" in costs
    assert NOTES["private"] in costs
    assert NOTES["caution"] not in costs


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"observe": False}, ["Groups at the end", "Groups over the steps", "Thresholds"]),
        ({"evaluate": False}, ["Thresholds", "Gradients of each group"]),
        ({"passes": 1}, ["Groups at the end", "Thresholds", "Gradients of each group"]),
        ({"strategy": "per_layer"}, ["Groups at the end", "Groups over the steps",
                                     "Gradients of each group"]),
        ({"strategy": "dpsgd_f"}, ["Groups at the end", "Groups over the steps", "Thresholds",
                                   "Gradients of each group"]),
        ({"sex": ("everyone",)}, ["Groups at the end", "Groups over the steps", "Thresholds",
                                  "Gradients of each group"]),
    ],
)  # fmt: skip
def test_what_was_not_recorded_is_left_out(
    options: dict[str, Any], kinds: list[str], tmp_path: Path
) -> None:
    found, sections = written(tmp_path, run(**options))
    check_kinds(sections, {heading: KINDS[heading] for heading in kinds})
    costs = sections["Privacy cost of this page"]
    if "evaluate" in options:
        assert "by this run: not recorded." in costs
        assert "Nothing was evaluated under the name 'test'. Evaluated parts: none." in costs
    pictures = {"Groups over the steps": 2, "Thresholds": 1, "Gradients of each group": 2}
    expected = sum(pictures.get(heading, 0) for heading in kinds)
    assert len(found.of("img")) == expected - (options.get("strategy") == "per_layer")


@pytest.mark.extras
def test_rows_that_trained_are_not_held_out(tmp_path: Path) -> None:
    seen = run(part="train")
    _, sections = written(tmp_path, seen, part="train", baseline=seen)
    trained = ("Groups at the end", "Groups over the steps", "Cost of privacy by group")
    check_kinds(sections, KINDS | dict.fromkeys(trained, "not private"))
    _, sections = written(tmp_path, seen)
    assert "under the name 'test'. Evaluated parts: train." in sections["Privacy cost of this page"]


def test_what_was_measured_twice_is_told_once(tmp_path: Path) -> None:
    """The last time, as where a run was interrupted after an evaluation."""
    seen = FairnessRecorder({"sex": SEX}, ("no", "yes"))
    for predictions in (torch.zeros(4).long(), torch.tensor([0, 1, 0, 0])):
        seen.evaluate(
            3, losses=torch.ones(4), predictions=predictions, labels=torch.tensor([0, 1, 0, 1]),
            groups={"sex": torch.tensor([0, 0, 1, 1])},
        )  # fmt: skip
    _, sections = written(tmp_path, seen)
    assert "accuracy0.75" in sections["Groups at the end"]
    assert "female21" in sections["Groups at the end"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "_a|$x^"])
def test_names_of_groups_are_text(name: str, tmp_path: Path) -> None:
    found, sections = written(tmp_path, run(sex=(name, "b", "c")))
    assert name in sections["Groups at the end"]
    assert not found.of("script")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"baseline": lambda: run(sex=("a", "b", "c"))}, ArgumentError, "the same groups twice"),
        ({"baseline": lambda: run(evaluate=False)}, ArgumentError, "expects an evaluation of 'test'"),
        ({"baseline": 3}, ArgumentTypeError, "baseline expects a FairnessRecorder .*got int"),
        ({"run": "run"}, ArgumentTypeError, "run expects a FairnessRecorder .*got str"),
        ({"run": lambda: run().frame().drop(columns="part")}, ArgumentError, r"none of \['part'\]"),
        ({"path": "page.md"}, ArgumentError, "the name of an HTML file"),
    ],
)  # fmt: skip
def test_reports_that_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    made = {name: value() if callable(value) else value for name, value in options.items()}
    given = {"run": run(), **made, "path": tmp_path / options.get("path", "page.html")}
    with pytest.raises(error, match=message):
        fairness_report(**given)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium to lay out the page")
def test_a_telephone_shows_it(tmp_path: Path) -> None:
    path, *_ = fairness_report(run(), tmp_path / "page.html", baseline=run("dp_sgd"))
    whole, window, box = widths(path, 390)
    assert whole <= window == 390
    assert box > window  # the rates of a group, in their box
