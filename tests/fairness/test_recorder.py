"""What a recorder writes, keeps over an interruption, and hands to TensorBoard."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from fastclip import clipping
from fastclip.errors import ArgumentError
from fastclip.fairness import FairnessRecorder
from fastclip.fairness.recorder import COLUMNS
from tests.fairness.by_hand import K
from tests.networks import mlp, rows
from tests.oracle import make_private, sample_loss

ATTRIBUTES = {"group": ("a", "b", "c"), "a/b c": ("x", "y")}


def recorder() -> FairnessRecorder:
    return FairnessRecorder(ATTRIBUTES, ("no", "yes"), "group")


def groups(n: int) -> dict[str, torch.Tensor]:
    return {"group": torch.arange(n) % 3, "a/b c": torch.arange(n) // 3 % 2}


def evaluate(seen: FairnessRecorder, step: Any, epsilon: Any = None) -> None:
    generator = torch.Generator().manual_seed(int(step))
    labels = torch.arange(9) % 2
    seen.evaluate(
        step, losses=torch.rand(9, generator=generator), predictions=labels.roll(int(step)),
        labels=labels, groups=groups(9), epsilon=epsilon,
    )  # fmt: skip


def train(interrupted: bool, dtype: Any = float) -> pd.DataFrame:
    """Three periods of two steps; interrupted in the middle of each by another recorder's life."""
    torch.manual_seed(0)
    engine, private, optimizer, _ = make_private(mlp(), clipping=clipping.dpsgd_f(K))
    seen = recorder()
    for step in range(6):
        optimizer.zero_grad()
        own = groups(7)
        engine.set_groups(own["group"])
        sample_loss(private(rows(7))).mean().backward()
        seen.observe(optimizer, own)
        optimizer.step()
        if interrupted and step % 2 == 0:
            file = io.BytesIO()
            torch.save(seen.state_dict(), file)
            file.seek(0)
            seen = recorder()
            seen.load_state_dict(torch.load(file, weights_only=True))
        if step % 2:
            seen.close_period(step)
            seen.thresholds(step, optimizer)
            evaluate(seen, np.int64(step), np.float64(0.5 * step))
    return seen.frame()


def test_a_state_goes_through_a_file() -> None:
    """Steps and epsilons that are numpy's, too, which torch.load(weights_only=True) refuses."""
    whole = train(False)
    pd.testing.assert_frame_equal(train(True), whole)
    assert tuple(whole.columns) == COLUMNS
    assert set(whole["part"]) == {"training", "test"}
    assert len(whole) > 3 * 30


def test_a_state_is_a_copy() -> None:
    """What is observed later neither enters a state that was taken nor one that was loaded."""
    _, private, optimizer, _ = make_private(mlp())
    seen = recorder()

    def observe() -> None:
        optimizer.zero_grad()
        sample_loss(private(rows(6))).mean().backward()
        seen.observe(optimizer, groups(6))

    observe()
    state = seen.state_dict()
    for again in range(2):
        observe()
        assert state["observed"]["group"][0].tolist() == [2, 2, 2]
        seen.close_period(again)
        assert not state["rows"]
        seen.load_state_dict(state)
    seen.close_period(2)
    frame = seen.frame()
    rows_of_a = frame[(frame["group"] == "a") & (frame["measure"] == "rows")]
    assert rows_of_a["value"].tolist() == [2]


