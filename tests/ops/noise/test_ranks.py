"""Secure mode on two ranks (gloo): Opacus' distributed optimizers, and independence between ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import world
from tests.ops.noise.laws import assert_standard_normal, assert_uncorrelated
from tests.ops.noise.ranks import MODES, WIDTH


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What the two ranks saw."""
    return world.run(2, "tests.ops.noise.ranks:seen", tmp_path_factory.mktemp("ranks"))


def test_ranks_draw_noise_of_their_own(ranks: list[dict]) -> None:
    assert_uncorrelated(ranks[0]["source"], ranks[1]["source"])
    assert not (ranks[0]["source"] == ranks[1]["source"]).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_adds_noise_once(ranks: list[dict], mode: str) -> None:
    """Both ranks make the same step; what it adds is one N(0, (sigma C)^2) on every parameter."""
    (kind, first, rows), (_, second, others) = (rank[mode] for rank in ranks)
    assert "Materialized" in kind or kind == "ShardedOptimizer"
    assert torch.equal(first, second)
    sigma = 2.0 if "per_layer" in mode else 1.0  # of four layers: ||(1, 1, 1, 1)||
    if "mean" in mode:
        sigma /= 8  # the expected batch of both ranks together
    noise = first.float() / sigma
    if "bf16" in mode:  # rounded, so no exact law
        assert abs(float(noise.std()) - 1) < 0.02
        return
    assert_standard_normal(noise)
    assert_uncorrelated(noise[: 3 * WIDTH], noise[-3 * WIDTH - 3 : -3])  # two weights
    assert [r.tolist() for r in rows] != [r.tolist() for r in others]
