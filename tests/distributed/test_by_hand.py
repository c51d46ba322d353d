"""A model of two ranks that is wrapped by hand, as in Opacus' DDP tutorial."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.distributed import by_hand, world
from tests.oracle import clipped_sum, per_sample_gradients, sample_loss


def test_steps_are_of_all_ranks_rows(tmp_path: Path) -> None:
    """The sum of both ranks' clipped gradients over the public batch size, once."""
    found = world.run(2, "tests.distributed.by_hand:steps", tmp_path, "0.0")
    model = by_hand.network()
    for k in range(2):
        want = clipped_sum(per_sample_gradients(model, by_hand.ROWS, sample_loss), by_hand.C)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= want[name] / by_hand.B
        for rank in found:
            for ours, p in zip(rank["weights"][k], model.parameters(), strict=True):
                torch.testing.assert_close(ours, p.detach(), rtol=1e-10, atol=1e-12)


def test_noise_is_added_once(tmp_path: Path) -> None:
    """Ranks stay alike, and what they add is one draw of the stated size."""
    folders = tmp_path / "noisy", tmp_path / "plain"  # ranks meet by a file there
    for folder in folders:
        folder.mkdir()
    noisy = world.run(2, "tests.distributed.by_hand:steps", folders[0], "4.0")
    plain = world.run(2, "tests.distributed.by_hand:steps", folders[1], "0.0")
    first, second = (torch.cat([w.flatten() for w in rank["weights"][0]]) for rank in noisy)
    assert torch.equal(first, second)
    still = torch.cat([w.flatten() for w in plain[0]["weights"][0]])
    deviation = float((first - still).std()) * by_hand.B / (4.0 * by_hand.C)
    assert 0.7 < deviation < 1.3


def test_a_penalty_is_added_once_by_all_ranks(tmp_path: Path) -> None:
    """FedProx: the ranks' samples are clipped and summed, the distance's gradient comes once."""
    found = world.run(2, "tests.distributed.by_hand:penalized", tmp_path)
    model = by_hand.network()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    for k in range(4):
        want = clipped_sum(per_sample_gradients(model, by_hand.ROWS, sample_loss), by_hand.C)
        with torch.no_grad():
            for (name, p), s in zip(model.named_parameters(), sent, strict=True):
                p -= want[name] / by_hand.B + 0.2 * (p - s)
        for rank in found:
            for ours, p in zip(rank["weights"][k], model.parameters(), strict=True):
                torch.testing.assert_close(ours, p.detach(), rtol=1e-10, atol=1e-12)


def test_the_optimizer_of_one_process_is_refused(tmp_path: Path) -> None:
    for said in world.run(2, "tests.distributed.by_hand:alone", tmp_path):
        assert "DistributedDPOptimizer" in said
