"""DistributedDataParallel: ranks that train on their shares are one process that trains on all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import training, world
from tests.distributed.training import STEPS, STRATEGIES, N


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def strategies(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("strategies")
    return world.run(request.param, "tests.distributed.training:strategies", folder, "ddp")


@pytest.fixture(scope="module")
def ways(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ways")
    return world.run(2, "tests.distributed.training:ways", folder, "ddp", "dpddp")


def check_as_one_process(
    found: list[dict[str, Any]], strategy: str, dtype: torch.dtype = torch.float64
) -> None:
    """Every step of every rank is that of one process on the rows that all have drawn."""
    drawn = training.together(found)
    assert len(drawn) == STEPS
    expected = training.replay(drawn, strategy, training.Rows(dtype=dtype))
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (1e-6, 1e-6)
    for rank in found:
        for mine, first, one in zip(rank["states"], found[0]["states"], expected, strict=True):
            for name, value in mine.items():
                assert torch.equal(value, first[name]), name
                torch.testing.assert_close(value, one[name], rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategies: list[dict[str, Any]], strategy: str) -> None:
    check_as_one_process([rank[strategy] for rank in strategies], strategy)


def test_float32(strategies: list[dict[str, Any]]) -> None:
    check_as_one_process([rank["float32"] for rank in strategies], "flat", torch.float32)


def test_shares(strategies: list[dict[str, Any]]) -> None:
    """Each row is one rank's; draws of two ranks differ, and some are empty."""
    drawn = [rank["flat"]["drawn"] for rank in strategies]
    shares = [{row for step in rank for row in step} for rank in drawn]
    count = len(drawn)
    for number, share in enumerate(shares):
        assert share <= set(range(number, N, count))
    assert any(not step for rank in drawn for step in rank)
    places = [[[row // count for row in step] for step in rank] for rank in drawn]
    assert places[0] != places[1]


@pytest.mark.parametrize("way", ["ddp", "ddp, in place", "dpddp", "dpddp, in place"])
def test_wrappers(ways: list[dict[str, Any]], way: str) -> None:
    check_as_one_process([rank[way] for rank in ways], "flat")


@pytest.mark.parametrize("way", ["ddp, parts", "dpddp, parts"])
def test_physical_batches(ways: list[dict[str, Any]], way: str) -> None:
    """Ranks that draw different numbers of physical batches meet in the real step."""
    check_as_one_process([rank[way] for rank in ways], "adaptive")
