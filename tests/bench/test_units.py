"""bench.units compares the same rows, whoever they belong to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import units
from bench.units import SIZES, WAYS, owners
from bench.workloads import CLASSES, Workload


def test_every_way_has_the_same_units() -> None:
    found = {way: owner for way in WAYS if (owner := owners(way)) is not None}
    assert set(found) == {"adjacent", "scattered"}
    for owner in found.values():
        assert owner.bincount().tolist() == list(SIZES)
    assert sum(SIZES) == 4 * len(SIZES)  # 4 rows a unit in the mean
    assert found["adjacent"].diff().min() >= 0 > found["scattered"].diff().min()


def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Workload("small", lambda: nn.Linear(6, CLASSES), lambda n: torch.randn(n, 6))
    monkeypatch.setitem(units.WORKLOADS, "bert", small)
    units.main(["--rounds", "2", "--out", str(tmp_path / "units.json")])
    (row,) = json.loads((tmp_path / "units.json").read_text())["summary"]
    assert set(row["ratio"]) == set(WAYS)
    assert row["ratio"]["rows"] == [1.0, 1.0, 1.0]
