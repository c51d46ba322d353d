"""transformers.Trainer with differential privacy: docs/huggingface.md.

A logical batch is what the Trainer's loop sees as one batch, so one optimizer step, one scheduler
step, one global_step and one log entry belong to each release. It is cut into physical batches
inside `training_step`. The model stays itself (`wrap_model=False`), so checkpoints, `save_pretrained`
and PEFT see the plain model; when `train()` returns, its layers are ordinary again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fastclip._moved import new_keywords
from fastclip.clipping import Clipping
from fastclip.core.checks import between
from fastclip.data.collate import EmptyBatches
from fastclip.data.design import epochs_of
from fastclip.data.plan import SAMPLING
from fastclip.data.units import unit_numbers
from fastclip.engine.explanation import Setup, explain
from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError, UnsupportedLayerError, say
from fastclip.integrations.trainer_loss import Checked, SampleLossTrainer, by_name
from fastclip.integrations.trainer_run import (
    ACCOUNTANT_NAME,
    AccountedCheckpoints,
    LogicalBatchData,
    Resumed,
    SplitCollate,
    by_units,
    innermost,
    read_checkpoint,
)

# -------------------------------------------------------------------------------------------------
# What a Trainer is told about privacy, and which of its own arguments are not supported.


_WAYS = "Start one process per GPU (torchrun) with DistributedDataParallel or FSDP2 (fsdp=True)."


@dataclass
class PrivacyArguments:
    """The arguments of `make_private`, beside a Trainer's TrainingArguments.

    Attributes:
        per_sample_max_grad_norm: C, the (first) threshold of every sample's own gradient. Not the
            TrainingArguments' max_grad_norm, which would clip the noisy mean.
        target_delta: delta of the epsilon that is logged, and of the budget; below 1 / samples.
        noise_multiplier: sigma, if the noise is given.
        target_epsilon: the budget of the whole run, if the noise is to be found; give either.
        clipping: a strategy of fastclip.clipping (a Clipping), or "flat", "per_layer", "adaptive".
        accountant: "prv", "pld", "rdp" or "gdp".
        secure_mode: noise and sampling from ChaCha20 (docs/secure_mode.md).
        poisson_sampling: draw every sample independently. Else a pass is accounted as one step of q = 1.
        sample_rate, expected_batch_size, max_batch_size, unit_ids, max_samples_per_unit,
            unit_reduction: as of `make_private`: public q and B, patients as units. unit_ids may be a
            column's name.
        group_column: the column that holds each sample's group, for strategies of groups.
    """

    per_sample_max_grad_norm: float
    target_delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    clipping: str = "flat"  # or a Clipping; HfArgumentParser would parse a union as the latter
    accountant: str = "prv"
    secure_mode: bool = False
    poisson_sampling: bool = True
    group_column: str | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    max_batch_size: int | None = None
    unit_ids: Any = None
    max_samples_per_unit: int | None = None
    unit_reduction: str = "mean"
    max_rows_per_unit: int | None = None
    """The old name of max_samples_per_unit."""

    def sampling(self, dataset: Any) -> dict[str, Any]:
        """How samples are drawn, for `make_private`; units by number, for a Trainer drops columns."""
        own = [name for name in SAMPLING if hasattr(self, name)]
        found = {name: getattr(self, name) for name in own}
        if self.unit_ids is not None:
            found["unit_ids"] = unit_numbers(self.unit_ids, dataset)
        return found

    def __post_init__(self) -> None:
        if self.max_rows_per_unit is not None:
            old = {"max_rows_per_unit": self.max_rows_per_unit}
            self.max_samples_per_unit = new_keywords(old)["max_samples_per_unit"]
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ArgumentError(
                "PrivacyArguments expects either noise_multiplier or target_epsilon, got "
                f"noise_multiplier={self.noise_multiplier}, target_epsilon={self.target_epsilon}."
            )
        between("target_delta", self.target_delta, 0, 1)


def check_training_arguments(args: Any, privacy: Any) -> None:
    """Refuse what a Trainer may be asked for and is not supported.

    Raises:
        ArgumentError: naming the argument, why, and the way out.
    """
    if not isinstance(privacy, PrivacyArguments):
        raise ArgumentTypeError(
            f"privacy expects fastclip.integrations.huggingface.PrivacyArguments, got "
            f"{type(privacy).__name__}."
        )
    if args.max_grad_norm not in (None, 0, 1.0):  # 1.0: the default, which says nothing
        raise ArgumentError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) clips the noisy mean of the "
            "gradients, not the gradient of each sample. Leave max_grad_norm at its default and set "
            "PrivacyArguments(per_sample_max_grad_norm=...).",
            doc="integrations",
        )
    for name, (asked, reason) in _unsupported(args, privacy).items():
        if asked:
            raise ArgumentError(
                f"TrainingArguments({name}) is not supported: {reason}", doc="integrations"
            )


def check_still_private(trainer: Any) -> None:
    """Refuse what was changed after the arguments were checked: by hand, a callback, the environment.

    Raises:
        ArgumentError: with the way out.
    """
    args = trainer.args
    asked, reason = _counts_tokens(args)
    if asked:
        raise ArgumentError(
            f"trainer.args.include_num_input_tokens_seen is not supported: {reason}",
            doc="integrations",
        )
    if args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"trainer.args.gradient_accumulation_steps was set to {args.gradient_accumulation_steps}, "
            "which joins several sampled batches in one step. Pass it to TrainingArguments before you "
            "create the trainer.",
            doc="integrations",
        )
    if args.max_grad_norm:
        raise ArgumentError(
            f"trainer.args.max_grad_norm was set to {args.max_grad_norm}, which clips the noisy "
            "mean of the gradients. Leave it unset and use per_sample_max_grad_norm.",
            doc="integrations",
        )
    kind = getattr(trainer.accelerator.distributed_type, "value", "NO")
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        raise ArgumentError(
            f"Accelerate is configured to train with {kind}, which reads gradients before they are "
            "clipped. Use DistributedDataParallel (its default for several processes) or FSDP2.",
            doc="integrations",
        )
    if trainer.accelerator.state.dynamo_plugin.backend.value != "NO":
        raise ArgumentError(
            "Accelerate is configured to compile the model, which hides its layers from the clipping. "
            "Unset ACCELERATE_DYNAMO_BACKEND, or the backend in accelerate's own configuration.",
            doc="integrations",
        )
    if trainer.accelerator.mixed_precision == "fp16":
        raise ArgumentError(
            "Accelerate is configured to use fp16, whose loss scaler reads raw gradients. Unset "
            "ACCELERATE_MIXED_PRECISION, or fp16 in accelerate's own configuration, or use bf16.",
            doc="integrations",
        )


def loader_traps(
    loader: DataLoader, privacy: PrivacyArguments, sampling: dict[str, Any]
) -> Iterator[str]:
    """What `engine.explain` would say of the data loader and of delta."""
    setup = Setup(
        nn.Identity(), data_loader=loader, delta=privacy.target_delta, secure_mode=True,
        sampling={name: sampling[name] for name in SAMPLING if name in sampling},
    )  # fmt: skip
    return iter(explain(setup).traps)


def repeats_noise(generator: torch.Generator | None) -> bool:
    """A generator at the very start of its sequence."""
    if generator is None:
        return False
    start = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(start.get_state(), generator.get_state())


def _counts_tokens(args: Any) -> tuple[bool, str]:
    """Whether the Trainer is to count tokens, and what to do instead."""
    counts = getattr(args, "include_num_input_tokens_seen", "no")
    return counts not in (False, None, "no"), (
        "it writes the number of tokens in sampled batches to the log and checkpoints without noise. "
        "Leave it at 'no'."
    )


def _unsupported(args: Any, privacy: PrivacyArguments) -> dict[str, tuple[bool, str]]:
    """Argument -> whether it is set, and what to do instead."""

    def of(name: str) -> Any:
        """Not every version of transformers has every argument."""
        return getattr(args, name, None)

    sampling = of("train_sampling_strategy") or "random"
    optimizer = str(getattr(args.optim, "value", args.optim))
    return {
        "fp16=True": (
            bool(of("fp16")),
            "its loss scaler skips steps on overflow, which reveals raw gradients. Use bf16=True.",
        ),
        "deepspeed": (
            bool(of("deepspeed")),
            f"it reads gradients before they are clipped. {_WAYS}",
        ),
        "fsdp_config={'version': 1}": (
            bool(of("fsdp")) and int((of("fsdp_config") or {}).get("version", 2)) == 1,
            "its flat parameters hide those of the layers. Use version 2.",
        ),
        "parallelism_config": (
            bool(of("parallelism_config")),
            f"it splits layers or samples. {_WAYS}",
        ),
        "n_gpu > 1": (args.n_gpu > 1, f"DataParallel replicates the model. {_WAYS}"),
        "auto_find_batch_size=True": (
            bool(of("auto_find_batch_size")),
            "it restarts with another logical batch after steps were released. Choose "
            "per_device_train_batch_size.",
        ),
        f"train_sampling_strategy={sampling!r}": (
            sampling != "random" or bool(of("group_by_length")),
            "sampling must not depend on the length of samples. Leave it at 'random'.",
        ),
        "dataloader_drop_last=True": (
            bool(of("dataloader_drop_last")) and privacy.poisson_sampling,
            "Poisson sampling draws every sample independently and has no last batch to drop. Leave "
            "it False.",
        ),
        "ignore_data_skip=True, data_seed=...": (
            bool(of("ignore_data_skip")) and of("data_seed") is not None,
            "a resumed epoch would repeat the sampled batches from its start. Omit either.",
        ),
        f"include_num_input_tokens_seen={of('include_num_input_tokens_seen')!r}": _counts_tokens(
            args
        ),
        "neftune_noise_alpha": (
            of("neftune_noise_alpha") is not None,
            "it scales each sample's noise by the padded length of the batch, so samples are coupled. "
            "Omit it.",
        ),
        "use_liger_kernel=True": (
            bool(of("use_liger_kernel")),
            "its fused kernels bypass the layers whose gradients are clipped. Omit it.",
        ),
        "torch_compile=True": (
            bool(of("torch_compile")),
            "compiling hides the layers whose gradients are clipped. Omit it.",
        ),
        f"optim={optimizer!r}": (
            "layerwise" in optimizer or "lomo" in optimizer,
            "it steps inside the backward pass, before noise is added. Use 'adamw_torch'.",
        ),
    }


# -------------------------------------------------------------------------------------------------
# Which parameters of a pretrained model are trained: its biases (DP-BiTFiT), or its head.
#
# A frozen layer costs nothing: it is not intercepted, has no norm to compute, and below the lowest
# trained layer autograd keeps no activation. Where only a bias is trained, a layer's own input is
# not kept either: the gradient of the output is all that a bias needs.


def bias_only(model: nn.Module, head: str | Sequence[str] = ()) -> nn.Module:
    """Freeze everything but the biases: DP-BiTFiT (Bu et al. 2022, arXiv:2210.00036).

    Args:
        model: changed in place; call it before the optimizer is made.
        head: paths of modules that are trained whole, such as "classifier".

    Returns:
        The same model.

    Raises:
        ArgumentError: if the model has no bias, or no module of that path.
    """
    biases = [name for name, _ in model.named_parameters() if _is_bias(name)]
    if not biases:
        raise ArgumentError(
            f"{type(model).__name__} has no bias to train. Use LoRA or head_only(model, head).",
            doc="no-trainable-parameters",
        )
    return _train_only(model, set(biases) | _parameters_of(model, head))


def head_only(model: nn.Module, head: str | Sequence[str]) -> nn.Module:
    """Freeze everything but the head: linear probing of a frozen backbone.

    Args:
        model: changed in place; call it before the optimizer is made.
        head: paths of the modules that are trained, such as "classifier" or ["pooler", "head"].

    Returns:
        The same model.

    Raises:
        ArgumentError: if there is no module of that path, or it has no parameters.
    """
    return _train_only(model, _parameters_of(model, head))


def _is_bias(name: str) -> bool:
    """Also the biases of recurrent and attention layers: bias_ih_l0, in_proj_bias."""
    own = name.rpartition(".")[2]
    return own.startswith("bias") or own.endswith("bias")


def _parameters_of(model: nn.Module, paths: str | Sequence[str]) -> set[str]:
    """Names of the parameters under these paths."""
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for path in [paths] if isinstance(paths, str) else paths:
        own = {name for name in names if name.startswith(f"{path}.")}
        if not own:
            tops = dict.fromkeys(name.partition(".")[0] for name in names)
            raise ArgumentError(
                f"head={path!r} is not a module of {type(model).__name__} with parameters. Pass the "
                f"path of one of its modules: {', '.join(tops)}.",
                doc="no-trainable-parameters",
            )
        found |= own
    return found


def _train_only(model: nn.Module, names: set[str]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model


# -------------------------------------------------------------------------------------------------
# PEFT's adapters, looked at without importing peft.


def check_adapters(model: nn.Module) -> None:
    """Refuse PEFT adapters that are merged into their layer: their own matrices would get no gradient.

    Raises:
        UnsupportedLayerError: naming the layer.
    """
    for path, module in model.named_modules():
        merged = module.__dict__.get("merged_adapters")
        if merged and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedLayerError(
                f"{path} ({type(module).__name__}) has adapters {merged} merged into its frozen "
                "weight, so their gradients would be noise only. Call model.unmerge_adapter() first.",
                doc="integrations",
            )


# -------------------------------------------------------------------------------------------------


__all__ = ["ACCOUNTANT_NAME", "PrivacyArguments", "PrivateTrainer"]


class PrivateTrainer(SampleLossTrainer):
    """A transformers.Trainer whose training is differentially private, sample by sample.

    Examples:
        >>> trainer = PrivateTrainer(
        ...     model=model, args=TrainingArguments("out", per_device_train_batch_size=32,
        ...                                         gradient_accumulation_steps=16),
        ...     train_dataset=dataset, eval_dataset=held_out,
        ...     privacy=PrivacyArguments(per_sample_max_grad_norm=1.0, target_epsilon=3.0,
        ...                              target_delta=1e-5))
        >>> trainer.train()

    The expected logical batch is per_device_train_batch_size * gradient_accumulation_steps samples,
    drawn by Poisson sampling; physical batches hold at most per_device_train_batch_size of them.
    `trainer.args` is a copy in which the logical batch is the batch and nothing is accumulated.

    Args:
        privacy: what make_private takes.
        noise_generator: for reproducible runs; without it noise comes
            from a generator seeded by the operating system, never from TrainingArguments.seed, which
            is 42 by default and known. Batches are drawn the same way unless data_seed is set.
        engine: to share an accountant; a new one if None.
        given: model, args and all else as of transformers.Trainer, or of the trainer that stands behind
            this one (`class P(PrivateTrainer, T)`), which gets them by keyword; compute_loss_func may
            return one loss a sample, [b].

    Raises:
        fastclip.errors.*: for arguments, losses and adapters that are not supported.

    Formal guarantee: `engine.get_epsilon` composes every step taken, those before a checkpoint that
    was resumed included. The unit is one sample of `train_dataset`; neighbors differ in one that was
    added or removed, and samples are drawn by Poisson sampling (see `FastPrivacyEngine.get_epsilon`).
    """

    def __init__(
        self, *given: Any, privacy: PrivacyArguments,
        noise_generator: torch.Generator | None = None,
        engine: FastPrivacyEngine | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        named = by_name(type(self), given)
        if twice := sorted({*named} & {*kwargs}):
            raise ArgumentTypeError(f"{twice[0]} was given by position and by keyword. Omit one.")
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
                    "A strategy with thresholds='same_step' needs the whole logical batch at once. Use "
                    "thresholds='previous_step', or gradient_accumulation_steps=1.",
                    doc="unsupported-options",
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
        """The data collator whose batches hold one entry per sample of the data set."""
        return collate

    def with_references(self, batch: Any) -> Any:
        """A physical batch with what another model says of its samples, one by one."""
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
                    "noise_generator is at the start of its sequence, so the resumed run may repeat "
                    "the noise of the first steps. Restore the generator's state (set_state), or seed "
                    "it differently.",
                    doc="repeated-noise",
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
            "hyperparameter_search reads private data in every trial, and its privacy cost is not "
            "recorded. Run each trial with its own PrivateTrainer, and compute the total with python -m "
            "fastclip.accounting --trials.",
            doc="integrations",
        )

    def get_train_dataloader(self) -> DataLoader:
        """The loader of logical batches; within `train()` the private one."""
        if isinstance(self.train_dataset, IterableDataset):
            raise ArgumentError(
                "train_dataset is an IterableDataset, from which Poisson sampling cannot draw samples. "
                "Pass a train_dataset with a length.",
                doc="sampling",
            )
        if type(self)._get_train_sampler is not Trainer._get_train_sampler:
            raise ArgumentError(
                f"{type(self).__name__} overrides _get_train_sampler, but batches are sampled from the "
                "whole train_dataset. Pass only the samples to train on as train_dataset.",
                doc="sampling",
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
            self.dp_optimizer.grad_state.model_loss.label_smoothing = smoothing
        draws, unit = self.dp_optimizer.grad_state.batch.draws, sampling["unit_ids"]
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
            The mean of its samples' losses (not private); 0 for an empty batch.
        """
        check_still_private(self)
        self._check_drawn(isinstance(inputs, LogicalBatchData))
        optimizer, batches = self.dp_optimizer, inputs
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float32, device=self.args.device)
        parts = self._parts(batches, batches.sizes, self._placeholder)
        for number, (batch, samples) in enumerate(parts, start=1):
            more = number < len(parts)
            optimizer.signal_skip_step(more)
            if number > len(batches):
                optimizer.grad_state.batch.fill()
            if samples:
                batch = self.with_references(batch)
                optimizer.grad_state.trace.handed(batches, batch, {samples})
            loss = super().training_step(model, batch)  # no num_items_in_batch: it couples samples
            if samples:
                total += loss * samples
            if more:
                optimizer.step()
                optimizer.zero_grad()
        return total / max(sum(batches.sizes), 1)

    # What the Trainer does with a batch, for all physical batches of a logical one

    def floating_point_ops(self, inputs: Any) -> int:
        """0: they would count the tokens of the samples drawn, in the state that checkpoints hold."""
        return 0

    def num_examples(self, dataloader: DataLoader) -> int:
        """Samples expected in a pass, of which speeds are told; the data set's may be nobody's
        to know."""
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
