"""bench.distributed: what it counts, and what it computes on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from bench.distributed import on_paper, sent, table
from bench.draw_distributed import draw_distributed
from fastclip.distributed import shards

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def test_bytes_are_those_given_to_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, **_: given.append(tensor))
    monkeypatch.setattr(shards, "_reduce_scatter", lambda part, whole, **_: given.append(whole))
    plain = distributed.all_reduce
    with sent() as found:
        distributed.all_reduce(torch.zeros(5, dtype=torch.float64), group=None)
        distributed.all_reduce(torch.zeros(3, dtype=torch.bfloat16))
        shards._reduce_scatter(torch.zeros(2), torch.zeros(4), group=None)
    assert found == {"bytes": 62, "exchanges": 3}
    assert len(given) == 3
    assert distributed.all_reduce is plain


def test_on_paper() -> None:
    """Of 8 ranks each passes 7 eighths of the sums on, twice; noise is drawn once over all of them."""
    for row in on_paper():
        ranks, size = row["ranks"], row["in_one_process"]
        assert row["bytes_of_a_rank"] == pytest.approx(2 * (ranks - 1) * 4 * size / ranks)
        assert row["values_of_noise_of_a_rank"] * ranks == pytest.approx(size, rel=1e-5)


def test_the_table_has_a_line_for_each_number_of_ranks() -> None:
    mode: dict[str, Any] = {
        "step_s": (0.1, 0.2, 0.3),
        "exchanged": {"bytes": 2**21},
        "peak_mib": 3.0,
    }
    row = {"ranks": 2, "ratio": (1.1, 1.2, 1.3), "memory_ratio": 1.5, "non_private": mode}
    lines = table([{**row, "fastclip": mode}]).splitlines()
    assert len(lines) == 2
    assert "1.20x [1.10-1.30]" in lines[1]
    assert lines[1].split()[-1] == "2.0"


def test_the_committed_results_are_drawn(tmp_path: Path) -> None:
    for name, count in (("distributed-cpu", 3), ("distributed-fsdp-cpu", 2)):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        assert draw_distributed(result, tmp_path / f"{name}.png") == count
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_distributed({**result, "rows": []}, tmp_path / "a.png")
