"""What a private step of a small model asks of Python: no more than it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import small
from fastclip.backward import bare

MOST = 125
"""Calls that privacy adds a private layer of the MLP: 112 measured; 613 before layers were nodes."""


@pytest.mark.skipif(not bare.SERVES, reason=bare.WHY_NOT)
def test_calls(tmp_path: Path) -> None:
    """In processes of their own: what others leave behind listens, too."""
    out = tmp_path / "small.json"
    modes = "ordinary", "private", "without nodes"
    small.main(["--models", "mlp", "--modes", *modes, "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())["models"]["mlp"]
    ordinary, private, without = (found[mode] for mode in modes)
    assert 0 < (private["calls"] - ordinary["calls"]) / private["layers"] <= MOST
    assert private["calls"] < without["calls"]
    assert private["nodes"] == private["layers"] == 25
    assert not without["nodes"]
