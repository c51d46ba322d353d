"""Small runs in any mode, and a source of noise that says what it is asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.core.opacus_names import HANDLES, VERSION
from fastclip.data.loader import PoissonSampler
from fastclip.ops.noise import NoiseSource
from tests.oracle import per_sample_gradients, sample_loss

D, B, C = 5, 4, 1e-3
MODES = ("hooks", "functorch", "ew")
ALL = ("fast", *MODES)


def needs_16(lacks: str) -> pytest.MarkDecorator:
    """A test of what Opacus 1.6 has, and the versions before it lack."""
    return pytest.mark.skipif(not HANDLES, reason=f"Opacus {VERSION}: {lacks}")


HANDLE = pytest.param(False, marks=needs_16("its own modes wrap the model"))
"""wrap_model=False in a mode of Opacus'."""


def start(mode: str = "hooks", **kwargs: Any) -> tuple:
    """(net, private model, optimizer, loader): noise 0 and C = 1e-3 unless told otherwise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    data = TensorDataset(torch.randn(32, D))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        engine = FastPrivacyEngine(accountant="rdp")
    options = {"noise_multiplier": 0.0, "max_grad_norm": C, "poisson_sampling": False}
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=B), grad_sample_mode=mode, **options | kwargs,
    )  # fmt: skip
    return net, model, optimizer, loader


def draw_alike(loader: DataLoader, seed: int) -> None:
    """Opacus' Poisson sampler and ours draw the same from generators in the same state."""
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, PoissonSampler):
        sampler.stream().manual_seed(seed)
    elif isinstance(sampler, UniformWithReplacementSampler):
        sampler.generator = torch.Generator().manual_seed(seed)


def rows(seed: int = 1) -> Tensor:
    return torch.randn(B, D, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, x: Tensor | None = None) -> None:
    (1e3 * sample_loss(model(rows() if x is None else x)).mean()).backward()


def gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients of `backward`'s loss, from a twin without hooks."""
    twin = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))
    twin.load_state_dict(net.state_dict())
    return per_sample_gradients(twin, x, lambda y, _: 1e3 * sample_loss(y))


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def moved(net: nn.Module, before: list[Tensor]) -> list[float]:
    return [float((p.detach() - q).norm()) for p, q in zip(net.parameters(), before, strict=True)]


class Recorder(NoiseSource):
    """Draws zeros, and says for which standard deviation."""

    secure = False

    def __init__(self) -> None:
        self.stds: list[float] = []

    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        self.stds.append(std)
        return out.zero_()
