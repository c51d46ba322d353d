"""Gradients that cancel within a sample: what enters the sum is bounded by the norm that was taken.

The norm and the sum must see the same numbers: where a float32 sum keeps less than the norm's
arithmetic does, the rounding that is left enters unclipped. The loss is <output, g>, so g is
exactly the gradient of the output.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastclip import ops
from fastclip.ops.planner import Planner
from fastclip.rules import KeptRecord, LinearRecord, LookupRecord, joint_norm_sq
from fastclip.rules.embedding import MaxBagRecord
from tests.oracle import make_private, summed

C = 1.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def contribution(model: nn.Module, inputs: tuple, g: torch.Tensor) -> float:
    """Norm of everything that one backward pass of one sample adds."""
    _, private, _, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    (private(*inputs) * g).sum().backward()
    total = torch.cat(
        [s.double().flatten() for s in summed(dict(model.named_parameters())).values()]
    )
    assert torch.isfinite(total).all()
    return total.norm().item()


def canceling(t: int, d: int, big: float, dtype: torch.dtype) -> torch.Tensor:
    """[1, t, d]: rows of many sizes that add up to about 1."""
    big = min(big, 1e3) if dtype == torch.float16 else big
    half = (torch.randn(t // 2, d) * big * 10 ** -(3 * torch.rand(t // 2, 1))).to(dtype)
    g = torch.cat([half, -half])
    g[0] += torch.full((d,), 1.0 / d).to(dtype)
    return g[torch.randperm(t)][None]


def shuffled_ids(t: int, v: int) -> torch.Tensor:
    """[1, t]: id 1 nearly everywhere."""
    ids = torch.ones(1, t, dtype=torch.int64)
    ids[0, :: max(2, t // 4)] = torch.randint(v, ids[0, :: max(2, t // 4)].shape)
    return ids


@pytest.mark.one_in(8)
@dtypes
@pytest.mark.parametrize("big", [1e2, 1e6, 1e12])
@pytest.mark.parametrize("v", [3, 5000])
def test_embedding(v: int, big: float, dtype: torch.dtype) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        g = canceling(64, 8, big, dtype)
        ids = torch.ones(1, 64, dtype=torch.int64) if seed % 2 else shuffled_ids(64, v)
        assert contribution(nn.Embedding(v, 8).to(dtype), (ids,), g) <= C


@pytest.mark.parametrize("order", range(6))
def test_rows_that_float64_cannot_hold(order: int) -> None:
    """1e20 + 1e4 - 1e20 is 0 or 1e4, as the rows come: the bound holds for whichever is released."""
    torch.manual_seed(order)
    rows = torch.tensor([1e17, 1.0, -1e17, 3e17, -3e17, 1e3])[torch.randperm(6)]
    g = rows[None, :, None].expand(1, 6, 4).contiguous()
    for v in (2, 5000):
        assert contribution(nn.Embedding(v, 4), (torch.ones(1, 6, dtype=torch.int64),), g) <= C


class Weighted(nn.Module):
    """A bag under weights of both signs, which cancel, and a head that lets gradients through."""

    def __init__(self, dtype: torch.dtype, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 8, mode=mode, dtype=dtype)
        self.head = nn.Linear(8, 8, bias=False, dtype=dtype)
        nn.init.zeros_(self.bag.weight)
        nn.init.eye_(self.head.weight)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(ids, None, weights if self.bag.mode == "sum" else None))


@pytest.mark.one_in(3)
@dtypes
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bag(mode: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        half = (torch.randn(32) * 1e3).to(dtype)
        weights = torch.cat([half, -half])
        weights[0] += 1e-3
        ids = torch.ones(1, 64, dtype=torch.int64)
        g = (torch.randn(1, 8) * 1e3).to(dtype)
        inputs = (ids, weights[torch.randperm(64)][None])
        assert contribution(Weighted(dtype, mode), inputs, g) <= C


class Tables(nn.Module):
    """One table, looked up by two or more modules whose gradients cancel."""

    def __init__(self, dtype: torch.dtype, v: int, paddings: tuple) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(v, 8, p, dtype=dtype) for p in paddings)
        for table in self.tables:
            table.weight = self.tables[0].weight

    def forward(self, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        uses = [table(ids) * factors[:, i] for i, table in enumerate(self.tables)]
        return torch.stack(uses).sum(0)


@pytest.mark.one_in(3)
@dtypes
@pytest.mark.parametrize("paddings", [(None, None), (None, 0), (2, 0, None, None)], ids=str)
def test_tables_that_share_their_weight(paddings: tuple, dtype: torch.dtype) -> None:
    """Each use alone is large; together they nearly vanish."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = Tables(dtype, 7, paddings)
        ids = torch.ones(1, 16, dtype=torch.int64)
        g = (torch.randn(1, 16, 8) * 300).to(dtype)
        uses = torch.tensor([1.0, -1.0, 1.0, -1.0])[: len(paddings)]
        factors = torch.randn(1, 1, 16, 1).to(dtype) * uses[None, :, None, None].to(dtype)
        factors[0, 0, 0, 0] += 0.01
        assert contribution(model, (ids, factors), g) <= C


