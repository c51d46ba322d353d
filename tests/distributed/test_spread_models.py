"""Models of every kind under fully_shard train as in one process, whatever happens between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import spread_models, training, world
from tests.distributed.spread_models import MODELS, STEPS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("spread")
    return world.run(2, "tests.distributed.spread_models:spread_models", folder)


@pytest.mark.parametrize("name", [*MODELS, "plain, compiled"])
def test_models(found, name: str) -> None:
    ranks = [rank["models"][name] for rank in found]
    drawn = training.together(ranks)
    assert len(drawn) == STEPS
    expected = spread_models.replay(name.removesuffix(", compiled"), drawn)
    for rank in ranks:
        for mine, one in zip(rank["states"], expected, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "event",
    [
        "evaluated",
        "paused",
        "kept whole",
        "freed",
        "small buckets",
        "workers",
        "physical batches by workers",
    ],
)
def test_events(found, event: str) -> None:
    for rank in found:
        expected = rank["events"]["nothing"]
        torch.testing.assert_close(rank["events"][event], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["policy", "policy, output", "cast by hand", "autocast"])
def test_mixed_precision(found, way: str) -> None:
    """Two rows of norm C each; the sums are exchanged in float32, whatever layers compute in."""
    mine, expected = found[0]["mixed"][way], found[0]["mixed"]["float32"]
    assert mine.dtype == torch.float32
    assert float((mine - expected).norm()) < 0.02 * float(expected.norm())
    assert 0 < float(mine.norm()) * 2 <= 2 * 0.5
    assert torch.equal(mine, found[1]["mixed"][way])


def test_passes_that_are_broken_off(found) -> None:
    """Draws of the next one are not filled up by what was left of the one before."""
    first, second = (rank["broken off"] for rank in found)
    assert torch.equal(first["weights"], second["weights"])
    assert first["steps"] == second["steps"] == 4
    for mine, other in zip(first["rows"], second["rows"], strict=True):
        assert mine or other  # as many physical batches as the larger draw has, and no more


def test_cleanup_gives_the_gradients_back(found) -> None:
    assert all(all(rank["cleaned"]) for rank in found)
