"""Small private trainings of which every number is known beforehand: draws, noise, weights.

The draws of an epoch and the noise of a step are seeded by their numbers, so that a run that goes on
after a fault can be compared, bit for bit, with one that had none. (Nobody should train so: whoever
knows the seeds can take the noise off.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping

ROWS, BATCH, EPOCHS, CLASSES, LETTERS = 32, 8, 2, 3, 11


class Tied(nn.Module):
    """Letters in, a class out: an embedding that is used twice, a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.out = nn.Linear(LETTERS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # [b, t] -> [b, p]
        hidden = self.norm(self.letters(x)) * self.scale  # [b, t, d]
        return self.out(functional.linear(hidden.mean(1), self.letters.weight))


def plain_model() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def numbers() -> Tensor:
    """Rows of a plain model, [n, d]."""
    return torch.randn(ROWS, 6)


def letters() -> Tensor:
    """Rows of a tied model, [n, t]."""
    return torch.randint(LETTERS, (ROWS, 4))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """A step that remembers earlier ones."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """A step of many operations."""
    return torch.optim.Adam(parameters, lr=0.01)


@dataclass(frozen=True)
class Setup:
    """A way to train.

    Args:
        physical: rows of a physical batch; None: all of a draw at once. workers: of the loader.
        mode: None, or one of Opacus'.
    """

    model: Callable[[], nn.Module] = plain_model
    data: Callable[[], Tensor] = numbers
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    clipping: Callable[[], Any] = clipping.adaptive
    physical: int | None = None
    workers: int = 0
    mode: str | None = None


SETUPS = {
    "plain": Setup(),
    "split": Setup(physical=3),
    "tied": Setup(Tied, letters, adam, clipping.dp_sgd),
    "hooks": Setup(optimizer=adam, clipping=lambda: "flat", mode="hooks"),
    "workers": Setup(workers=2),
}


class Run:
    """One training from its start.

    Args:
        setup: a name of `SETUPS`. seed: of weights, rows, draws and noise.
        ledger: its file on the disk; None: in memory only.
        secure: noise that nobody can repeat; then nothing of the run can be compared.
        noise: "own": a generator of its own. "global": a stream that is seeded of torch's.
    """

    def __init__(
        self, setup: str, seed: int, ledger: Path | None = None, *, secure: bool = False,
        noise: str = "own",
    ) -> None:  # fmt: skip
        self.setup, self.seed, self.secure = SETUPS[setup], seed, secure
        torch.manual_seed(seed)
        inner = self.setup.model()
        data = TensorDataset(self.setup.data(), torch.randint(CLASSES, (ROWS,)))
        self.noise_by_step = True
        """The noise of a step is seeded by its number; else it goes on from step to step."""
        self.draws = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator()
        self.noise.manual_seed(1_000_003 + seed)
        self.engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
        own = not secure and noise == "own"
        mode = {} if self.setup.mode is None else {"grad_sample_mode": self.setup.mode}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=inner, optimizer=self.setup.optimizer(inner.parameters()),
            data_loader=DataLoader(
                data, BATCH, generator=self.draws, num_workers=self.setup.workers
            ),
            noise_multiplier=1.0, max_grad_norm=1.0, clipping=self.setup.clipping(),
            noise_generator=self.noise if own else None, **mode,
        )  # fmt: skip
        self.released = 0
        """Inner steps that have ended."""
        self.inner = self.optimizer.original_optimizer
        self.inner.register_step_post_hook(self._release)
        self.on_release: Callable[[], None] = lambda: None
        self.ledger = ledger
        if ledger is not None:
            self.engine.write_ahead(ledger)

    def _release(self, *_: Any) -> None:
        self.released += 1
        self.on_release()

    def epoch(self, number: int) -> Iterator[list[Tensor]]:
        """The physical batches of an epoch."""
        self.loader.batch_sampler.stream().manual_seed(1000 * self.seed + number)
        physical = self.setup.physical
        cut = nullcontext(self.loader) if physical is None else BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=physical, optimizer=self.optimizer
        )  # fmt: skip
        with cut as batches:
            yield from batches

    def batches(self) -> Iterator[tuple[int, list[Tensor]]]:
        """All physical batches of the run, with their numbers."""
        number = 0
        for epoch in range(EPOCHS):
            for batch in self.epoch(epoch):
                yield number, batch
                number += 1

    def step(self, number: int, batch: list[Tensor]) -> None:
        """What a loop does with a physical batch."""
        x, y = batch
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(x), y).backward()
        if self.noise_by_step and not self.secure:
            stream = self.optimizer.noise_source.stream()
            stream.manual_seed(1_000_003 * (self.seed + 1) + number)
        self.optimizer.step()

    def recover(self) -> None:
        """What docs/errors.md ("Step order") asks for; in the fast mode zero_grad is enough."""
        if self.setup.physical is not None or self.setup.mode is not None:
            self.optimizer.discard_logical_batch()

    def weights(self) -> dict[str, Tensor]:
        """A copy."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Any]:
        """All that later steps depend on: weights, the optimizer's memory, thresholds."""
        return {"weights": self.weights(), "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from another run's `state()`."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(state["weights"][name])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


@cache
def undisturbed(setup: str, seed: int) -> list[dict[str, Any]]:
    """The states of a run without faults: at the start, and after each physical batch."""
    run = Run(setup, seed)
    states = [run.state()]
    for number, batch in run.batches():
        run.step(number, batch)
        states.append(run.state())
    return states


def resumed(
    setup: str, seed: int, state: dict[str, Any], at: int, absent: set[int]
) -> dict[str, Any]:
    """Where a new run ends that goes on from `state` behind batch `at`, without those of `absent`."""
    run = Run(setup, seed)
    for number, batch in run.batches():
        if number > at and number not in absent:
            run.step(number, batch)
        else:
            run.recover()
        if number == at:
            run.load(state)
    return run.state()
