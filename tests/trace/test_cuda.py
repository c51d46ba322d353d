"""Traced steps where backward passes run on a thread of the device: whole tests for a card, which a CPU
rehearses.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import GraphError
from tests.oracle import Batch, assert_sums, clipped_sum, per_sample_gradients, summed
from tests.trace.run import CLASSES, C, D, Run, dice, network

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(n, D, device=DEVICE).double(), torch.arange(n, device=DEVICE) % CLASSES


def test_a_step_is_traced_in_both_passes() -> None:
    run = Run(network().to(DEVICE))
    for n in (8, 7, 8):
        x, y = batch(n)
        twin = copy.deepcopy(network()).to(DEVICE)
        twin.load_state_dict({k: v.detach() for k, v in run.plain.state_dict().items()})
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        own = per_sample_gradients(
            twin,
            Batch((x,), target=y),
            loss_fn=lambda z, t: F.cross_entropy(z, t, reduction="none"),
        )
        assert_sums(summed(dict(run.plain.named_parameters())), clipped_sum(own, C), 1e-10)
        run.optimizer.step()
    run.check_traced()
    causes = [read for report in run.engine.explain().steps for read in report.reads]
    assert causes == []


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_mixes_samples_is_seen_in_either_pass(kind: str) -> None:
    """A hook runs in the backward pass, on the thread of the device."""
    run = Run(network().to(DEVICE))
    x, y = batch()
    out = run.model(x)
    if kind == "backward":
        out.register_hook(lambda g: g - g.mean(0))
    loss = F.cross_entropy(out, y) if kind == "backward" else dice(out, y)
    with pytest.raises(GraphError, match="mixes samples"):
        loss.backward()
    run.step(*batch())


def test_a_checkpoint_is_followed_where_it_runs_again() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, 5), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return self.second(torch.tanh(h))

    run = Run(Part().double().to(DEVICE))
    for n in (8, 7):
        run.step(*batch(n))
    run.check_traced()
    out = run.model(batch()[0])
    assert out.device.type == DEVICE
