"""Embedding norms: token, position and type tables of BERT and GPT-2.

Ids decide the work: natural text repeats ids (drawn here from Zipf's law), positions are all
distinct within a sample, token types are one or two ids for every position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from opacus.grad_sample.embedding import compute_embedding_grad_sample
from opacus.grad_sample.embedding_norm_sample import compute_embedding_norm_sample
from torch import Tensor, nn

from bench.kernels.case import Case, normal
from bench.kernels.shapes import LOOKUPS
from fastclip import ops

DENSE_BYTES = 2e9  # of Opacus' [b, v, d] per-sample gradients, above which they are left out
SHAPES = [  # model, b, t, v, d, kind of ids
    ("ClinicalBERT tokens", 16, 128, 28996, 768, "text"),
    ("ClinicalBERT types", 64, 512, 2, 768, "types"),
    ("ClinicalBERT positions", 64, 512, 512, 768, "positions"),
    ("one id", 1, 65536, 10, 768, "types"),
    *LOOKUPS,
]


def ids_of(kind: str, b: int, t: int, v: int, generator: torch.Generator) -> Tensor:
    if kind == "positions":
        return torch.arange(t, device=generator.device).expand(b, t).clone()
    if kind == "types":
        return torch.zeros(b, t, dtype=torch.int64, device=generator.device)
    weights = 1 / torch.arange(1, v + 1, device=generator.device)
    return torch.multinomial(weights, b * t, replacement=True, generator=generator).view(b, t)


def case(model: str, b: int, t: int, v: int, d: int, kind: str, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> Mapping[str, Any]:
        ids = ids_of(kind, b, t, v, generator).to(device)
        return {"ids": ids, "g": normal((b, t, d), dtype, device, generator)}

    def opacus_norm(ids: Tensor, g: Tensor) -> Tensor:
        layer = nn.Embedding(v, d, device="meta")
        return compute_embedding_norm_sample(layer, [ids], g)[layer.weight].square()

    def opacus_gradients(ids: Tensor, g: Tensor) -> Tensor:
        layer = nn.Embedding(v, d, device=g.device, dtype=g.dtype)
        gradients = compute_embedding_grad_sample(layer, [ids], g)[layer.weight]
        return gradients.flatten(1).float().square().sum(1)

    others: dict[str, Callable[..., Any]] = {"Opacus norm sampler": opacus_norm}
    if b * v * d * 4 <= DENSE_BYTES:
        others["Opacus per-sample gradients"] = opacus_gradients

    def run(ids: Tensor, g: Tensor) -> Tensor:
        return ops.lookup_norm(*ops.flatten_lookup(ids, g), b, v)

    return Case(
        operation="lookup_norm", model=model, shape={"b": b, "t": t, "v": v, "d": d}, dtype=dtype,
        make=make, run=run, others=others,
        flops=2.0 * b * t * d, nbytes=float(b * t * (d * dtype.itemsize + 8)),
    )  # fmt: skip


def cases() -> list[Case]:
    found = [case(*shape, torch.bfloat16) for shape in SHAPES]
    return [*found, case(*SHAPES[0], torch.float32), case(*LOOKUPS[1], torch.float32)]
