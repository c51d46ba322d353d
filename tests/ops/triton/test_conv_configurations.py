"""Which configurations of the kernels of convolutions are tried: some for every tile."""

from __future__ import annotations

import pytest
import triton

from fastclip.ops.triton import conv, tiles

KERNELS = {"norm": conv._norm_tiles, "sum": conv._sum_tiles}
SIDES = (16, 32, 64, 128)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("device", ["ampere", "hopper"])
@pytest.mark.parametrize("mode", ["native", "ieee", "tf32x3"])
@pytest.mark.parametrize("bucket", [1, 16, 64, 4096])
def test_a_configuration_for_everything(
    name: str, device: str, mode: str, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for of in (conv, tiles):
        monkeypatch.setattr(of, "generation", lambda: device)
    kernel = KERNELS[name]
    for rows in SIDES:
        for columns in SIDES:
            tile = {"BLOCK_O": rows, "BLOCK_N": columns, "MODE": mode, "KEEP": False}
            usable = kernel.prune(kernel.configs, {"bucket": bucket}, **tile)
            assert usable
            if mode == "native":
                assert loads(usable, min(rows, columns)) or bucket < 64  # one step is the whole map


def loads(configs: list[triton.Config], side: int) -> bool:
    """Whether each thread has 16 bytes of the smaller operand to load in a step."""
    return all(2 * side * c.kwargs["BLOCK_K"] // (32 * c.num_warps) >= 16 for c in configs)