def joint(records: list) -> tuple[float, float]:
    """Joint norm of one sample's records, and the norm of their sums added in float32."""
    norm = joint_norm_sq(records, Planner()).sqrt()
    one = torch.ones(1)
    total = records[0].clipped_sum(one)
    for record in records[1:]:
        total = total + record.clipped_sum(one)
    return norm.item(), total.double().norm().item()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", ["lookup", "max", "linear", "transposed"])
@pytest.mark.parametrize("tiny", [0.0, 1e-3])
def test_uses_of_unlike_kinds(first: str, tiny: float, seed: int) -> None:
    """A use, and kept gradients that nearly take it away: the joint norm is never too small."""
    torch.manual_seed(seed)
    v, d, t = 6, 5, 9
    if first == "lookup":
        ids = torch.randint(v, (1, t))
        record = LookupRecord.from_dense(ids, 1e4 * torch.randn(1, t, d), v)
    elif first == "max":
        record = MaxBagRecord(torch.randint(v, (1, d)), 1e4 * torch.randn(1, d), v)
    else:
        a, g = 1e2 * torch.randn(1, t, d), 1e2 * torch.randn(1, t, v)
        pair = (g, a) if first == "transposed" else (a, g)
        record = LinearRecord(*pair, transposed=first == "transposed")
    other = -record.per_sample() + tiny * torch.randn(1, v, d)
    norm, total = joint([record, KeptRecord(other)])
    assert norm >= total * (1 - 2**-18)
    lookup = LookupRecord.from_dense(torch.randint(v, (1, t)), torch.randn(1, t, d), v)
    norm, total = joint([record, lookup, KeptRecord(other - lookup.per_sample())])
    assert norm >= total * (1 - 2**-18)


def test_a_merged_look_up_is_the_sum() -> None:
    """Records of one table become one, whatever their padding, ragged or not."""
    v, d = 6, 3
    first = LookupRecord.from_dense(torch.randint(v, (4, 5)), torch.randn(4, 5, d), v, 2)
    second = LookupRecord.from_dense(torch.randint(v, (4, 3)), torch.randn(4, 3, d), v)
    sample = torch.tensor([0, 0, 1, 3])
    ragged = LookupRecord(
        torch.randint(v, (4,)), sample, torch.randn(4, d).half(), batch_size=4, num_embeddings=v,
        padding_idx=1,
    )  # fmt: skip
    scale = torch.rand(4)
    for records in ([first, second], [first, ragged], [first, second, ragged]):
        expected = sum(r.per_sample().double() for r in records)
        merged = records[0]
        for record in records[1:]:
            found = merged.merge(record)
            assert isinstance(found, LookupRecord)
            merged = found
        assert torch.allclose(merged.per_sample().double(), expected, atol=1e-6)
        assert torch.allclose(merged.norm_sq().double(), ops.row_norm_sq(expected), rtol=1e-5)
        total = torch.einsum("b,bvd->vd", scale.double(), expected)
        assert torch.allclose(merged.clipped_sum(scale).double(), total, atol=1e-6)
