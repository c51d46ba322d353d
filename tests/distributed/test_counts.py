"""Counts on several ranks: one answer, paid for once, of the same data on each of them."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import world


def test_ranks_get_one_answer(tmp_path: Path) -> None:
    first, second = world.run(2, "tests.distributed.counts:counted", tmp_path, str(tmp_path))
    assert first["answers"] == second["answers"]
    assert len({str(answer) for answer in first["answers"]}) == 4  # noise of its own for each
    for rank in (first, second):
        assert "Call make_private first" in rank["early"]
        assert "the same samples of a count query" in rank["shards"]
        assert "the same count query" in rank["queries"]
        assert rank["validation"] == [(5.0, 1.0, 3)] == rank["line in the file"]
        assert [sigma for sigma, *_ in rank["training"]] == [1.0, 5.0, 1.0]
        assert sum(steps for *_, steps in rank["in the file"]) == 4
    assert first["names"] == second["names"]
    assert "Rank 1 cannot train" in first["bad"]
    assert "from 0 to 1" in second["bad"]
