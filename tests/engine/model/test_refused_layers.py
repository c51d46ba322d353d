"""What cannot be trained privately is refused by name when the model is made private."""

from __future__ import annotations

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from tests.oracle import make_private

BLOCK = {
    "batch-norm": (lambda: nn.BatchNorm1d(6), "BatchNorm"),
    "instance-norm-with-statistics": (
        lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        "InstanceNorm|running",
    ),
    "embedding-max-norm": (lambda: nn.Embedding(6, 6, max_norm=1.0), "max_norm"),
    "embedding-by-frequency": (
        lambda: nn.Embedding(6, 6, scale_grad_by_freq=True),
        "scale_grad_by_freq",
    ),
    "bag-max-norm": (lambda: nn.EmbeddingBag(6, 6, max_norm=1.0), "max_norm"),
    "bag-by-frequency": (
        lambda: nn.EmbeddingBag(6, 6, scale_grad_by_freq=True, mode="sum"),
        "scale_grad_by_freq",
    ),
}


@pytest.mark.parametrize("block", BLOCK)
def test_refused_and_untouched(block: str) -> None:
    make, named = BLOCK[block]
    model = nn.Sequential(nn.Linear(6, 6), make())
    forwards = [module.forward for module in model.modules()]
    with pytest.raises(UnsupportedModuleError, match=named):
        make_private(model)
    assert [module.forward for module in model.modules()] == forwards
    assert all(getattr(p, "summed_grad", None) is None for p in model.parameters())


def test_the_fixed_model_is_accepted() -> None:
    from fastclip import FastPrivacyEngine

    model = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.Flatten(), nn.Linear(64, 2))
    fixed = FastPrivacyEngine.get_compatible_module(model)
    private = make_private(fixed)[1]
    private(torch.randn(4, 3, 2)).square().mean().backward()
    assert all(p.summed_grad.abs().sum() > 0 for p in fixed.parameters())


def test_a_model_in_evaluation_mode() -> None:
    with pytest.raises(UnsupportedModuleError, match="training"):
        make_private(nn.Linear(6, 3).eval())


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match=r"(?i)parameters"):
        make_private(nn.Linear(6, 3), optimizer_params=list(nn.Linear(6, 3).parameters()))


def test_the_checkpoint_does_not_give_the_noise_away() -> None:
    """Neither the generator's state nor the noise multiplier is in a state_dict."""
    model = nn.Linear(6, 3)
    generator = torch.Generator().manual_seed(11)
    _, private, optimizer, _ = make_private(model, noise_multiplier=1.25, noise_generator=generator)
    private(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    plain = torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    assert optimizer.state_dict()["param_groups"][0].keys() == plain.param_groups[0].keys()
    assert private.state_dict().keys() == {"_module.weight", "_module.bias"}
