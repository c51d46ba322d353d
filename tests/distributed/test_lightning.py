"""Lightning on several ranks: its Trainer trains them as one process on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import world
from tests.distributed.training import BATCH, N, Rows, model, private, step, together
from tests.distributed.training import state as state_of

lit = pytest.importorskip("tests.distributed.lit", reason="lightning is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and loggers

SAVED = ["ddp", "ddp", "shards", "shards", "shards in one file", "shards in one file", "ddp"]
"""Each goes on from the one before it."""
REFUSED = {
    "static_graph": ("UnsupportedLayerError", "Omit static_graph"),
    "comm hook": ("ArgumentError", "mit ddp_comm_hook"),
    "overfit": ("ArgumentError", "limit_train_batches"),
    "accumulate": ("ArgumentError", "Leave it at 1"),
    "clip": ("ArgumentError", "max_grad_norm"),
    "gathers": ("GraphError", "sync_dist=True"),
    "past forward": ("GraphError", "Call the model itself"),
    "no fully_shard": ("GraphError", "call fully_shard on it"),
    "parts": ("UnsupportedLayerError", "Call fully_shard on the model itself"),
    "no callback": ("ArgumentError", "PrivacyCallback"),
    "no ledger": ("ArgumentError", "unknown"),
    "no ledger, shards": ("ArgumentError", "unknown"),
    "tensor parallel": ("UnsupportedLayerError", "a mesh of all of them"),
}
"""What the ranks of `lit.refusals` are told."""


@pytest.fixture(scope="module")
def ways(tmp_path_factory) -> list[dict[str, Any]]:
    return world.run(2, "tests.distributed.lit:ways", tmp_path_factory.mktemp("ways"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, world.run(2, "tests.distributed.lit:saved", folder, str(folder), *SAVED)


def weights(drawn: list[list[int]], strategy: str = "flat") -> torch.Tensor:
    """After one process has trained on these rows, step by step."""
    module, rows = model(), Rows().x
    made = private(module, strategy, poisson=False, expected_batch_size=BATCH, momentum=0.5)
    for numbers in drawn:
        made[2].zero_grad()
        step(made, rows[numbers], torch.tensor(numbers, dtype=torch.int64))
    return state_of(made, module)["weights"]


def check_weights(found: list[dict[str, Any]], expected: torch.Tensor) -> None:
    for rank in found:
        torch.testing.assert_close(rank["weights"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "steps"),
    [
        ("Module", 12), ("PastForward", 12), ("Manual", 12), ("stopped early", 6),
        ("bf16-mixed", 6), ("Spread", 12), ("SpreadManual", 12),
    ],
)  # fmt: skip
def test_ranks_are_one_process(ways: list[dict[str, Any]], way: str, steps: int) -> None:
    """The rows of all ranks, by Poisson draws of which some ranks have none, in the same steps."""
    found = [rank[way] for rank in ways]
    drawn = together(found)
    assert len(drawn) == steps
    assert any(not rows for rank in found for rows in rank["drawn"])
    check_weights(found, weights(drawn))
    for rank in found:
        assert rank["history"] == [(0.0, BATCH / N, steps)]
        assert rank["steps"] == steps
        assert rank["numbers"]["rows"] == len(drawn[-1])  # of all ranks: sync_dist
        assert not rank["left"]


@pytest.mark.slow
def test_noise_and_epsilon(ways: list[dict[str, Any]]) -> None:
    """What was spent is what one process spends; noise of all ranks makes one model."""
    engine, _, fitter = lit.fit(strategy="auto", devices=1, told={"noise_multiplier": 1.0})
    one, two = (rank["noise"] for rank in ways)
    assert torch.equal(one["weights"], two["weights"])
    assert float((one["weights"] - weights(together([one, two]))).abs().max()) > 1e-3
    assert one["history"] == two["history"] == engine.accountant.history == [(1.0, BATCH / N, 12)]
    assert one["numbers"]["epsilon"] == two["numbers"]["epsilon"]
    assert one["numbers"]["epsilon"] == float(fitter.callback_metrics["epsilon"])


@pytest.mark.slow
def test_a_second_fit_draws_rows_of_its_own(ways: list[dict[str, Any]]) -> None:
    """The data module seeds its loader's generator whenever it is asked for one."""
    drawn = together([rank["fitted twice"] for rank in ways])
    assert len(drawn) == 24
    assert drawn[12:] != drawn[:12]
    assert drawn[12:15] != drawn[:3]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SAVED) - 1))
def test_checkpoints(saved: tuple[Path, list[dict[str, Any]]], number: int) -> None:
    """On from ModelCheckpoint's: weights, momentum, thresholds; a ledger that counts steps once."""
    ranks = [rank[number] for rank in saved[1]]
    first, then = [rank["first"] for rank in ranks], [rank["then"] for rank in ranks]
    assert [rank["steps"] for rank in first + then] == [6, 6, 12, 12]
    check_weights(then, weights(together(first) + together(then), "adaptive"))
    assert all(rank["history"] == [(0.0, BATCH / N, 12)] for rank in then)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [0, 4])
def test_on_in_one_process(saved: tuple[Path, list[dict[str, Any]]], number: int) -> None:
    """From what two ranks have saved, with whole weights or with shards in one file."""
    folder, ranks = saved
    found = lit.found(
        lit.fit(
            strategy="auto", devices=1, told={"strategy": "adaptive"},
            ckpt_path=folder / str(number) / "first.ckpt",
        )
    )  # fmt: skip
    first = together([rank[number]["first"] for rank in ranks])
    check_weights([found], weights(first + found["drawn"], "adaptive"))
    assert found["history"] == [(0.0, BATCH / N, 12)]


@pytest.mark.slow
def test_rates(tmp_path: Path) -> None:
    """A plain loader's batch is of all ranks together, that of a DistributedSampler of each, whose order
    Lightning changes from pass to pass where it is kept."""
    ranks = world.run(2, "tests.distributed.lit:loaders", tmp_path)
    drawn = together([rank["in order"] for rank in ranks])
    assert len(drawn) == 6
    first, then = ([row for rows in drawn[k : k + 3] for row in rows] for k in (0, 3))
    assert first != then
    assert len(set(first)) == len(first) == len(set(then)) == len(then) == 22
    for rank in ranks:
        assert rank["in order"]["history"] == [(0.0, 1.0, 2)]
        assert rank["plain"]["history"] == [(0.0, 1 / 6, 12)]
        assert rank["share"]["history"] == [(0.0, 1 / 3, 6)]


def test_what_is_refused(tmp_path: Path) -> None:
    for rank in world.run(2, "tests.distributed.lit:refusals", tmp_path, str(tmp_path)):
        assert rank.keys() == REFUSED.keys()
        for name, (kind, way_out) in REFUSED.items():
            assert rank[name][0] == kind, rank[name]
            assert way_out in rank[name][1]
