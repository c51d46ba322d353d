"""transformers.Trainer on several ranks: its run is that of one process on the same rows."""

from __future__ import annotations

import pytest
import torch

from fastclip import clipping
from fastclip.accounting import epsilon
from tests.distributed import training, world

trainers = pytest.importorskip("tests.distributed.trainers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.one_in(2)
def test_a_trainer(tmp_path, kind: str) -> None:
    """Weights, losses, thresholds, checkpoints, epsilon; empty draws and unequal parts included."""
    found = world.run(2, "tests.distributed.trainers:trained", tmp_path, str(tmp_path), kind)
    drawn = training.together(found)
    assert any(not rows for rank in found for rows in rank["drawn"])  # empty draws
    assert len({-(-len(rows) // trainers.EACH) for rank in found for rows in rank["drawn"]}) > 2
    expected = trainers.replayed(drawn[: trainers.STEPS], clipping.soft_ada_clip())
    for rank in found:
        for way in ("whole", "cut"):
            torch.testing.assert_close(rank[way]["weights"], expected, rtol=1e-10, atol=1e-12)
            assert rank[way]["spread"] == (kind == "fsdp")
        assert rank["whole"]["history"] == rank["cut"]["history"] == [(0.0, 1 / 6, trainers.STEPS)]
        assert len(rank["evaluated"]) == 5
        assert rank["whole"]["losses"] == found[0]["whole"]["losses"]
        for way in ("noisy", "half"):
            assert torch.equal(rank[way]["weights"], found[0][way]["weights"])
        assert rank["half"]["history"] == [(0.0, 1 / 6, 4)]  # of two runs
        assert rank["cast"] == (kind == "ddp")  # FSDP2 casts parameters itself
        assert rank["epsilon"] == epsilon([(1.0, 1 / 6, trainers.STEPS)], 1e-3, "prv")
    assert not set(found[0]["drawn"][0]) & set(found[1]["drawn"][0])
    dealt = training.together([{"drawn": rank["dealt"]} for rank in found])
    assert len({row for rows in dealt[:6] for row in rows}) == 22  # of 23: a share is 11 rows
    expected = trainers.replayed(dealt[: trainers.STEPS])
    for rank in found:
        torch.testing.assert_close(rank["shuffled"]["weights"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_units_and_placeholders(tmp_path) -> None:
    """Parts that fill up a draw contribute nothing, whosever rows are clipped as one."""
    found = world.run(2, "tests.distributed.trainers:units", tmp_path)
    parts = [[-(-len(rows) // 4) for rows in rank["fsdp"]["drawn"]] for rank in found]
    assert any(mine < theirs for mine, theirs in zip(*parts, strict=True))
    for rank in found:
        assert rank["ddp"]["drawn"] == rank["fsdp"]["drawn"]
        torch.testing.assert_close(
            rank["fsdp"]["weights"], rank["ddp"]["weights"], rtol=1e-10, atol=1e-12
        )


@pytest.mark.slow
def test_a_trainer_trains_and_evaluates_again(tmp_path) -> None:
    """The model is wrapped anew, or is spread already; the second run draws batches of its own."""
    found = world.run(2, "tests.distributed.trainers:again", tmp_path, str(tmp_path))
    drawn = training.together([rank["ddp"] for rank in found])
    assert not any(rows in drawn[:4] for rows in drawn[4:])
    one = found[0]["ddp"]
    for rank in found:
        for kind in ("ddp", "fsdp"):
            assert rank[kind]["history"] == [(0.0, 1 / 6, 8)]
            assert rank[kind]["drawn"] == rank["ddp"]["drawn"]
            torch.testing.assert_close(
                rank[kind]["weights"], one["weights"], rtol=1e-10, atol=1e-12
            )
            assert rank[kind]["loss"] == pytest.approx(one["loss"], rel=1e-6)
