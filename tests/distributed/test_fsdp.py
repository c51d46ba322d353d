"""FSDP2: ranks that hold shards of one model, and train on their rows, are one process on all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import world
from tests.distributed.test_ddp import check_as_one_process
from tests.distributed.training import STRATEGIES

KINDS = ["fsdp", "fsdp of parts", "fsdp, whole after forward", "fsdp, other axes"]


FOUR = pytest.param((4, "hsdp"), marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[(2, "fsdp of parts"), FOUR], ids=str)
def strategies(request, tmp_path_factory) -> list[dict[str, Any]]:
    ranks, kind = request.param
    folder = tmp_path_factory.mktemp("strategies")
    return world.run(ranks, "tests.distributed.training:strategies", folder, kind)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ways(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ways")
    return world.run(request.param, "tests.distributed.training:ways", folder, *KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategies: list[dict[str, Any]], strategy: str) -> None:
    check_as_one_process([rank[strategy] for rank in strategies], strategy)


@pytest.mark.slow
def test_float32(strategies: list[dict[str, Any]]) -> None:
    check_as_one_process([rank["float32"] for rank in strategies], "flat", torch.float32)


@pytest.mark.parametrize("place", ["", ", in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_shards(ways: list[dict[str, Any]], kind: str, place: str) -> None:
    check_as_one_process([rank[kind + place] for rank in ways], "flat")


@pytest.mark.parametrize("kind", KINDS)
def test_physical_batches(ways: list[dict[str, Any]], kind: str) -> None:
    """Ranks that draw different numbers of physical batches go through the model equally often."""
    check_as_one_process([rank[f"{kind}, parts"] for rank in ways], "adaptive")
