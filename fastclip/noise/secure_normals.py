"""Normals that nobody can foresee, drawn on the CPU: where they are asked for by any name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastclip.noise import gaussian
from fastclip.noise.keystream import KeyStream
from fastclip.ops.dispatch import host_operation
from fastclip.ops.finalize import add_totals


@host_operation
def secure_normals(
    outs: list[Tensor], std: float, guarded: bool, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """Fill contiguous CPU tensors, float32 or float64, with N(0, std^2) of ChaCha20, and add `totals`.

    Every call draws under keys of its own.

    Args:
        guarded: each value is half the sum of four normals. totals: one for each of `outs`, or None in
            its place; or no totals at all. factor: what they are multiplied by.
    """
    for out in outs:
        with KeyStream() as bits:
            gaussian.fill_normal(out, std, bits, guarded=guarded)
    if totals:
        add_totals(outs, totals, factor)
