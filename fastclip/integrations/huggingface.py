"""transformers.Trainer with differential privacy: docs/huggingface.md.

The Trainer's loop sees a logical batch as one batch. Each release has one optimizer step, one
scheduler step, one global_step and one log entry. `training_step` splits the logical batch into
physical batches. The model is not wrapped (`wrap_model=False`), so checkpoints, `save_pretrained` and
PEFT see the plain model. When `train()` returns, the model is non-private again.
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
from fastclip.data.sampling import OwnOrder, sampling_law
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
# The privacy arguments of a Trainer, and its own arguments that are not supported.


_WAYS = "Start one process per GPU (torchrun) with DistributedDataParallel or FSDP2 (fsdp=True)."


@dataclass
class PrivacyArguments:
    """The arguments of `make_private`, in addition to a Trainer's TrainingArguments.

    Attributes:
        per_sample_max_grad_norm: C, the (first) clipping threshold of each per-sample gradient. This
            is not the max_grad_norm of TrainingArguments, which clips the noisy mean.
        target_delta: delta of the epsilon that is logged, and of the budget; below 1 / samples.
        noise_multiplier: sigma. Give this or target_epsilon.
        target_epsilon: the budget of the whole run, from which sigma is computed.
        clipping: a strategy of fastclip.clipping (a Clipping), or "flat", "per_layer", "adaptive".
        accountant: "prv", "pld", "rdp" or "gdp".
        secure_mode: noise and sampling from ChaCha20 (docs/secure_mode.md).
        sampling: "poisson" (default), "allocation" or "loader", as in `make_private`.
        poisson_sampling: Opacus' argument. False is sampling="loader", a random order in which a pass
            over the data is accounted as one step with q = 1.
        sample_rate, expected_batch_size, max_batch_size, unit_ids, max_samples_per_unit,
            unit_reduction: as in `make_private` (public q and B, privacy units such as patients).
            unit_ids may be the name of a column.
        group_column: the column with the group of each sample, for strategies with groups.
    """

    per_sample_max_grad_norm: float
    target_delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    clipping: str = "flat"  # or a Clipping; HfArgumentParser would parse a union as the latter
    accountant: str = "prv"
    secure_mode: bool = False
    poisson_sampling: bool | None = None
    group_column: str | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    max_batch_size: int | None = None
    unit_ids: Any = None
    max_samples_per_unit: int | None = None
    unit_reduction: str = "mean"
    sampling: Any = None
    max_rows_per_unit: int | None = None
    """The old name of max_samples_per_unit."""

    def sampling_arguments(self, dataset: Any) -> dict[str, Any]:
        """The sampling arguments of `make_private`.

        Units are given by number, because a Trainer drops columns.
        """
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
        sampling_law(self.sampling, self.poisson_sampling)

    @property
    def own_order(self) -> bool:
        """Whether samples come in a random order, instead of by Poisson sampling or an allocation."""
        return isinstance(sampling_law(self.sampling, self.poisson_sampling), OwnOrder)


def check_training_arguments(args: Any, privacy: Any) -> None:
    """Checks that the arguments of a Trainer are supported.

    Raises:
        ArgumentError: if one is not; it names the argument, the reason and a fix.
    """
    if not isinstance(privacy, PrivacyArguments):
        raise ArgumentTypeError(
            f"privacy expects fastclip.integrations.huggingface.PrivacyArguments, got "
            f"{type(privacy).__name__}."
        )
    if args.max_grad_norm not in (None, 0, 1.0):  # 1.0 is the default, so it was not asked for
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
    """Checks what a user, a callback or the environment may have changed after the first check.

    Raises:
        ArgumentError: if a change is not supported; it names a fix.
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
    """The warnings of `engine.explain` about the data loader and delta."""
    setup = Setup(
        nn.Identity(), data_loader=loader, delta=privacy.target_delta, secure_mode=True,
        sampling={name: sampling[name] for name in SAMPLING if name in sampling},
    )  # fmt: skip
    return iter(explain(setup).traps)


def repeats_noise(generator: torch.Generator | None) -> bool:
    """Whether the generator is at the start of its sequence."""
    if generator is None:
        return False
    start = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(start.get_state(), generator.get_state())


