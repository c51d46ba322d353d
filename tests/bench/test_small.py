"""What a private step of a small model asks of Python: no more than it did."""

from __future__ import annotations

import pytest

from bench import small
from fastclip.backward import bare

MOST = {"mlp": 250, "bert": 330, "vit": 330}
"""Calls that privacy adds a private layer: 190, 240 and 270 measured."""


@pytest.mark.skipif(not bare.SERVES, reason=bare.WHY_NOT)
@pytest.mark.parametrize("name", MOST)
def test_calls(name: str) -> None:
    found = small.measured(name, 1)
    ordinary, private, without = (found[mode] for mode in small.MODES)
    added = (private["calls"] - ordinary["calls"]) / private["layers"]
    assert 0 < added <= MOST[name]
    assert private["calls"] < without["calls"]
    assert private["nodes"] > 20
    assert not without["nodes"]
