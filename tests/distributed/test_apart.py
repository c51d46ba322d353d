"""Ranks that do not train alike: refused on all of them, in Opacus' modes as in the fast mode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accounting.runs import cause_and_fix
from tests.distributed import world

OPACUS = {
    "threshold": "the same max_grad_norm, got 1.0 on rank 0 and 2.0 on rank 1",
    "sigma": "the same noise_multiplier, got 1.0 on rank 0 and 2.0 on rank 1",
    "batch": "the same sampling design",
    "data": "the same samples of the data set, in one order",
    "order": "Pass a DistributedSampler of these ranks",
    "adaptive": "Omit grad_sample_mode.",
    "later threshold": "the same max_grad_norm, got 1 on one and 100 on another",
    "later thresholds": "digest of all thresholds",
    "later sigma": "the same noise_multiplier, got 1 on one and 100 on another",
    "later size": "the same expected_batch_size, got 1 on one and 2 on another",
    "frozen": "digest of the trained parameters' names",
}


@pytest.fixture(scope="module")
def opacus(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("opacus")
    return world.run(2, "tests.distributed.apart:opacus", folder)


@pytest.mark.parametrize("case", OPACUS)
def test_opacus_modes(opacus: list[dict[str, Any]], case: str) -> None:
    for rank in opacus:
        assert OPACUS[case] in rank[case], rank[case]
        assert cause_and_fix(ValueError(rank[case].replace("...", "")))  # of what is shortened


def test_opacus_modes_that_train(opacus: list[dict[str, Any]]) -> None:
    """Alike, under one name on all ranks; what one rank refuses, the other is told."""
    assert "Rank 1 cannot train" in opacus[0]["alone"]
    for rank in opacus:
        assert rank["alone"]
        assert rank["share"] == ""
        assert rank["names"] == opacus[0]["names"]
        assert rank["steps"] == 2


def test_a_checkpoint_and_a_parameter_of_one_rank(tmp_path) -> None:
    found = world.run(2, "tests.distributed.apart:fast", tmp_path, str(tmp_path))
    for rank in found:
        assert "digest of the ledger (one checkpoint" in rank["loaded by one"]
        assert rank["loaded by all"] == ""
        assert "digest of the trained parameters' names" in rank["frozen"]
        assert sum(steps for *_, steps in rank["history"]) == 3
        assert cause_and_fix(ValueError(rank["loaded by one"]))
