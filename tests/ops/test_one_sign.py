"""Terms that are all alike round alike: long sums then err in one direction, of norms and of sums.

A product of Grams may so come out low, and the clipped sum of the same operands high. What the norm
is raised by, and the room of the scales, cover both together.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.clipping import Clipping
from fastclip.ops import ConvGeometry, clip_scale
from fastclip.rules.contraction import RoutedRecord
from fastclip.rules.records import ConvRecord, LinearRecord, Record

SHAPES = [(62, 46, 3), (256, 2, 2), (1024, 2, 2), (1600, 3, 3), (512, 16, 16), (8, 3072, 3072),
          (8, 768, 3072), (2, 256, 256), (64, 1, 1), (16, 8192, 48)]  # fmt: skip


def _routed(a: Tensor, g: Tensor) -> Record:
    record = RoutedRecord(a[0], g[0], torch.zeros(a.shape[1], dtype=torch.int64), batch=1)
    record.__dict__["instantiates"] = False
    return record


WAYS = {
    "linear": lambda a, g: LinearRecord(a, g, ghost=True),
    "routed": _routed,
    "conv": lambda a, g: ConvRecord(
        a.mT.contiguous(), g.mT.contiguous(),
        ConvGeometry((g.shape[2], a.shape[2], 1), (1,), (0,), (1,), 1), ghost=True,
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("t", "d", "p"), SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_contribution(way: str, t: int, d: int, p: int, dtype: torch.dtype) -> None:
    """Of operands that hold one number each, where the ghost norm is exact to the last bit or low."""
    worst = 0.0
    for seed in range(12):
        torch.manual_seed(seed)
        x, y = (1 + torch.rand(2)).tolist()
        record = WAYS[way](*(torch.full((1, t, n), v, dtype=dtype) for n, v in ((d, x), (p, y))))
        norm_sq = record.norm_sq()
        strategy = Clipping()
        state = strategy.initial(0.3 * norm_sq.sqrt().item(), 1)
        scale, _ = clip_scale(norm_sq[None], strategy, state)
        contribution = record.clipped_sum(scale).double().square().sum().sqrt().item()
        worst = max(worst, contribution / strategy.sensitivity(state).item())
    assert worst <= 1


def test_what_is_unrelated_is_hardly_raised() -> None:
    torch.manual_seed(0)
    a, g = torch.randn(2, 64, 768), torch.randn(2, 64, 768)
    exact = torch.einsum("btp,btd->bpd", g.double(), a.double()).flatten(1).norm(dim=1)
    assert bool((ops.ghost_norm(a, g).double().sqrt() <= exact * (1 + 2e-5)).all())
