"""Clipped sums of embedding tables: the layers of bench_embedding_norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.kernels.bench_embedding_norm import SHAPES, ids_of
from bench.kernels.case import Case, normal
from bench.kernels.shapes import LOOKUPS
from fastclip import ops


def case(model: str, b: int, t: int, v: int, d: int, kind: str, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        ids = ids_of(kind, b, t, v, generator).to(device)
        scale = torch.rand(b, generator=generator, device=generator.device).to(device)
        return {"ids": ids, "g": normal((b, t, d), dtype, device, generator), "scale": scale}

    def run(ids: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        flat, sample, rows = ops.flatten_lookup(ids, g)
        return ops.lookup_sum(flat, sample, rows, scale, v)

    def float64_copies(ids: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        flat, sample, rows = ops.flatten_lookup(ids, g)
        return ops.lookup_sum.reference(flat, sample, rows, scale, v)  # type: ignore[attr-defined]

    def gradient(ids: Tensor, g: Tensor, scale: Tensor) -> Tensor:
        """The ordinary one, scales rounded into the operands' type."""
        g = g * scale.to(g.dtype)[:, None, None]
        return torch.ops.aten.embedding_dense_backward(g, ids, v, -1, False)

    return Case(
        operation="lookup_sum", model=model, shape={"b": b, "t": t, "v": v, "d": d}, dtype=dtype,
        make=make, run=run, others={"float64 copies": float64_copies, "gradient": gradient},
        flops=2.0 * b * t * d, nbytes=float(b * t * (d * dtype.itemsize + 8) + 4 * v * d),
        tolerance=1e-6,
    )  # fmt: skip


def cases() -> list[Case]:
    found = [case(*shape, torch.bfloat16) for shape in SHAPES]
    return [*found, case(*SHAPES[0], torch.float32), case(*LOOKUPS[1], torch.float32)]
