"""transformers.Trainer with differential privacy: docs/huggingface.md.

A logical batch is what the Trainer's loop sees as one batch, so one optimizer step, one scheduler
step, one global_step and one log entry belong to each release. It is cut into physical batches
inside `training_step`. The model stays itself (`wrap_model=False`), so checkpoints, `save_pretrained`
and PEFT see the plain model; when `train()` returns, its layers are ordinary again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fastclip.clipping import Clipping
from fastclip.data.design import epochs_of
from fastclip.data.empty import EmptyBatches
from fastclip.engine import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError, say
from fastclip.integrations.adapters import check_adapters
from fastclip.integrations.arguments import (
    PrivacyArguments,
    check_still_private,
    check_training_arguments,
    loader_traps,
    repeats_noise,
)
from fastclip.integrations.checkpoints import (
    ACCOUNTANT_NAME,
    AccountedCheckpoints,
    Resumed,
    read_checkpoint,
)
from fastclip.integrations.physical import LogicalBatchData, SplitCollate, by_units
from fastclip.integrations.row_losses import Checked
from fastclip.integrations.trainer_loss import RowLossTrainer, by_name
from fastclip.integrations.trainer_ranks import innermost

__all__ = ["ACCOUNTANT_NAME", "PrivacyArguments", "PrivateTrainer"]


class PrivateTrainer(RowLossTrainer):
    """A transformers.Trainer whose training is differentially private, row by row.

    Examples:
        >>> trainer = PrivateTrainer(
        ...     model=model, args=TrainingArguments("out", per_device_train_batch_size=32,
        ...                                         gradient_accumulation_steps=16),
        ...     train_dataset=dataset, eval_dataset=held_out,
        ...     privacy=PrivacyArguments(per_sample_max_grad_norm=1.0, target_epsilon=3.0,
        ...                              target_delta=1e-5))
        >>> trainer.train()

    The expected logical batch is per_device_train_batch_size * gradient_accumulation_steps rows, drawn
    by Poisson sampling; physical batches hold at most per_device_train_batch_size of them.
    `trainer.args` is a copy in which the logical batch is the batch and nothing is accumulated.

    Args:
        privacy: what make_private takes.
        noise_generator: for reproducible runs; without it noise comes
            from a generator seeded by the operating system, never from TrainingArguments.seed, which
            is 42 by default and known. Batches are drawn the same way unless data_seed is set.
        engine: to share an accountant; a new one if None.
        given: model, args and all else as of transformers.Trainer, or of the trainer that stands behind
            this one (`class P(PrivateTrainer, T)`), which gets them by keyword; compute_loss_func may
            return one loss a row, [b].

    Raises:
        fastclip.errors.*: for arguments, losses and adapters that are not supported.

    Formal guarantee: `engine.get_epsilon` composes every step taken, those before a checkpoint that
    was resumed included. The unit is one row of `train_dataset`; neighbours differ in one that was
    added or removed, and rows are drawn by Poisson sampling (see `FastPrivacyEngine.get_epsilon`).
    """

    def __init__(
        self, *given: Any, privacy: PrivacyArguments,
        noise_generator: torch.Generator | None = None,
        engine: FastPrivacyEngine | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        named = by_name(type(self), given)
        if twice := sorted({*named} & {*kwargs}):
            raise ArgumentTypeError(f"{twice[0]} was given by position and by keyword; omit either")
        kwargs = {**named, **kwargs}
        args = kwargs.get("args")
        args = self.default_arguments() if args is None else copy.copy(args)
        self.privacy = privacy
        self.check_arguments(args)
        self.physical_batch_size: int | None = args.per_device_train_batch_size
        strategy: Any = privacy.clipping
        if isinstance(strategy, Clipping) and strategy.threshold.same_step:
            if args.gradient_accumulation_steps > 1:
                raise ArgumentError(
                    "a strategy with thresholds='same_step' needs the whole logical batch at once; use "
                    "thresholds='previous_step', or gradient_accumulation_steps=1"
                )
            self.physical_batch_size = None
        args.per_device_train_batch_size *= args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.max_grad_norm = 0.0
        self.engine = engine or FastPrivacyEngine(
            accountant=privacy.accountant, secure_mode=privacy.secure_mode
        )
        self._noise_generator = noise_generator
        self.sampling_generator = torch.Generator()
        self.sampling_generator.seed()
        self.run_number = 0  # which the draws of this run follow from
        self.mechanism = (0.0, 0.0)  # sigma and q of this run's first step
        self._handle: Any = None
        self.resumed: Resumed | None = None  # what this run goes on from
        super().__init__(**{**kwargs, "args": args})
        check_still_private(self)
        self.add_callback(AccountedCheckpoints(self))

    # Before training

    def default_arguments(self) -> TrainingArguments:
        """Of a trainer that was given none."""
        return TrainingArguments("tmp_trainer")

    def check_arguments(self, args: TrainingArguments) -> None:
        """Refuse what is not supported.

        Raises:
            ArgumentError: naming the argument, why, and the way out.
        """
        check_training_arguments(args, self.privacy)

    def rows_of(self, collate: Callable[[list], Any]) -> Callable[[list], Any]:
        """The data collator whose batches hold one row for each row of the data set."""
        return collate

    def with_references(self, batch: Any) -> Any:
        """A physical batch with what another model says of its rows, one by one."""
        return batch

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As `Trainer.train`; a resumed run goes on with what the checkpoint's run has spent."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self.resumed = None
        if resume_from_checkpoint and resume_from_checkpoint is not True:
            self.resumed = read_checkpoint(str(resume_from_checkpoint), self.engine.accountant)
            if repeats_noise(self._noise_generator):
                say(
                    "noise_generator is at the start of its sequence, so a resumed run would add the "
                    "noise of the first steps again if that run had this seed; restore the generator's "
                    "state yourself (set_state), or seed it differently"
                )
        self._private, self._checked = True, Checked()
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._private, self.private_loader = False, None
            if self._handle is not None:
                self._handle.cleanup()
                self.model.__dict__.pop("_original_forward", None)  # Accelerate's, for bf16
                self._handle = None

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial spends, and so does choosing the best."""
        raise ArgumentError(
            "hyperparameter_search looks at private data in every trial; python -m fastclip.accounting "
            "--trials prices such a search, each trial being a PrivateTrainer of its own"
        )

    def get_train_dataloader(self) -> DataLoader:
        """The loader of logical batches; within `train()` the private one."""
        if isinstance(self.train_dataset, IterableDataset):
            raise ArgumentError(
                "an IterableDataset cannot be sampled row by row; pass a train_dataset with a length"
            )
        if type(self)._get_train_sampler is not Trainer._get_train_sampler:
            raise ArgumentError(
                f"{type(self).__name__} overrides _get_train_sampler, but batches are drawn from all "
                "rows of train_dataset: pass the rows to train on as train_dataset"
            )
        prepared = super().get_train_dataloader()  # Accelerate's would draw one batch ahead
        kept = (
            "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers",
        )  # fmt: skip
        shares = self._shares(prepared.dataset, shuffle=not self.privacy.poisson_sampling)
        loader = DataLoader(
            prepared.dataset, generator=self.sampling_generator,
            drop_last=self.args.dataloader_drop_last, **shares,
            **{name: getattr(prepared, name) for name in kept},
            collate_fn=self.rows_of(prepared.collate_fn),
        )  # fmt: skip
        return self._make_private(loader) if self._private else loader

    def _make_private(self, loader: DataLoader) -> DataLoader:
        check_adapters(self.model)  # type: ignore[arg-type]
        steps, sampling = self.args.max_steps, self.privacy.sampling(self.train_dataset)
        for trap in loader_traps(loader, self.privacy, sampling):
            say(trap)
        arguments: dict[str, Any] = {
            "module": self._prepared(), "optimizer": innermost(self.optimizer),
            "data_loader": loader, "max_grad_norm": self.privacy.per_sample_max_grad_norm,
            "clipping": self.privacy.clipping, "noise_generator": self._generator(),
            "wrap_model": False, **sampling,
            "model_loss": "own" if self.compute_loss_func is not None else "per_sample",
        }  # fmt: skip
        if self.privacy.target_epsilon is None:
            made = self.engine.make_private(
                noise_multiplier=self.privacy.noise_multiplier,  # type: ignore[arg-type]
                **arguments,
            )
        else:
            a_pass = self.engine.plan_sampling(loader, **sampling).steps
            epochs = epochs_of(steps, a_pass) if steps > 0 else self.args.num_train_epochs
            made = self.engine.make_private_with_epsilon(
                target_epsilon=self.privacy.target_epsilon,
                target_delta=self.privacy.target_delta,
                epochs=epochs,  # type: ignore[arg-type]
                **arguments,
            )
        self._handle, self.optimizer, private = made
        if self.compute_loss_func is None:
            smoothing = self.args.label_smoothing_factor
            self.dp_optimizer.keeper.model_loss.label_smoothing = smoothing
        draws, unit = self.dp_optimizer.keeper.batch.draws, sampling["unit_ids"]
        dataset = by_units(private, unit, draws, self.physical_batch_size)
        collate: Any = private.collate_fn
        collate = collate.checked if isinstance(collate, EmptyBatches) else collate
        private.collate_fn = SplitCollate(collate, dataset, self.physical_batch_size)
        self._placeholder = private.collate_fn.placeholder
        self._draw_from(private)
        self.private_loader = private
        self.mechanism = (self.dp_optimizer.noise_multiplier, self.engine.sampling.rate)
        if self.resumed:
            self.engine.accountant.load_state_dict(self.resumed.saved)
        return private

    def _generator(self) -> torch.Generator | None:
        if self.engine.secure_mode or self._noise_generator is not None:
            return self._noise_generator
        generator = torch.Generator(device=self.args.device)
        generator.seed()  # a checkpoint's rng_state.pth holds the global generators', not this one's
        return generator

    # A step

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward passes of one logical batch; the loop's optimizer step releases it.

        Returns:
            The mean of its rows' losses (not private); 0 for an empty batch.
        """
        check_still_private(self)
        self._check_drawn(isinstance(inputs, LogicalBatchData))
        optimizer, batches = self.dp_optimizer, inputs
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float32, device=self.args.device)
        parts = self._parts(batches, batches.sizes, self._placeholder)
        for number, (batch, rows) in enumerate(parts, start=1):
            more = number < len(parts)
            optimizer.signal_skip_step(more)
            if number > len(batches):
                optimizer.keeper.batch.fill()
            if rows:
                batch = self.with_references(batch)
                optimizer.keeper.trace.handed(batches, batch, {rows})
            loss = super().training_step(model, batch)  # no num_items_in_batch: it couples rows
            if rows:
                total += loss * rows
            if more:
                optimizer.step()
                optimizer.zero_grad()
        return total / max(sum(batches.sizes), 1)

    # What the Trainer does with a batch, for all physical batches of a logical one

    def floating_point_ops(self, inputs: Any) -> int:
        """0: they would count the tokens of the rows drawn, in the state that checkpoints hold."""
        return 0

    def num_examples(self, dataloader: DataLoader) -> int:
        """Rows expected in a pass, of which speeds are told; the data set's may be nobody's to know."""
        if dataloader is not self.private_loader:
            return super().num_examples(dataloader)
        design = self.engine.sampling
        return round(design.steps * design.expected_batch_size)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        groups = inputs.pop(self.privacy.group_column or "", None)
        if groups is not None and self._private and self.model.training:  # type: ignore[union-attr]
            self.engine.set_groups(groups)
        return inputs

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        if self.privacy.group_column and self.privacy.group_column not in columns:
            columns.append(self.privacy.group_column)

    # After a step

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Adds `epsilon`; leaves out `grad_norm`, which is computed before there is a gradient."""
        logs.pop("grad_norm", None)
        if self._private and ("loss" in logs or "train_loss" in logs):
            logs["epsilon"] = self.epsilon()
        super().log(logs, *args, **kwargs)

    def epsilon(self) -> float:
        """Spent so far, at `privacy.target_delta`; infinite where a step had no noise."""
        return self.engine.get_epsilon(self.privacy.target_delta)
