"""What bench.kernels.static calls a fault."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from bench.kernels.static import faults, listing, merged, table

ROW = {
    "kernel": "scaled_sum._tiles_kernel", "arch": "sm_90", "forms": ["scaled_sum BERT bf16"],
    "config": {"BLOCK_P": 64, "BLOCK_D": 64, "warps": 4, "stages": 3}, "mode": "native",
    "code": "a", "shared": 1 << 16, "most": 227 << 10, "registers": 128, "stack": 0,
    "local_loads": 0, "local_stores": 0, "async_copies": 24, "tma": 0, "wgmma": 4, "mma": 0,
    "float": 32, "instructions": 900, "loads": {}, "copies": {"4": 2, "16": 24},
}  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"stack": 8},
    {"local_loads": 1},
    {"local_stores": 1},
    {"shared": 228 << 10},
    {"wgmma": 0, "mma": 4},
    {"copies": {"4": 9}},
    {"loads": {"2": 1}},
    {"arch": "sm_80", "wgmma": 0},
]
GOOD: list[dict[str, Any]] = [
    {},
    {"arch": "sm_80", "wgmma": 0, "mma": 4},
    {"wgmma": 0, "mma": 4, "config": {**ROW["config"], "BLOCK_P": 16}},  # type: ignore[dict-item]
    {"mode": "ieee", "wgmma": 0, "copies": {}, "loads": {"2": 1}},
    {"forms": ["conv_norm ResNeXt-50 3x3 bf16"], "loads": {"2": 1}},
]


@pytest.mark.parametrize("change", BAD)
def test_a_fault(change: dict[str, Any]) -> None:
    assert len(faults({**ROW, **change})) == 1


@pytest.mark.parametrize("change", GOOD)
def test_no_fault(change: dict[str, Any]) -> None:
    assert not faults({**ROW, **change})


def test_an_exemption_of_one_form_is_not_anothers() -> None:
    forms = ["conv_norm ConvNeXt 7x7 bf16", "conv_norm ResNet-50 1x1 bf16"]
    assert faults({**ROW, "forms": forms, "loads": {"2": 1}})


def test_equal_code_is_one_row() -> None:
    """Of two forms; not of two architectures."""
    other = {**ROW, "forms": ["scaled_sum ViT bf16"]}
    rows = merged([[{**ROW, "forms": [*ROW["forms"]]}], [other, {**ROW, "arch": "sm_80"}]])  # type: ignore[misc]
    assert [len(row["forms"]) for row in rows] == [1, 2]
    assert len(table(rows).splitlines()) == len(listing(rows).splitlines()) == 4