def test_the_state_of_others_is_refused() -> None:
    other = FairnessRecorder({"group": ("a", "b")}, ("no", "yes"))
    _, private, optimizer, _ = make_private(mlp())
    sample_loss(private(rows(4))).mean().backward()
    other.observe(optimizer, {"group": torch.zeros(4, dtype=torch.int64)})
    seen = recorder()
    evaluate(seen, 1)
    before = seen.frame()
    with pytest.raises(ArgumentError, match="load_state_dict expects sums of this recorder's"):
        seen.load_state_dict(other.state_dict())
    pd.testing.assert_frame_equal(seen.frame(), before)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (clipping.dp_sgd(), {("all", "all"): 0.5}),
        (clipping.dpsgd_f(K), None),
        (clipping.naive_reweighting(K), {("all", "all"): 0.5}),
        (clipping.sad_dpsgd(9), {("all", "all"): 0.5}),
    ],
)
def test_thresholds(strategy: Any, told: dict[tuple[str, str], float] | None) -> None:
    engine, private, optimizer, _ = make_private(
        mlp(), clipping=strategy, max_grad_norm=0.5, noise_multiplier=0.7
    )
    engine.set_groups(groups(6)["group"])
    sample_loss(private(rows(6))).mean().backward()
    optimizer.step()
    seen = recorder()
    seen.thresholds(4, optimizer)
    frame = seen.frame()
    assert frame["private"].all()
    of = frame[frame["measure"] == "threshold"]
    keys = of[["attribute", "group"]].itertuples(index=False, name=None)
    found = dict(zip(keys, of["value"], strict=True))
    if told is None:
        told = dict(
            zip((("group", k) for k in "abc"), optimizer.threshold.tolist(), strict=True)
        )  # fmt: skip
    assert found == told
    others = frame.set_index("measure")["value"]
    assert others["sensitivity"] == float(optimizer.sensitivity)
    assert others["noise_multiplier"] == optimizer.noise_multiplier


def test_weights_of_groups_are_written() -> None:
    engine, private, optimizer, _ = make_private(mlp(), clipping=clipping.naive_reweighting(K))
    engine.set_groups(groups(6)["group"])
    sample_loss(private(rows(6))).mean().backward()
    optimizer.step()
    seen = recorder()
    seen.thresholds(1, optimizer)
    frame = seen.frame()
    of = frame[frame["measure"] == "weight"]
    assert dict(zip(of["group"], of["value"], strict=True)) == dict(
        zip("abc", optimizer.group_weights.tolist(), strict=True)
    )


def test_thresholds_that_are_not_paid_for_are_refused() -> None:
    engine, private, optimizer, _ = make_private(
        mlp(), clipping=clipping.dpsgd_f(K), noise_multiplier=1.0
    )
    seen = recorder()
    engine.set_groups(groups(6)["group"])
    sample_loss(private(rows(6))).mean().backward()
    with pytest.raises(ArgumentError, match=r"which optimizer.step\(\) pays for"):
        seen.thresholds(1, optimizer)
    optimizer.step()
    seen.thresholds(1, optimizer)
    assert set(seen.frame()["step"]) == {1}


@pytest.mark.parametrize("strategy", [clipping.adaptive(), clipping.dp_sgd()])
def test_thresholds_of_counts_without_noise_are_not_private(strategy: Any) -> None:
    _, private, optimizer, _ = make_private(mlp(), clipping=strategy, noise_multiplier=0.0)
    sample_loss(private(rows(6))).mean().backward()
    optimizer.step()
    seen = recorder()
    seen.thresholds(1, optimizer)
    counted = strategy.threshold.count_noise_ratio is not None
    assert seen.frame()["private"].all() == (not counted)


def test_tensorboard(tmp_path: Path) -> None:
    _, private, optimizer, _ = make_private(mlp())
    seen = recorder()
    for step in (3, 5):
        optimizer.zero_grad()
        sample_loss(private(rows(2))).mean().backward()  # of group c is nobody
        seen.observe(optimizer, groups(2))
        optimizer.step()
        seen.close_period(step)
        seen.thresholds(step, optimizer)
        evaluate(seen, step)
    with SummaryWriter(tmp_path) as writer:
        seen.to_tensorboard(writer)
    read = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    read.Reload()
    found = {
        (tag, event.step): event.value
        for tag in read.Tags()["scalars"] for event in read.Scalars(tag)
    }  # fmt: skip
    frame = seen.frame()
    assert len(found) == len(frame)
    for row in frame.itertuples():
        words = (row.part, row.attribute, row.group, row.measure)
        tag = "/".join(("private" if row.private else "not private", *words))
        assert found[tag, row.step] == pytest.approx(row.value, rel=1e-6, nan_ok=True), tag
    assert math.isnan(found["not private/training/group/c/norm_before", 5])
    assert found["private/training/all/all/threshold", 3] == 1.0
