"""What an experiment is: data, network, loss, and how both runs, private and not, are trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.papers.data.dataset import Dataset
from bench.papers.strategies import STRATEGIES, Plan


@dataclass(frozen=True)
class Loss:
    """Row by row: cross entropy of k logits, or of one logit where the network has one.

    Attributes:
        weights: of the classes; a row's loss is multiplied by that of its class, and divided by
            nothing that depends on other rows.
    """

    weights: tuple[float, ...] | None = None

    def rows(self, logits: Tensor, y: Tensor) -> Tensor:
        """Losses [b] of logits [b, k] or [b, 1]."""
        weights = None if self.weights is None else logits.new_tensor(self.weights)
        if logits.shape[1] > 1:
            return F.cross_entropy(logits, y, weights, reduction="none")
        losses = F.binary_cross_entropy_with_logits(
            logits[:, 0], y.to(logits.dtype), reduction="none"
        )
        return losses if weights is None else losses * weights[y]

    def classes(self, logits: Tensor) -> Tensor:
        """Predicted classes, int64 [b]."""
        return logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()


@dataclass(frozen=True)
class Training:
    """How a run is trained.

    Attributes:
        optimizer: "sgd" or "adam".
        lr: learning rate, or a function of the number of steps.
        batch_size: expected size of a logical batch; None: all rows.
        epochs: passes over the training rows.
        options: further arguments of the optimizer (momentum, weight_decay).
    """

    optimizer: str
    lr: float | Callable[[int], float]
    batch_size: int | None
    epochs: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def told(self, rows: int, epochs: int | None) -> dict[str, Any]:
        """For results: what a run over so many rows really does."""
        batch = min(self.batch_size or rows, rows)
        passes = epochs or self.epochs
        steps = passes * -(-rows // batch)
        lr = self.lr(steps) if callable(self.lr) else self.lr
        return {"optimizer": self.optimizer, "lr": lr, "batch_size": batch, "epochs": passes,
                "steps": steps, **self.options}  # fmt: skip

    def build(self, model: nn.Module, steps: int, scale: float = 1.0) -> torch.optim.Optimizer:
        """The optimizer of what is trained; `scale` multiplies the learning rate."""
        lr = scale * (self.lr(steps) if callable(self.lr) else self.lr)
        trained = [p for p in model.parameters() if p.requires_grad]
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        return kinds[self.optimizer](trained, lr=lr, **self.options)


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Attributes:
        name, title: in commands, in reports.
        paper: whose settings these are, with the place.
        load: reads the data set from a folder (None: needs none).
        generate: writes generated files of the same schema into a folder; None where data need no
            folder.
        model: builds the network for the data.
        protected: the attribute whose groups the strategies of groups know.
        private, non_private: how runs are trained.
        max_grad_norm: C_0.
        delta, epsilons: of the budget; epsilons are those that are run without --epsilon.
        loss: row by row.
        noise_multiplier: the paper's own sigma, in place of a target epsilon; None: it has none.
        lower: C_LB; None: a tenth of C_0.
        cutoff: first Z of the global strategies.
        physical_batch: rows that go through the network at once; None: the whole logical batch.
        overrides: of a strategy, what its own settings replace in `private` ("lr").
        notes: what differs from the paper, a sentence each.
    """

    name: str
    title: str
    paper: str
    load: Callable[[Path | None], Dataset]
    generate: Callable[[Path], None] | None
    model: Callable[[Dataset], nn.Module]
    protected: str
    private: Training
    max_grad_norm: float
    delta: float
    epsilons: tuple[float, ...]
    non_private: Training | None = None
    loss: Loss = Loss()
    noise_multiplier: float | None = None
    lower: float | None = None
    cutoff: float = 50.0
    physical_batch: int | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def training(self, strategy: str | None) -> Training:
        """Of a private run, or of the run without privacy (None)."""
        if strategy is None:
            return self.non_private or self.private
        return replace(self.private, **self.overrides.get(strategy, {}))

    def plan(self, steps: int, groups: int, split: bool) -> Plan:
        """What strategies are built from."""
        c = self.max_grad_norm
        lower = 0.1 * c if self.lower is None else self.lower
        return Plan(steps, groups, c, lower, self.cutoff, split)

    def told(self, data: Dataset, epochs: int | None) -> dict[str, Any]:
        """For results: every setting that a run depends on, its strategy apart.

        Args:
            epochs: in place of the experiment's own number.
        """
        rows = len(data.train)
        model = self.model(data)
        network = hashlib.sha256(str(model).encode()).hexdigest()[:12]
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {
            "private": self.private.told(rows, epochs),
            "non_private": self.training(None).told(rows, epochs),
            "overrides": {name: dict(of) for name, of in self.overrides.items()},
            "model": f"{trained} trained parameters, structure {network}",
            "weights of classes": None if self.loss.weights is None else list(self.loss.weights),
            "max_grad_norm": self.max_grad_norm, "delta": self.delta, "protected": self.protected,
            "noise_multiplier": self.noise_multiplier, "physical_batch": self.physical_batch,
        }  # fmt: skip

    def told_of(
        self, strategies: Sequence[str], data: Dataset, epochs: int | None
    ) -> dict[str, str]:
        """Of each strategy, what it is built as."""
        of = self.private.told(len(data.train), epochs)
        split = self.physical_batch is not None and self.physical_batch < of["batch_size"]
        plan = self.plan(of["steps"], len(data.attributes[self.protected]), split)
        return {name: repr(STRATEGIES[name](plan)) for name in strategies if name in STRATEGIES}


def by_name(experiments: Sequence[Experiment]) -> dict[str, Experiment]:
    """A table of experiments."""
    table = {experiment.name: experiment for experiment in experiments}
    assert len(table) == len(experiments), "two experiments share a name"
    return table
