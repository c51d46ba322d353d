"""A private network with its loader, and what its traced steps must show."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from tests.oracle import Batch, assert_sums, clipped_sum, per_sample_gradients, summed

ROWS, BATCH, D, CLASSES, C = 40, 8, 4, 3, 0.5
PROVEN = {"proven", "values", "path"}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def rows(n: int = ROWS) -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, D, generator=g).double(), torch.arange(n) % CLASSES)


class Run:
    """A private network with its loader; nothing is added to the sums but what was clipped."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.plain = model or network()
        self.engine = FastPrivacyEngine(accountant="rdp")
        loader = options.pop("loader", None) or DataLoader(rows(), batch_size=BATCH)
        options = {"noise_multiplier": 0.0, "poisson_sampling": False, **options}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.plain, optimizer=torch.optim.SGD(self.plain.parameters(), lr=0.1),
            data_loader=loader, max_grad_norm=C, **options,
        )  # fmt: skip

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    def check_sums(self, x: Tensor, y: Tensor) -> None:
        """What the last pass has summed is what these samples give one at a time."""
        assert_sums(self.sums, clipped(self.plain, x, y), 1e-10)

    def check_traced(self, steps: int = 2, verdict: str = "proven") -> None:
        proof = self.engine.explain()
        assert [report.verdict for report in proof.steps] == [verdict] * steps, str(proof)
        assert all(report.uses for report in proof.steps)
        assert proof.unproven == ()

    @property
    def sums(self) -> dict[str, Tensor]:
        return summed(dict(self.plain.named_parameters()))

    @property
    def held(self) -> list[Any]:
        return [getattr(p, "summed_grad", None) for p in self.plain.parameters()]


def clipped(
    plain: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None = None
) -> dict[str, Tensor]:
    """One sample at a time, of the weights as they are. weights: of the samples' losses."""
    twin = network()
    twin.load_state_dict({k: v.detach() for k, v in plain.state_dict().items()})
    own = {"loss_fn": lambda out, y: F.cross_entropy(out, y, reduction="none")}
    found = per_sample_gradients(twin, Batch((x,), target=y), **own)
    if weights is not None:
        found = {k: g * weights.view([-1] + [1] * (g.dim() - 1)) for k, g in found.items()}
    return clipped_sum(found, C)


def dice(out: Tensor, y: Tensor) -> Tensor:
    """Of the batch, not of each sample."""
    p, t = out.softmax(-1), F.one_hot(y, out.shape[-1]).to(out)
    return 1 - (2 * (p * t).sum() / (p.sum() + t.sum()))
