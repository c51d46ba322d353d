"""Another thread calls the model meanwhile, say to evaluate it."""

from __future__ import annotations

from threading import Thread

import torch
from torch import Tensor, nn

from tests.oracle import make_private, sample_loss
from tests.refusal import refused


def test_an_evaluation_at_the_end_of_a_backward_pass() -> None:
    """All has been recorded, and nothing clipped yet: a part of a logical batch would be lost."""
    _, private, _, _ = make_private(nn.Sequential(nn.Linear(5, 5)))
    x = torch.randn(4, 5, requires_grad=True)

    def evaluate() -> None:
        with torch.no_grad():
            private(x)

    def meanwhile(g: Tensor) -> None:
        thread = Thread(target=evaluate)
        thread.start()
        thread.join()

    x.register_hook(meanwhile)
    with refused("Another thread"):
        sample_loss(private(x)).mean().backward()
    private(x.detach())  # as if nothing had been
    sample_loss(private(x.detach())).mean().backward()
