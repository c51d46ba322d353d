"""What one number of ranks has saved, another goes on from; the ledger counts each step once."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import training, world

DDP, HSDP = (pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "hsdp"))


@pytest.fixture(scope="module", params=[DDP, "fsdp of parts", HSDP])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder, kind) -> list[dict]:
    """Of two ranks."""
    return world.run(2, "tests.distributed.training:saved", folder, str(folder), kind)


def test_set_back(saved) -> None:
    """Both ranks go on from what the first has written, and count 20 steps, none twice."""
    for rank in saved:
        assert torch.equal(rank["back"]["weights"], rank["at ten"]["weights"])
        assert torch.equal(rank["back"]["thresholds"], rank["at ten"]["thresholds"])
        assert torch.equal(rank["back"]["momentum"], rank["at ten"]["momentum"])
        assert sum(steps for *_, steps in rank["before"]) == 15
        assert sum(steps for *_, steps in rank["after"]) == 20
    assert saved[0]["epsilon"] == saved[1]["epsilon"]


@pytest.mark.parametrize(("count", "then"), [(1, "ddp"), (3, "ddp"), (3, "fsdp"), (4, "hsdp")])
@pytest.mark.one_in(4)
def test_other_numbers_of_ranks(saved, folder, tmp_path, count: int, then: str) -> None:
    """Ranks that hold whole models, or shards, whichever they were."""
    name = "tests.distributed.training:resumed"
    found = world.run(count, name, tmp_path, str(folder), then)
    for rank in found:
        assert torch.equal(rank["weights"], saved[0]["at ten"]["weights"])
        assert torch.equal(rank["threshold"].reshape(-1), saved[0]["at ten"]["thresholds"][:1])
        assert torch.equal(rank["momentum"], saved[0]["at ten"]["momentum"])
        assert rank["step"] == 10
        assert sum(steps for *_, steps in rank["history"]) == 15
        assert all(torch.equal(value, found[0]["state"][n]) for n, value in rank["state"].items())


def test_without_ranks(saved, folder) -> None:
    """One process without a group."""
    found = training.resumed(str(folder), "none")
    assert torch.equal(found["weights"], saved[0]["at ten"]["weights"])
    assert found["step"] == 10


def test_nothing_else_is_left(saved, folder) -> None:
    assert saved
    assert not list(folder.glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp of parts"])
def test_torchs_own_checkpoints(tmp_path_factory, kind: str) -> None:
    """Each rank writes its part; other numbers of ranks go on from it, with shards and without."""
    folder = tmp_path_factory.mktemp("parts")
    saved = world.run(2, "tests.distributed.training:saved_in_parts", folder, f"{folder}/run", kind)
    for rank in saved:
        for name in ("weights", "thresholds", "momentum"):
            assert torch.equal(rank["back"][name], rank["at ten"][name])
        assert sum(steps for *_, steps in rank["history"]) == 15
    for count, then in ((3, kind), (2, "hsdp") if kind == "ddp" else (1, "ddp")):
        own = tmp_path_factory.mktemp("resumed")
        name = "tests.distributed.training:resumed_from_parts"
        for rank in world.run(count, name, own, f"{folder}/run", then):
            assert torch.equal(rank["weights"], saved[0]["at ten"]["weights"])
            assert torch.equal(rank["momentum"], saved[0]["at ten"]["momentum"])
            assert torch.equal(rank["threshold"].reshape(-1), saved[0]["at ten"]["thresholds"][:1])
            assert rank["step"] == 10
            assert sum(steps for *_, steps in rank["history"]) == 12
