"""One run: an experiment with one strategy (or none), one budget, one seed. Goes on where it was killed.

A run is a function of its arguments: model, draws and noise come from generators that its seed seeds,
and its checkpoint holds their states, so that a run that was killed and started again ends with the
same bits as one that was not. Such a checkpoint tells the noise; it is deleted when the run ends.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as TorchDataset

from bench.papers.data.dataset import Dataset, Rows
from bench.papers.settings import Experiment
from bench.papers.strategies import NON_PRIVATE, STRATEGIES
from fastclip import FastPrivacyEngine
from fastclip.accounting import find_noise_multiplier
from fastclip.clipping import NoiseSchedule
from fastclip.fairness import FairnessRecorder

EVALUATIONS = 10
"""Times that a run is evaluated, the end included."""
AT_ONCE = 1024
"""Rows of an evaluation that go through the network together."""


@dataclass(frozen=True)
class Run:
    """What is run: a row of the results for each measure names it.

    Attributes:
        experiment, strategy: names; the strategy may be "non_private".
        epsilon: target; None: the paper's own noise multiplier, or a run that is not private.
        seed: of the model, the draws and the noise.
        epochs: in place of the experiment's own number.
        lr, lower: in place of the experiment's own, for a search over them.
    """

    experiment: str
    strategy: str
    epsilon: float | None
    seed: int
    epochs: int | None = None
    lr: float | None = None
    lower: float | None = None

    @property
    def key(self) -> str:
        """Names its files."""
        told = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return f"{self.experiment}-{self.strategy}-{self.seed}-{told}"

    def number(self, what: str) -> int:
        """A seed for one of its generators, alike for all strategies and budgets."""
        told = f"{self.experiment} {self.seed} {what}"
        return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7], "big")


@functools.lru_cache
def noise(epsilon: float, delta: float, rate: float, steps: int, schedule: NoiseSchedule) -> float:
    """The noise multiplier that a budget affords: one search a process for all seeds and strategies."""
    return find_noise_multiplier(
        target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, schedule=schedule
    )


class Fetched(list[Tensor]):
    """A batch that was fetched as a whole."""


class TrainingRows(TorchDataset):
    """Rows as a loader wants them: inputs, class, number of the group of each attribute.

    Batches are fetched by one indexing each, row by row they would take longer than the step.
    """

    def __init__(self, rows: Rows) -> None:
        self.tensors = (*rows.x, rows.y, *rows.groups.values())

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(tensor[row] for tensor in self.tensors)

    def __getitems__(self, rows: Sequence[int]) -> Fetched:
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        return Fetched(tensor[chosen] for tensor in self.tensors)

    @staticmethod
    def collate(batch: Any) -> list[Tensor]:
        """The batch as it was fetched; else of single rows."""
        return list(batch) if isinstance(batch, Fetched) else default_collate(batch)


class Trainer:
    """Model, optimizer and loader of a run, private or not, and what is recorded of it."""

    def __init__(self, experiment: Experiment, run: Run, data: Dataset) -> None:
        self.experiment, self.run, self.data = experiment, run, data
        self.private = run.strategy != NON_PRIVATE
        self.training = experiment.training(run.strategy if self.private else None)
        self.epochs = run.epochs or self.training.epochs
        rows = len(data.train)
        batch = min(self.training.batch_size or rows, rows)
        self.physical = experiment.physical_batch or batch
        self.split = self.private and self.physical < batch
        self.draws = torch.Generator().manual_seed(run.number("draws"))
        self.noise = torch.Generator().manual_seed(run.number("noise"))
        torch.manual_seed(run.number("model"))
        self.model: Any = experiment.model(data).train()
        self.network: nn.Module = self.model
        self.loader: Any = DataLoader(
            TrainingRows(data.train), batch, shuffle=not self.private,
            generator=self.draws, collate_fn=TrainingRows.collate,
        )  # fmt: skip
        self.steps = self.epochs * len(self.loader)
        self.engine = FastPrivacyEngine() if self.private else None
        self.optimizer: Any = None
        attributes = {name: tuple(groups) for name, groups in data.attributes.items()}
        self.recorder = FairnessRecorder(attributes, data.classes, experiment.protected)
        self.step = self.epoch = 0
        self._prepare()

    def _prepare(self) -> None:
        """The optimizer; and all three made private."""
        experiment, run = self.experiment, self.run
        groups = len(self.data.attributes[experiment.protected])
        plan = experiment.plan(self.steps, groups, self.split)
        if run.lower is not None:
            plan = type(plan)(**{**vars(plan), "lower": run.lower})
        strategy = STRATEGIES[run.strategy](plan) if self.private else None
        normalized = strategy is not None and getattr(strategy.scale, "normalized", False)
        # At C = C_0 normalized gradients move plain SGD as far as others do; Adam divides it out.
        scale = experiment.max_grad_norm if normalized and self.training.optimizer == "sgd" else 1.0
        self.optimizer = self.training.build(self.model, self.steps, scale)
        if run.lr is not None:
            for part in self.optimizer.param_groups:
                part["lr"] = run.lr
        if self.engine is None:
            return
        c: Any = experiment.max_grad_norm
        if strategy is not None and strategy.threshold.per_layer:
            tensors = sum(p.requires_grad for p in self.model.parameters())
            c = [c / math.sqrt(tensors)] * tensors  # so that the whole gradient is bounded by C_0
        options = {
            "module": self.model, "optimizer": self.optimizer, "data_loader": self.loader,
            "max_grad_norm": c, "clipping": strategy, "noise_generator": self.noise,
        }  # fmt: skip
        sigma = experiment.noise_multiplier
        if run.epsilon is not None and strategy is not None:
            rate = 1 / len(self.loader)
            sigma = noise(run.epsilon, experiment.delta, rate, self.steps, strategy.noise)
        made = self.engine.make_private(noise_multiplier=sigma, **options)
        self.model, self.optimizer, self.loader = made
        self.draws = self.loader.batch_sampler.stream()

    # Training

    def train(self, checkpoint: Path | None, progress: Callable[[int], None]) -> pd.DataFrame:
        """Train to the end, from the checkpoint if there is one.

        Args:
            checkpoint: file that holds the run as of its last evaluation.
            progress: told the number of epochs done.

        Returns:
            The recorder's table.
        """
        if checkpoint is not None and checkpoint.exists():
            self.load(checkpoint)
        often = max(1, self.epochs // EVALUATIONS)
        progress(self.epoch)
        while self.epoch < self.epochs:
            self.pass_over()
            self.epoch += 1
            if self.epoch % often == 0 or self.epoch == self.epochs:
                self.evaluate()
                if checkpoint is not None and self.epoch < self.epochs:
                    self.save(checkpoint)
            progress(self.epoch)
        return self.recorder.frame()

    def pass_over(self) -> None:
        """One pass over the training rows."""
        inputs = len(self.data.train.x)
        names = list(self.data.train.groups)
        with self.batches() as batches:
            for batch in batches:
                x, y, groups = batch[:inputs], batch[inputs], batch[inputs + 1 :]
                self.optimizer.zero_grad()
                if self.engine is None:
                    self.backward(x, y)
                else:
                    of_rows = dict(zip(names, groups, strict=True))
                    self.engine.set_groups(of_rows[self.experiment.protected])
                    losses = self.experiment.loss.rows(self.model(*x), y)
                    (losses.mean() if len(y) else losses.sum()).backward()
                    self.recorder.observe(self.optimizer, of_rows)
                self.optimizer.step()
        self.step += self.steps // self.epochs

    def backward(self, x: Sequence[Tensor], y: Tensor) -> None:
        """Gradient of the mean loss, so many rows at once as a private run takes."""
        for start in range(0, len(y), self.physical):
            part = slice(start, start + self.physical)
            losses = self.experiment.loss.rows(self.model(*(each[part] for each in x)), y[part])
            (losses.sum() / len(y)).backward()

    @contextmanager
    def batches(self) -> Iterator[Any]:
        """Of one pass; physical ones where logical ones are too large."""
        if not self.split:
            yield self.loader
            return
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=self.physical, optimizer=self.optimizer
        ) as loader:
            yield loader

    # Measures

    def evaluate(self) -> None:
        """Losses and classes of the parts, norms and thresholds since the last time."""
        last = self.epoch == self.epochs
        epsilon = None  # on the way, for PRV takes longer than the rest of an evaluation
        if last and self.engine is not None:
            epsilon = self.engine.get_epsilon(self.experiment.delta)
        train = self.data.train if last else None
        parts = {"test": self.data.test, "validation": self.data.validation, "train": train}
        for part, rows in parts.items():
            if rows is not None:
                losses, found = self.outputs(rows)
                self.recorder.evaluate(
                    self.step, losses=losses, predictions=found, labels=rows.y,
                    groups=rows.groups, part=part, epsilon=epsilon,
                )  # fmt: skip
        if self.engine is not None:
            self.recorder.close_period(self.step)
            self.recorder.thresholds(self.step, self.optimizer)

    @torch.no_grad()
    def outputs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Losses and predicted classes, [n] each."""
        self.model.eval()
        loss, losses, classes = self.experiment.loss, [], []
        once = min(AT_ONCE, self.experiment.physical_batch or AT_ONCE)
        for start in range(0, len(rows), once):
            part = slice(start, start + once)
            logits = self.model(*(x[part] for x in rows.x))
            losses.append(loss.rows(logits, rows.y[part]))
            classes.append(loss.classes(logits))
        self.model.train()
        return torch.cat(losses), torch.cat(classes)

    # Checkpoints

    def save(self, path: Path) -> None:
        """Whole whenever it is there."""
        own = {
            "epoch": self.epoch, "step": self.step, "recorder": self.recorder.state_dict(),
            "draws": self.draws.get_state(), "noise": self.noise.get_state(),
            "torch": torch.get_rng_state(),
        }  # fmt: skip
        if self.engine is not None:
            self.engine.save_checkpoint(
                path=path, module=self.model, optimizer=self.optimizer, checkpoint_dict=own
            )
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        part = path.with_suffix(".part")
        torch.save({**own, **state}, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Go on from `save`."""
        if self.engine is not None:
            own = self.engine.load_checkpoint(
                path=path, module=self.model, optimizer=self.optimizer
            )
        else:
            own = torch.load(path, weights_only=True)
            self.model.load_state_dict(own["model"])
            self.optimizer.load_state_dict(own["optimizer"])
        self.epoch, self.step = own["epoch"], own["step"]
        self.recorder.load_state_dict(own["recorder"])
        self.draws.set_state(own["draws"])
        self.noise.set_state(own["noise"])
        torch.set_rng_state(own["torch"])
