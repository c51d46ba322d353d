"""What an optimizer shows may be changed by whoever draws or logs it: no noise follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.engine.optimizer import STATE
from tests.engine.optimizer.test_step_hooks import start
from tests.oracle import sample_loss

DOCS = Path(__file__).parents[3] / "docs"
SHOWN = ("threshold", "sensitivity", "group_weights", "noisy_counts")
STRATEGIES: dict[str, Any] = {
    "flat": clipping.dp_sgd(),
    "adaptive": clipping.adaptive(),
    "per layer": clipping.per_layer(),
    "groups": clipping.dpsgd_f(2),
    "reweighting": clipping.naive_reweighting(2),
}


def begun(strategy: str) -> tuple[Any, Any]:
    """(optimizer, its generator) with one step behind it and the sums of the next one."""
    torch.manual_seed(2)
    engine, model = FastPrivacyEngine(), nn.Linear(6, 2)
    generator = torch.Generator().manual_seed(3)
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(24, 6)), 6), noise_multiplier=1.0,
        max_grad_norm=[0.5, 0.5] if strategy == "per layer" else 1.0, poisson_sampling=False,
        clipping=STRATEGIES[strategy], noise_generator=generator,
    )  # fmt: skip
    for last in (False, True):
        optimizer.zero_grad()
        engine.set_groups(torch.arange(6) % 2)
        sample_loss(private(torch.randn(6, 6))).mean().backward()
        if not last:
            optimizer.step()
    return optimizer, generator


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_changing_it_changes_no_noise(strategy: str) -> None:
    gradients: list[list[Tensor]] = []
    for change in (False, True):
        optimizer, generator = begun(strategy)
        shown = {name: getattr(optimizer, name) for name in SHOWN}
        assert sum(x is not None for x in shown.values()) >= 2
        if change:
            for x in shown.values():
                if x is not None:
                    x.cpu().numpy().fill(1e-3)
        generator.manual_seed(7)
        optimizer.pre_step()
        gradients.append([p.grad.clone() for p in optimizer.params])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_of_an_old_loop_does_nothing(strategy: str, set_to_none: bool) -> None:
    """As docs/own_loop.md says: the norm of no gradients is 0, and the step is as without it."""
    found: list[list[Tensor]] = []
    for clips in (False, True):
        optimizer, _ = begun(strategy)
        optimizer.original_optimizer.zero_grad(set_to_none=set_to_none)
        if clips:
            assert nn.utils.clip_grad_norm_(optimizer.params, 1e-3) == 0
        optimizer.step()
        found.append([p.grad.clone() for p in optimizer.params])
    assert all(map(torch.equal, *found))
    assert any(p.abs().max() > 1e-3 for p in found[0])


@pytest.mark.parametrize("page", ["own_loop", "pitfalls", "troubleshooting", "migrating"])
def test_pages_name_it(page: str) -> None:
    assert "clip_grad_norm_" in (DOCS / f"{page}.md").read_text()


def test_a_state_that_was_loaded_is_not_the_callers() -> None:
    optimizer, _ = begun("adaptive")
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    before = optimizer.grad_state.clipping.next.threshold.clone()
    tensors = [x for x in saved[STATE].values() if isinstance(x, Tensor)]
    assert tensors
    for x in tensors:
        x.fill_(1e-3)
    assert torch.equal(optimizer.grad_state.clipping.next.threshold, before)


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_a_refused_step_leaves_nothing_to_release_by_hand(mode: str) -> None:
    """`add_noise` by hand is recorded, and is the one release of its sums."""
    engine, private, optimizer = start(mode)

    def full(_: Any) -> None:
        raise OSError("no space left on device")

    account, optimizer.batch.account = optimizer.batch.account, full
    sample_loss(private(torch.randn(6, 6))).mean().backward()
    with pytest.raises(OSError, match="no space"):
        optimizer.step()
    assert not optimizer.releasing
    optimizer.batch.account = account
    assert not engine.accountant.history


def test_a_step_that_is_refused_before_it_is_recorded() -> None:
    engine, private, optimizer = start("fast")
    parameter = optimizer.params[0]
    sample_loss(private(torch.randn(6, 6))).mean().backward()
    parameter.summed_grad = parameter.summed_grad * 2
    with pytest.raises(Exception, match=r"errors\.html#changed-tensors"):
        optimizer.step()
    optimizer.zero_grad()
    sample_loss(private(torch.randn(6, 6))).mean().backward()
    optimizer.add_noise()
    assert sum(steps for _, _, steps in engine.accountant.history) == 1
    with pytest.raises(Exception, match="haven't been cleared"):
        optimizer.step()
