"""A table and an output head of one weight, of which one takes back nearly all of the other."""

from __future__ import annotations

import pytest
import torch

from fastclip.clipping import Clipping
from fastclip.ops import clip_scale
from fastclip.ops.planner import Planner
from fastclip.rules import LinearRecord, LookupRecord, joint_record


@pytest.mark.one_in(2)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("left", [1e-1, 1e-2, 3e-3, 1e-3, 1e-4, 0.0])
@pytest.mark.parametrize(("t", "d"), [(1, 5), (1, 18), (1, 768), (3, 64), (24, 16)])
def test_contribution(t: int, d: int, left: float, positive: bool) -> None:
    """What is left of the two is clipped to C, however little it is."""
    v, strategy, worst = 40, Clipping(), 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        x = 1 + torch.rand(1, t, d) if positive else torch.randn(1, t, d)
        ids = torch.arange(t)[None]
        taken = -(1 - left) * torch.nn.functional.one_hot(ids, v).float()
        record = joint_record(
            [LinearRecord(x, taken), LookupRecord.from_dense(ids, x, v)], Planner()
        )
        norm_sq = record.norm_sq()
        state = strategy.initial(max(0.3 * norm_sq.sqrt().item(), 1e-6), 1)
        scale, _ = clip_scale(norm_sq[None], strategy, state)
        contribution = record.clipped_sum(scale).double().norm().item()
        worst = max(worst, contribution / strategy.sensitivity(state).item())
    assert worst <= 1
