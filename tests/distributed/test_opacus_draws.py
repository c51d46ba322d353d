"""Opacus' modes on ranks draw as the fast mode does, and release the sums of what was drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats

from tests.distributed import world
from tests.distributed.opacus_draws import LOADERS, PASSES, ROWS
from tests.ops.noise.laws import ALPHA

RANKS = 2
MAY = {"a subset": range(20), "weights": range(20, 40)}
"""Rows that may be drawn, where these are not all."""
RATES = {
    "all rows": 0.1, "a generator": 0.5, "a subset": 0.2, "few": 0.05, "weights": 0.2, "Opacus'": 0.01,
    "Opacus' of ranks": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> list[dict[str, Any]]:
    return world.run(
        RANKS, "tests.distributed.opacus_draws:draws", tmp_path_factory.mktemp("opacus draws")
    )


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("opacus sums")
    return world.run(RANKS, "tests.distributed.opacus_draws:released", folder)


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("opacus noise")
    return world.run(RANKS, "tests.distributed.opacus_draws:noise", folder)


def within(count: int, n: int, p: float) -> bool:
    low, high = stats.binom.ppf([ALPHA / 2, 1 - ALPHA / 2], n, p)
    return bool(low <= count <= high)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_rows_and_rates_are_those_recorded(
    drawn: list[dict[str, Any]], name: str, secure: bool
) -> None:
    may = [*MAY.get(name, range(ROWS))]
    for number, rank in enumerate(drawn):
        told = rank[f"{name}, secure {secure}"]
        assert told["rate"] == pytest.approx(RATES[name])
        assert told["size"] == pytest.approx(len(may) * told["rate"] / RANKS, abs=0.5)
        assert len(told["draws"]) == PASSES * told["steps"]  # empty ones among them
        assert all(len(set(draw)) == len(draw) for draw in told["draws"])
        rows = [i for draw in told["draws"] for i in draw]
        share = may[number::RANKS]
        assert set(rows) <= set(share)
        assert within(len(rows), len(share) * len(told["draws"]), told["rate"])


@pytest.mark.parametrize("name", ["all rows", "a generator"])
def test_ranks_draw_independently(drawn: list[dict[str, Any]], name: str) -> None:
    """Though all seed alike, and pass a generator of one seed; not a few draws apart, either."""
    masks = []
    for number, rank in enumerate(drawn):
        told = rank[f"{name}, secure False"]
        mask = torch.zeros(len(told["draws"]), ROWS // RANKS)
        for row, draw in zip(mask, told["draws"], strict=True):
            row[[(i - number) // RANKS for i in draw]] = 1
        masks.append(mask.flatten())
    q, n = RATES[name], len(masks[0])
    for lag in range(-60, 61):
        same = int((masks[0] * masks[1].roll(lag)).sum())
        assert within(same, n, q * q), lag


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost_fsdp"])
def test_empty_draws_are_shares_of_a_step(
    released: list[dict[str, Any]], mode: str, reduction: str
) -> None:
    """Ranks stay in step, and release the sum of all rows that were drawn, over B or as it is."""
    told = [rank[f"{mode}, {reduction}"] for rank in released]
    for rank in told:
        assert len(rank["sizes"]) == 12
        assert 0 in rank["sizes"]
        assert max(rank["sizes"]) > 0
        assert rank["history"] == [(0.0, 1 / 6, 12)]
        assert rank["apart"] < 1e-5  # Opacus' clips at C / (norm + 1e-6)
        assert torch.equal(rank["weights"], told[0]["weights"])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_of_shards(noise: list[dict[str, Any]], reduction: str) -> None:
    """Sigma C in each entry of the sum, whatever the loss makes of it."""
    for rank in noise:
        assert rank[reduction] == pytest.approx(1.0, rel=0.05)


def test_replicas_of_shards_are_refused(noise: list[dict[str, Any]]) -> None:
    """Each would add noise of its own."""
    for rank in noise:
        assert "would add other noise to each replica" in rank["replicas"]
        assert "Give fully_shard a mesh of one axis" in rank["replicas"]


def test_a_share_is_not_shared_again(noise: list[dict[str, Any]]) -> None:
    for rank in noise:
        assert "draws one rank's share of the samples already" in rank["again"]
