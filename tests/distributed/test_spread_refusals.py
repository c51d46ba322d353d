"""Every set-up with fully_shard is exact or refused, by name, on all ranks alike."""

from __future__ import annotations

import re

import pytest

from tests.distributed import world
from tests.distributed.spread_refusals import CASES

SAID = {
    "tensor parallel": r"\['2.weight'\] are sharded in another way than by fully_shard",
    "FSDP1": "FullyShardedDataParallel.*FSDP1.*fully_shard",
    "parts alone": r"^UnsupportedLayerError: 0 \(FSDPLinear\).*Call fully_shard on the model itself",
    "ignored": "'0.weight' is trained and fully_shard does not hold it",
    "optimizer before": "Build the optimizer from this module's parameters",
    "mesh": "sharded over 1 processes of 2",
    "replicas": "All replicas of a shard expect the same weights",
    "buffers": "same weights",
    "hook": "'0.weight' has a hook on its gradient",
    "second engine": "is private already",
    "experts by parts": "^UnsupportedLayerError: 1: samples are moved there by their values",
    "changed sum": "summed_grad of .*0.weight was changed after",
    "replaced sum": "summed_grad of 0.weight was changed after",
    "hook later": "'0.weight' has a hook on its gradient",
    "penalty": "ParameterLeakError: Parameter '0.weight'",
    "thawed": r"\['0.weight', '0.bias'\] became trainable",
    "assigned": "was replaced after make_private.*Load without assign",
    "compatible": "Call get_compatible_module before fully_shard",
    "explain": "Call explain before fully_shard",
    "make_step": "model expects one that each rank holds as a whole",
    "placeholders": "Omit rand_on_empty",
    "forgotten": r"backward passes in the sums, got \d+ on one and \d+ on another",
    "workers apart": "same num_workers and prefetch_factor",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    return world.run(2, "tests.distributed.spread_refusals:refusals", folder)


@pytest.mark.parametrize("case", CASES)
def test_refusals(said, case: str) -> None:
    for rank in said:
        assert re.search(SAID[case], rank[case]), rank[case]
