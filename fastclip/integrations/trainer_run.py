"""The processes, physical batches, checkpoints and budget of a private Trainer's run.

The Trainer wraps its model for several processes (DistributedDataParallel, FSDP2) after it has created
the data loader. A private model must be wrapped before that. Here the same library prepares it together
with the loader, and only once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from opacus.accountants import IAccountant
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import Trainer, TrainerCallback

from fastclip.accounting import epsilon
from fastclip.accounting.steps import History, joined, read_segments
from fastclip.clipping.strategy import in_words
from fastclip.core.system import write_whole
from fastclip.core.torch_names import tree_leaves
from fastclip.data.design import SamplingDesign, records
from fastclip.data.loader import PoissonSampler
from fastclip.data.units import cut_between_units, too_large
from fastclip.distributed.ranks import Ranks
from fastclip.engine.optimizer import FastDPOptimizer
from fastclip.errors import ArgumentError, BatchSizeError

_CLIPPING = "privacy_clipping.pt"
"""File of a checkpoint of shards that holds the clipping strategy's state."""


class RanksTrainer(Trainer):
    """Prepares the model for several processes, and saves and loads their shared state.

    In one process it does the same as the Trainer.
    """

    sampling_generator: torch.Generator
    """Of the loader; it seeds the sampling."""
    private_loader: DataLoader | None = None
    """Set inside train()."""
    _sampler: PoissonSampler | None = None
    _share: DistributedSampler | None = None
    """Shards the samples over processes, without Poisson sampling."""

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train the private model; None if there is one."""
        return self.dp_optimizer.grad_state.clipping.ranks

    @property
    def dp_optimizer(self) -> FastDPOptimizer:
        """The private optimizer, without Accelerate's wrapper."""
        optimizer: Any = self.optimizer
        while optimizer is not None and not isinstance(optimizer, FastDPOptimizer):
            optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            raise ArgumentError(
                "The trainer has no private optimizer before train() starts. Call train() first.",
                doc="integrations",
            )
        return optimizer

    # Before training

    def _prepared(self) -> nn.Module:
        """The model as the processes train it; the optimizer holds its parameters."""
        self.create_optimizer()
        self.optimizer: Any = innermost(self.optimizer)
        model: Any = self.model
        if isinstance(self.model, FSDPModule):  # by an earlier train()
            if not self.is_fsdp_enabled:
                raise ArgumentError(
                    "The model was sharded by fully_shard before the Trainer received it, so the "
                    "Trainer would save and load it as unsharded. Pass the plain model, with "
                    "TrainingArguments(fsdp=True).",
                    doc="sharded-models",
                )
            self.accelerator.prepare_model(model, evaluation_mode=True)  # evaluation needs it
        else:
            _unprepare(model)
            if self.is_fsdp_enabled:
                model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
            elif self.args.world_size > 1:
                # Autocast must be outside the private forward.
                with _without_autocast(self.accelerator):
                    model = self.accelerator.prepare_model(model)
        self.model_wrapped = model
        return model.train()

    def _prepare_for_training(
        self, max_steps: Any, train_dataloader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Keeps the optimizer and the wrapped model that were made with the loader."""
        self._check_sampled(train_dataloader is self.private_loader)
        if self.model_wrapped is not self.model:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)  # autocast alone
        with _optimizer_made(self):
            if not self.is_fsdp_enabled:
                return super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)
            with _models_prepared(self.accelerator):
                return super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)

    def _check_sampled(self, privately: bool) -> None:
        """Raises an error if batches come from a loader of the user's own."""
        if not privately:
            raise ArgumentError(
                f"The loader of {type(self).__name__}.get_train_dataloader is not the private one, or "
                "was changed, so epsilon would not hold. Let it return super().get_train_dataloader() "
                "unchanged, and pass your own train_dataset and data_collator to the trainer.",
                doc="sampling",
            )

    def _shares(self, dataset: Dataset, shuffle: bool) -> dict[str, Any]:
        """Arguments of a loader whose samples are sharded over all processes.

        Args:
            shuffle: samples come in a random order, and each process needs its own shard. If False,
                batches are Poisson-sampled, which shards any loader.
        """
        count = self.args.world_size
        if not shuffle or count == 1:
            return {"batch_size": self._train_batch_size * count, "shuffle": shuffle}
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._share = DistributedSampler(
            dataset, count, self.args.process_index, shuffle=True, seed=seed, drop_last=True
        )
        return {"batch_size": self._train_batch_size, "sampler": self._share}

    def _sample_from(self, loader: DataLoader) -> None:
        """Remembers the sampler of this process, whose stream `seed_sampling` can restart."""
        sampler = loader.batch_sampler
        self._sampler = sampler if isinstance(sampler, PoissonSampler) else None

    def seed_sampling(self, epoch: int) -> None:
        """Seeds the sampling of this epoch from data_seed, if given, differently in each process."""
        if self._share is not None:
            self._share.set_epoch(epoch)
        if self.args.data_seed is None:
            return
        self.sampling_generator.manual_seed(self.args.data_seed + epoch)
        if self._sampler is not None:
            self._sampler.draw_anew()

    # A step

    def _parts(self, batches: list[Any], sizes: list[int], spare: Any) -> list[tuple[Any, int]]:
        """The physical batches of a sampled batch, with their numbers of samples.

        If the model is sharded, all processes get the same number of physical batches.

        Args:
            spare: () -> a placeholder batch of one sample that counts as none.
        """
        parts = list(zip(batches, sizes, strict=True))
        if self.ranks is not None and self.ranks.shards is not None:
            missing = self.ranks.most(len(parts)) - len(parts)
            parts += [(spare(), 0) for _ in range(missing)]
        return parts

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the inner optimizer of a sharded model, because torch steps one to get its state."""
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        with self._inner_optimizer():
            super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            state = self.dp_optimizer.grad_state.clipping.state_dict()
            write_whole(os.path.join(output_dir, _CLIPPING), lambda file: torch.save(state, file))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        with self._inner_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)
        path = os.path.join(checkpoint, _CLIPPING)
        if os.path.isfile(path):
            grad_state = self.dp_optimizer.grad_state
            grad_state.clipping.load_state_dict(
                torch.load(path, weights_only=True), grad_state.batch.fresh
            )

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
    """The user's optimizer without the wrappers of Accelerate and the engine (of an earlier train())."""
    while True:
        inner = getattr(optimizer, "original_optimizer", None) or getattr(
            optimizer, "optimizer", None
        )
        if inner is None:
            return optimizer
        optimizer = inner


def _unprepare(model: nn.Module) -> None:
    """Undoes the preparation of an evaluation or an earlier train(), as Accelerate prepares once."""
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
    """Makes `create_optimizer` return the private optimizer, while the context is open.

    A user's own method may create another optimizer at each call.
    """
    trainer.__dict__["create_optimizer"] = lambda *_, **__: trainer.optimizer
    try:
        yield
    finally:
        del trainer.__dict__["create_optimizer"]


@contextmanager
def _models_prepared(accelerator: Any) -> Iterator[None]:
    """Makes `accelerator.prepare` leave models unchanged, while the context is open.

    Accelerate identifies the parameters of a sharded model by the address of their shard. All empty
    shards have the same address, so the optimizer could get one parameter instead of another.
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


# -------------------------------------------------------------------------------------------------
# A logical batch as the data loader returns it: physical batches, collated one by one.
#
# Each physical batch is padded to its longest sample. That length depends on the other samples of the
# batch, but the loss of a sample must not. The attention mask excludes padded positions from
# attention, and the label -100 excludes them from the loss.


_OF_SAMPLES = (
    "labels", "label", "label_ids", "input_ids", "attention_mask", "token_type_ids", "inputs_embeds",
    "decoder_input_ids", "pixel_values", "input_values", "input_features",
)  # fmt: skip
"""Inputs of transformers' models whose first dimension is the samples."""


class LogicalBatchData(list):
    """The physical batches of one logical batch, in order. Attributes: sizes, their samples."""

    def __init__(self, batches: list[Any], sizes: list[int]) -> None:
        super().__init__(batches)
        self.sizes = sizes


class NumberedSamples:
    """A data set whose samples come with the number of their unit.

    SplitCollate uses the numbers to split between units.

    Args:
        dataset: any with __getitem__.
        unit: int64 [samples], the unit of each sample.
    """

    def __init__(self, dataset: Any, unit: Tensor) -> None:
        self.dataset, self.unit = dataset, unit

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> tuple[int, Any]:
        return int(self.unit[sample]), self.dataset[sample]

    def __getitems__(self, samples: list[int]) -> list[tuple[int, Any]]:
        """Several samples at once, if the data set supports it."""
        read = getattr(self.dataset, "__getitems__", None)
        found = read(samples) if read else [self.dataset[sample] for sample in samples]
        return [(int(self.unit[i]), sample) for i, sample in zip(samples, found, strict=True)]


def by_units(loader: DataLoader, unit: Tensor | None, draws: Any, samples: int | None) -> Any:
    """The data set of a private loader, with the number of each sample's unit if there are units.

    Args:
        unit: int64 [samples], the unit of each sample, or None.
        draws: the sampled batches of the loader.
        samples: maximum number of samples in a physical batch.

    Raises:
        BatchSizeError: a unit may have more samples; raised before training, not when it is sampled.
    """
    if unit is None:
        return loader.dataset
    sampler: Any = loader.batch_sampler  # a UnitSampler, because there are units
    largest = sampler.largest
    if samples is not None and largest > samples:
        raise BatchSizeError(too_large(largest, samples))
    numbered = NumberedSamples(loader.dataset, unit)
    object.__setattr__(loader, "dataset", numbered)
    draws.physical_samples = samples
    return numbered


class SplitCollate:
    """Collates a logical batch into physical ones of at most `samples` samples each.

    They are split as evenly as possible, as in Opacus' BatchMemoryManager. If units are sampled (the
    data set is NumberedSamples), they are split between units, and `SampledBatches.physical_samples`
    must agree. Poisson sampling sometimes draws an empty logical batch. It becomes one physical batch
    with a placeholder sample. The engine knows that the sampled batch is empty, so it contributes
    exactly nothing, and the model need not accept an input without samples.

    Args:
        collate: the user's data collator.
        dataset: gives the placeholder sample its shape.
        samples: maximum number of samples in a physical batch; None never splits.
    """

    def __init__(self, collate: Callable[[list], Any], dataset: Any, samples: int | None) -> None:
        self.collate, self.dataset, self.samples = collate, dataset, samples

    def __call__(self, sampled: list[Any]) -> LogicalBatchData:
        if not sampled:
            return LogicalBatchData([self.placeholder()], [0])
        cuts: Sequence[Sequence[int]]
        if isinstance(self.dataset, NumberedSamples):
            sizes = [len(list(samples)) for _, samples in groupby(sampled, key=itemgetter(0))]
            cuts, sampled = (
                cut_between_units(sizes, self.samples),
                [sample for _, sample in sampled],
            )
        else:
            parts = -(-len(sampled) // (self.samples or len(sampled)))
            cuts = [part.tolist() for part in np.array_split(np.arange(len(sampled)), parts)]
        batches = [self._collated([sampled[i] for i in cut]) for cut in cuts]
        return LogicalBatchData(batches, [len(cut) for cut in cuts])

    def _collated(self, sampled: list[Any]) -> Any:
        batch = self.collate(sampled)
        for found in _sample_counts(batch):
            if found != len(sampled):
                raise ArgumentError(
                    f"The collator returned {found} samples for {len(sampled)} samples of the data set, "
                    "so clipping would not bound each sample's contribution. Join, pack or split "
                    "samples in train_dataset before training.",
                    doc="data-order",
                )
        return batch

    def placeholder(self) -> Any:
        """A placeholder batch of one sample that counts as none."""
        sample = self.dataset[0]
        return self._collated([sample[1] if isinstance(self.dataset, NumberedSamples) else sample])


def _sample_counts(batch: Any) -> list[int]:
    """The numbers of samples that a collated batch holds, by its tensors."""
    if not isinstance(batch, Mapping):
        return [
            len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()
        ][:1]
    tensors = {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    counts = [len(tensors[name]) for name in _OF_SAMPLES if name in tensors]
    return counts or [len(v) for v in tensors.values()][:1]


# -------------------------------------------------------------------------------------------------
# A resumed run keeps its budget, or raises an error before its first step.


_ROUNDING = 1e-6


@dataclass(frozen=True)
class Budget:
    """The budget that was asked for with target_epsilon."""

    epsilon: float
    delta: float
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the accountant's get_epsilon."""

    def check(
        self, accountant: IAccountant, optimizer: FastDPOptimizer, design: SamplingDesign, steps: int,
        fix: str,
    ) -> None:  # fmt: skip
        """Checks that the steps to come, with those already taken, do not exceed the budget.

        make_private_with_epsilon computes noise for a new run, as if nothing had been spent. A resumed
        run may have had another length, batch, noise or strategy before.

        Args:
            accountant: the steps already taken.
            optimizer: the private optimizer, with its noise and stage.
            design: how batches are sampled.
            steps: number of real steps to come.
            fix: second sentence of the message.

        Raises:
            ArgumentError: with the epsilon that would be reached.
        """
        state = optimizer.grad_state.clipping
        sigmas = [
            state.first_multiplier * state.strategy.noise.factor(state.step + ahead)
            for ahead in range(steps)
        ]
        entries = [*accountant.history, *records(design, sigmas)]
        reached = epsilon(entries, self.delta, accountant.mechanism(), **self.options)
        if reached > self.epsilon * (1 + _ROUNDING):
            raise ArgumentError(
                f"{steps} more steps at noise_multiplier={optimizer.noise_multiplier:.6g} would raise "
                f"epsilon, with the steps already taken, to {reached:.4g}, above "
                f"target_epsilon={self.epsilon:g}. {fix}",
                doc="privacy-budget",
            )


# -------------------------------------------------------------------------------------------------
# The privacy state of a Trainer's checkpoint, and the seeds of sampling.


ACCOUNTANT_NAME = "privacy_accountant.json"
"""File of a checkpoint that holds the accountant's state."""

_DIGEST = "file_digest"
"""Key of the digest of everything else in the file."""
_RUN_STRIDE = 1_000_003
"""Distance between the seeds of runs that start one step apart, larger than any number of epochs."""


@dataclass(frozen=True)
class Resumed:
    """The privacy state of a checkpoint, read before this run changes anything."""

    folder: str
    saved: dict[str, Any]
    run: int
    """The number of the checkpoint's run (`AccountedCheckpoints`)."""
    steps: int
    """Number of steps in the checkpoint's ledger."""

    def resumes_sampling(self, recorded: int, rate: float, processes: int) -> bool:
        """Whether this run resumes the sampling of the checkpoint's run.

        It does if batches are sampled as in that run, and no step after the checkpoint is known.

        Args:
            recorded: number of steps in this run's ledger, including those of the checkpoint.
        """
        now = {"sample_rate": rate, "processes": processes}
        same = all(self.saved.get(name, value) == value for name, value in now.items())
        return same and recorded == self.steps

    def check(self, trainer: Any) -> None:
        """Checks that the clipping strategy does not restart.

        Args:
            trainer: the trainer, before its first step.

        Raises:
            ArgumentError: if it would; it names a fix.
        """
        state, done = trainer.dp_optimizer.grad_state.clipping, trainer.state.global_step
        if not state.strategy.constant and state.step != done:
            raise ArgumentError(
                f"{self.folder} has no state of {in_words(state.strategy.kind)} after {done} steps "
                "(save_only_model=True, or another strategy), so its thresholds and noise would "
                "restart. Resume from a checkpoint with the optimizer's state.",
                doc="checkpoints",
            )


def check_budget(trainer: Any, steps: int) -> None:
    """Checks that a run whose ledger holds steps already stays within its budget.

    The steps are those of a checkpoint, of an earlier train(), or of other trainers of the engine.

    Args:
        trainer: the trainer, before its first step.
        steps: number of steps to come.

    Raises:
        ArgumentError: if it would not; it names a fix.
    """
    privacy, resumed = trainer.privacy, trainer.resumed
    if privacy.target_epsilon is None:
        return
    fix = "Raise target_epsilon, or pass noise_multiplier= instead and watch epsilon."
    if resumed is not None:
        before = resumed.saved.get("noise_multiplier", "the run's")
        fix = (
            "Resume with that run's batch, epochs and target, or pass "
            f"noise_multiplier={before} and watch epsilon."
        )
    Budget(privacy.target_epsilon, privacy.target_delta).check(
        trainer.engine.accountant, trainer.dp_optimizer, trainer.engine.sampling, steps, fix
    )


def read_checkpoint(folder: str, accountant: Any) -> Resumed:
    """Reads the privacy cost of a checkpoint's run; the accountant is not changed.

    Raises:
        ArgumentError: the checkpoint has none, or it is of another accountant.
    """
    path = os.path.join(folder, ACCOUNTANT_NAME)
    if not os.path.isfile(path):
        raise ArgumentError(
            f"{folder} has no {ACCOUNTANT_NAME}, so the privacy cost of its run is unknown. Resume "
            "from a checkpoint of a PrivateTrainer.",
            doc="checkpoints",
        )
    with open(path, encoding="utf-8") as file:
        try:
            saved = json.load(file)
        except ValueError:
            saved = None  # read_segments raises an error
    whole = not isinstance(saved, dict) or saved.pop(_DIGEST, None) in (None, _digest(saved))
    held = read_segments(saved if whole else None, accountant.mechanism(), path)
    return Resumed(folder, saved, int(saved.get("run", 0)), _steps(joined(held)))


def _steps(history: History) -> int:
    return sum(steps for *_, steps in history)


def _digest(saved: dict[str, Any]) -> str:
    """The digest of a file's content, with numbers as JSON writes them."""
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


class AccountedCheckpoints(TrainerCallback):
    """Saves the accountant with every checkpoint, checks a resumed run, and seeds the sampling.

    Steps are accounted as if their sampled batches were independent, so no sampled batch may repeat
    under one ledger. Seeds follow from the numbers of the epoch and of the run. The number of a run is
    the number of steps in the ledger when its sampling started. It includes the steps of a killed
    process, through the engine's file (`write_ahead`). A resumed run keeps the number of the
    checkpoint's run only if its ledger is that of the checkpoint.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._newest: int | None = None
        """The latest epoch of the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks a run when everything is loaded and nothing has been released.

        If privacy has been spent already, epsilon is logged before the first step.
        """
        self._newest, trainer = None, self.trainer
        if trainer.resumed is not None:
            trainer.resumed.check(trainer)
        if trainer.engine.accountant.history:
            check_budget(trainer, state.max_steps - state.global_step)
            trainer.log({"epsilon": trainer.epsilon()})

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seeds the epoch as Accelerate does, so a resumed epoch skips the batches sampled before.

        The epoch follows from the number of steps, as in a Trainer that resumes. After an epoch that
        ended early it may be the same number again. The rest then has the number of another run.
        """
        trainer, resumed = self.trainer, self.trainer.resumed
        epoch = state.global_step // len(trainer.private_loader)
        recorded = _steps(trainer.engine.accountant.history)
        how = trainer.mechanism[1], args.world_size
        if (
            self._newest is None
            and resumed is not None
            and resumed.resumes_sampling(recorded, *how)
        ):
            trainer.run_number = resumed.run
        elif self._newest is None or epoch <= self._newest:
            trainer.run_number = recorded
        self._newest = epoch
        trainer.seed_sampling(epoch + _RUN_STRIDE * trainer.run_number)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves the accountant's state next to the optimizer's state."""
        if not state.is_world_process_zero:
            return
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", ACCOUNTANT_NAME)
        trainer = self.trainer
        saved = {
            **trainer.engine.accountant.state_dict(), "run": trainer.run_number,
            "noise_multiplier": trainer.mechanism[0], "sample_rate": trainer.mechanism[1],
            "processes": trainer.args.world_size,
        }  # fmt: skip
        text = json.dumps({**saved, _DIGEST: _digest(saved)})
        write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))