def _counts_tokens(args: Any) -> tuple[bool, str]:
    """Whether the Trainer counts tokens, and what to do instead."""
    counts = getattr(args, "include_num_input_tokens_seen", "no")
    return counts not in (False, None, "no"), (
        "it writes the number of tokens in sampled batches to the log and checkpoints without noise. "
        "Leave it at 'no'."
    )


def _unsupported(args: Any, privacy: PrivacyArguments) -> dict[str, tuple[bool, str]]:
    """Argument -> whether it is set, and what to do instead."""

    def of(name: str) -> Any:
        """The argument, or None in a version of transformers without it."""
        return getattr(args, name, None)

    sampling = of("train_sampling_strategy") or "random"
    optimizer = str(getattr(args.optim, "value", args.optim))
    return {
        "fp16=True": (
            bool(of("fp16")),
            "its loss scaler skips steps on overflow, which reveals raw gradients. Use bf16=True.",
        ),
        "deepspeed": (bool(of("deepspeed")), f"it reads gradients before clipping. {_WAYS}"),
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
            "it restarts with another batch after a release. Choose per_device_train_batch_size.",
        ),
        f"train_sampling_strategy={sampling!r}": (
            sampling != "random" or bool(of("group_by_length")),
            "sampling must not depend on the length of samples. Leave it at 'random'.",
        ),
        "dataloader_drop_last=True": (
            bool(of("dataloader_drop_last")) and not privacy.own_order,
            "sampled batches have no last one to drop. Leave it False.",
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
            "it scales noise by the padded length of the batch, which couples samples. Omit it.",
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
# Training only the biases (DP-BiTFiT) or the head of a pretrained model.
#
# A frozen layer costs nothing. It is not intercepted and has no norm, and below the lowest trained
# layer autograd keeps no activation. If only the bias of a layer is trained, its input is not kept
# either, because the gradient of a bias needs the output gradient alone.


def bias_only(model: nn.Module, head: str | Sequence[str] = ()) -> nn.Module:
    """Freezes everything except the biases (DP-BiTFiT, Bu et al. 2022, arXiv:2210.00036).

    Args:
        model: changed in place; call it before the optimizer is made.
        head: paths of modules that are trained completely, such as "classifier".

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
    """Freezes everything except the head, for linear probing of a frozen backbone.

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
    """Whether it names a bias, also of recurrent and attention layers (bias_ih_l0, in_proj_bias)."""
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
# PEFT's adapters, without importing peft.


def check_adapters(model: nn.Module) -> None:
    """Checks that no trained PEFT adapter is merged into its layer, where it would get no gradient.

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
    """A transformers.Trainer with differentially private training.

    Examples:
        >>> trainer = PrivateTrainer(
        ...     model=model, args=TrainingArguments("out", per_device_train_batch_size=32,
        ...                                         gradient_accumulation_steps=16),
        ...     train_dataset=dataset, eval_dataset=held_out,
        ...     privacy=PrivacyArguments(per_sample_max_grad_norm=1.0, target_epsilon=3.0,
        ...                              target_delta=1e-5))
        >>> trainer.train()

    The expected logical batch is per_device_train_batch_size * gradient_accumulation_steps samples,
    drawn by Poisson sampling. Physical batches hold at most per_device_train_batch_size of them.
    `trainer.args` is a copy in which the logical batch is the batch and nothing is accumulated.

    Args:
        privacy: the arguments of make_private.
        noise_generator: for reproducible runs. If None, the operating system seeds the noise
            generator. TrainingArguments.seed is never used for noise, because it is 42 by default and
            known. Sampling is seeded in the same way unless data_seed is set.
        engine: an engine whose accountant is shared; None makes a new one.
        given: model, args and all other arguments of transformers.Trainer. In
            `class P(PrivateTrainer, T)` they are those of T, which gets them by keyword.
            compute_loss_func may return one loss per sample, [b].

    Raises:
        fastclip.errors.*: for arguments, losses and adapters that are not supported.

    Formal guarantee: `engine.get_epsilon` composes every step taken, including those before a
    checkpoint that was resumed. The privacy unit is one sample of `train_dataset`. Neighbors differ in
    one sample that was added or removed, and batches are Poisson-sampled (see
    `FastPrivacyEngine.get_epsilon`).
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
        self.run_number = 0  # seeds the sampling of this run
        self.mechanism = (0.0, 0.0)  # sigma and q of this run's first step
        self._handle: Any = None
        self.resumed: Resumed | None = None  # the checkpoint that this run resumes
        super().__init__(**{**kwargs, "args": args})
        check_still_private(self)
        self.add_callback(AccountedCheckpoints(self))

    # Before training

    def default_arguments(self) -> TrainingArguments:
        """The arguments of a trainer that was given none."""
        return TrainingArguments("tmp_trainer")

    def check_arguments(self, args: TrainingArguments) -> None:
        """Checks that the arguments are supported.

        Raises:
            ArgumentError: if one is not; it names the argument, the reason and a fix.
        """
        check_training_arguments(args, self.privacy)

    def one_entry_per_sample(self, collate: Callable[[list], Any]) -> Callable[[list], Any]:
        """The data collator whose batches hold one entry per sample of the data set."""
        return collate

    def with_references(self, batch: Any) -> Any:
        """A physical batch with the outputs of a reference model for each sample."""
        return batch

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Trains as `Trainer.train`; a resumed run includes the privacy cost of the checkpoint's run."""
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
        """Raises an error, because every trial and the choice of the best one have a privacy cost."""
        raise ArgumentError(
            "hyperparameter_search reads private data in every trial, and its privacy cost is not "
            "recorded. Run each trial with its own PrivateTrainer, and compute the total with python -m "
            "fastclip.accounting --trials.",
            doc="integrations",
        )

    def get_train_dataloader(self) -> DataLoader:
        """The loader of logical batches; inside `train()` it is the private one."""
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
        prepared = super().get_train_dataloader()  # Accelerate's would sample one batch ahead
        kept = (
            "num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context",
            "prefetch_factor", "persistent_workers",
        )  # fmt: skip
        shares = self._shares(prepared.dataset, shuffle=self.privacy.own_order)
        loader = DataLoader(
            prepared.dataset, generator=self.sampling_generator,
            drop_last=self.args.dataloader_drop_last, **shares,
            **{name: getattr(prepared, name) for name in kept},
            collate_fn=self.one_entry_per_sample(prepared.collate_fn),
        )  # fmt: skip
        return self._make_private(loader) if self._private else loader

    def _make_private(self, loader: DataLoader) -> DataLoader:
        check_adapters(self.model)  # type: ignore[arg-type]
        steps, sampling = self.args.max_steps, self.privacy.sampling_arguments(self.train_dataset)
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
        self._sample_from(private)
        self.private_loader = private
        self.mechanism = (self.dp_optimizer.noise_multiplier, self.engine.sampling.rate)
        if self.resumed:
            self.engine.accountant.load_state_dict(self.resumed.saved)
        return private

    def _generator(self) -> torch.Generator | None:
        if self.engine.secure_mode or self._noise_generator is not None:
            return self._noise_generator
        generator = torch.Generator(device=self.args.device)
        generator.seed()  # rng_state.pth of a checkpoint has the global generators, not this one
        return generator

    # A step

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the forward and backward passes of one logical batch, which the loop's step releases.

        Returns:
            The mean of the samples' losses (not private); 0 for an empty batch.
        """
        check_still_private(self)
        self._check_sampled(isinstance(inputs, LogicalBatchData))
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

    # The Trainer's methods for a batch, for all physical batches of a logical one

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0, because a count would reveal the tokens of sampled batches in checkpoints."""
        return 0

    def num_examples(self, dataloader: DataLoader) -> int:
        """The expected number of samples in a pass, from which speeds are computed.

        The size of the data set itself may be private.
        """
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
        """Adds `epsilon`, and omits `grad_norm`, which is computed before there is a gradient."""
        logs.pop("grad_norm", None)
        if self._private and ("loss" in logs or "train_loss" in logs):
            logs["epsilon"] = self.epsilon()
        super().log(logs, *args, **kwargs)

    def epsilon(self) -> float:
        """Epsilon spent so far at `privacy.target_delta`; infinite if a step had no noise."""
        return self.engine.get_epsilon(self.privacy.target_delta)
