"""Accelerate on several ranks: the model is prepared first, then made private."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import training, world


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.one_in(2)
def test_a_plain_loop(tmp_path, kind: str) -> None:
    found = world.run(2, "tests.distributed.accelerated:loop", tmp_path, kind)
    expected = training.replay(training.together(found))[-1]["weights"]
    for rank in found:
        torch.testing.assert_close(rank["weights"], expected, rtol=1e-10, atol=1e-12)


def test_a_prepared_loader_is_refused(tmp_path) -> None:
    for said in world.run(2, "tests.distributed.accelerated:prepared_too", tmp_path):
        assert "Accelerate's BatchSamplerShard" in said
        assert "Prepare everything except the data loader" in said
