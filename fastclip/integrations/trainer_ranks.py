"""A transformers.Trainer whose model is private in every process that trains it.

The Trainer wraps its model for several processes (DistributedDataParallel, FSDP2) after it has asked for
the data loader. A private model must be wrapped before: here it is prepared with the loader, by the same
library, and not once more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import Trainer

from fastclip.data.sampling import PoissonSampler
from fastclip.errors import ArgumentError
from fastclip.files import write_whole
from fastclip.optim.optimizer import FastDPOptimizer
from fastclip.parallel.ranks import Ranks

_CLIPPING = "privacy_clipping.pt"
"""File of a checkpoint of shards that holds the clipping strategy's state."""


class RanksTrainer(Trainer):
    """Prepares the model for its processes, saves and loads what they share.

    In one process it does what the Trainer does.
    """

    sampling_generator: torch.Generator
    """Of the loader; draws of rows are seeded from it."""
    private_loader: DataLoader | None = None
    """Within train()."""
    _drawing: PoissonSampler | None = None
    _share: DistributedSampler | None = None
    """What deals rows out to processes, without Poisson sampling."""

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train the private model; None for one."""
        return self.dp_optimizer.keeper.clipping.ranks

    @property
    def dp_optimizer(self) -> FastDPOptimizer:
        """The private optimizer, without Accelerate's wrapper."""
        optimizer: Any = self.optimizer
        while optimizer is not None and not isinstance(optimizer, FastDPOptimizer):
            optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            raise ArgumentError("there is no private optimizer before train() has begun")
        return optimizer

    # Before training

    def _prepared(self) -> nn.Module:
        """The model as its processes train it, from which the optimizer has its parameters."""
        self.create_optimizer()
        self.optimizer: Any = innermost(self.optimizer)
        model: Any = self.model
        if isinstance(self.model, FSDPModule):  # by an earlier train()
            if not self.is_fsdp_enabled:
                raise ArgumentError(
                    "the model was spread by fully_shard before the Trainer got it, which would save "
                    "and load it as if it were whole; pass it plain, with TrainingArguments(fsdp=True)"
                )
            self.accelerator.prepare_model(model, evaluation_mode=True)  # an evaluation asks for it
        else:
            _unprepare(model)
            if self.is_fsdp_enabled:
                model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
            elif self.args.world_size > 1:
                # Autocast is to be around the private forward.
                with _without_autocast(self.accelerator):
                    model = self.accelerator.prepare_model(model)
        self.model_wrapped = model
        return model.train()

    def _prepare_for_training(
        self, max_steps: Any, train_dataloader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """What was made with the loader (the optimizer, the wrapped model) is not made once more."""
        self._check_drawn(train_dataloader is self.private_loader)
        if self.model_wrapped is not self.model:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)  # autocast alone
        with _optimizer_made(self):
            if not self.is_fsdp_enabled:
                return super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)
            with _models_prepared(self.accelerator):
                return super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)

    def _check_drawn(self, privately: bool) -> None:
        """Refuse batches of a loader of the user's own."""
        if not privately:
            raise ArgumentError(
                f"the loader of {type(self).__name__}.get_train_dataloader is not the one that draws "
                "rows privately, or was changed: let it return super().get_train_dataloader() as it is; "
                "pass the rows to train on as train_dataset, and what joins them as data_collator"
            )

    def _shares(self, dataset: Dataset, shuffle: bool) -> dict[str, Any]:
        """Arguments of a loader whose rows are drawn by all processes together.

        Args:
            shuffle: rows come in a random order, and each process needs a share of its own; else they
                are drawn by Poisson sampling, which gives shares of any loader.
        """
        count = self.args.world_size
        if not shuffle or count == 1:
            return {"batch_size": self._train_batch_size * count, "shuffle": shuffle}
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._share = DistributedSampler(
            dataset, count, self.args.process_index, shuffle=True, seed=seed, drop_last=True
        )
        return {"batch_size": self._train_batch_size, "sampler": self._share}

    def _draw_from(self, loader: DataLoader) -> None:
        """This process draws from a stream of its own, which `seed_draws` can begin anew."""
        sampler = loader.batch_sampler
        self._drawing = sampler if isinstance(sampler, PoissonSampler) else None

    def seed_draws(self, epoch: int) -> None:
        """The draws of this epoch follow from data_seed, if there is one: other ones in each process."""
        if self._share is not None:
            self._share.set_epoch(epoch)
        if self.args.data_seed is None:
            return
        self.sampling_generator.manual_seed(self.args.data_seed + epoch)
        if self._drawing is not None:
            self._drawing.draw_anew()

    # A step

    def _parts(self, batches: list[Any], sizes: list[int], spare: Any) -> list[tuple[Any, int]]:
        """The physical batches of a draw, and their rows; equally many in all processes if need be.

        Args:
            spare: () -> a batch of one row, which stands for none.
        """
        parts = list(zip(batches, sizes, strict=True))
        if self.ranks is not None and self.ranks.shards is not None:
            missing = self.ranks.most(len(parts)) - len(parts)
            parts += [(spare(), 0) for _ in range(missing)]
        return parts

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Of shards: the inner optimizer's, for torch asks an optimizer for a step to know its state."""
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        with self._inner_optimizer():
            super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = self.dp_optimizer.keeper.clipping.state_dict()
            write_whole(os.path.join(output_dir, _CLIPPING), lambda file: torch.save(state, file))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        with self._inner_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)
        path = os.path.join(checkpoint, _CLIPPING)
        if os.path.isfile(path):
            keeper = self.dp_optimizer.keeper
            keeper.clipping.load_state_dict(torch.load(path, weights_only=True), keeper.batch.fresh)

    @contextmanager
    def _inner_optimizer(self) -> Iterator[None]:
        private = self.optimizer
        self.optimizer = AcceleratedOptimizer(
            self.dp_optimizer.original_optimizer, device_placement=False
        )
        try:
            yield
        finally:
            self.optimizer = private


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The user's optimizer: of an earlier train(), without Accelerate's and the engine's wrappers."""
    while True:
        inner = getattr(optimizer, "original_optimizer", None) or getattr(
            optimizer, "optimizer", None
        )
        if inner is None:
            return optimizer
        optimizer = inner


