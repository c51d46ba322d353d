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
    registers (bench.kernels.static): of wide tiles, those that begin new sums hold more, and so do those
    that sum g for a bias."""
    options = {**named, **kwargs}
    bucket, modes = options["bucket"], (options["A_MODE"], options["G_MODE"])
    sizes = (max(16, bucket),) if bucket <= 64 else (64, LONGEST)
    long, exact = options["A_RESTART"] or options["G_RESTART"], "ieee" in modes
    sums, ampere = options.get("SUMS", False), generation() == "ampere"
    if ampere and bucket > 64 and sum(map(bool, (sums, long, bucket > LONGEST))) > 1:
        sizes = (64,)
    warps = 8 if long and bucket > 64 and ampere else 4

    def fits(c: Any) -> bool:
        native, block_t = c.kwargs["BLOCK_K"] > STEP, c.kwargs["BLOCK_T"]
        if native or block_t < 64:
            spread = block_t != 64 or c.num_warps == warps
            return native == (modes == ("native", "native")) and spread
        if exact:
            if sums:
                return c.num_warps == 8 and (c.num_stages == 1) == bool(long)
            return c.num_warps == 4 and (c.num_stages == 1 or not (long or bucket <= 64))
        return "tf32x3" in modes and c.num_stages > 1 and (c.num_warps == 8 or not long)

    return [c for c in configs if c.kwargs["BLOCK_T"] in sizes and fits(c)]


CONFIGS = [
    triton.Config({"BLOCK_T": block_t, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
    for block_t, block_k, warps, stages in (
        (128, 64, 8, 3), (64, 64, 4, 4), (64, 64, 8, 3),
        (32, 128, 4, 4), (16, 128, 2, 4),
        (64, STEP, 4, 3), (64, STEP, 8, 3), (64, STEP, 4, 1), (64, STEP, 8, 1), (32, STEP, 4, 3),
        (16, STEP, 2, 3),
    )
]  # fmt: skip
