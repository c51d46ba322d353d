"""Tiles of ghost norms: which are tried, and for what."""

from __future__ import annotations

from typing import Any

import triton

from fastclip.kernels.products import generation
from fastclip.kernels.rounding import STEP

LONGEST = 128
"""Positions of the longest tile."""


def usable(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Configurations whose tile suits the number of positions and the kinds of product, and stays in
    registers (bench.kernels.static): of wide tiles of float32, those that begin new sums hold more, and
    so do those that sum g for a bias."""
    options = {**named, **kwargs}
    bucket, modes = options["bucket"], (options["A_MODE"], options["G_MODE"])
    sizes = (max(16, bucket),) if bucket <= 64 else (64, LONGEST)
    long, exact = options["A_RESTART"] or options["G_RESTART"], "ieee" in modes
    sums = options.get("SUMS", False)
    if sums and bucket > LONGEST and generation() == "ampere":
        sizes = (64,)

    def fits(c: Any) -> bool:
        native = c.kwargs["BLOCK_K"] > STEP
        if native or c.kwargs["BLOCK_T"] < 64:
            return native == (modes == ("native", "native"))
        if exact:
            if sums:
                return c.num_warps == 8 and (c.num_stages == 1) == bool(long)
            return c.num_warps == 4 and (c.num_stages == 1 or not long)
        return "tf32x3" in modes and c.num_stages > 1 and (c.num_warps == 8 or not long)

    return [c for c in configs if c.kwargs["BLOCK_T"] in sizes and fits(c)]


CONFIGS = [
    triton.Config({"BLOCK_T": block_t, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
    for block_t, block_k, warps, stages in (
        (128, 64, 8, 3), (64, 64, 4, 4),
        (32, 128, 4, 4), (16, 128, 2, 4),
        (64, STEP, 4, 3), (64, STEP, 8, 3), (64, STEP, 4, 1), (64, STEP, 8, 1), (32, STEP, 4, 3),
        (16, STEP, 2, 3),
    )
]  # fmt: skip