def _unprepare(model: nn.Module) -> None:
    """As before an evaluation or an earlier train(): Accelerate prepares no model twice."""
    model.__dict__.pop("_is_accelerate_prepared", None)
    original = model.__dict__.pop("_original_forward", None)  # beneath autocast
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)
    elif original is not None:
        model.__dict__["forward"] = original


@contextmanager
def _without_autocast(accelerator: Any) -> Iterator[None]:
    before, accelerator.native_amp = accelerator.native_amp, False
    try:
        yield
    finally:
        accelerator.native_amp = before


@contextmanager
def _optimizer_made(trainer: Trainer) -> Iterator[None]:
    """Inside, `create_optimizer` returns the private one: a user's own may make another at each call."""
    trainer.__dict__["create_optimizer"] = lambda *_, **__: trainer.optimizer
    try:
        yield
    finally:
        del trainer.__dict__["create_optimizer"]


@contextmanager
def _models_prepared(accelerator: Any) -> Iterator[None]:
    """Inside, `accelerator.prepare` leaves models as they are.

    Of a model that is spread already, Accelerate tells parameters by the address of their shard, which
    is the same for all that are empty, and would hand the optimizer one in the place of another.
    """

    def prepare(*given: Any, **_: Any) -> Any:
        ready = tuple(
            accelerator.prepare_optimizer(each) if isinstance(each, torch.optim.Optimizer) else each
            for each in given
        )
        return ready if len(ready) > 1 else ready[0]

    accelerator.prepare = prepare
    try:
        yield
    finally:
        del accelerator.prepare
