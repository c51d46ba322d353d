"""What a Trainer is told about privacy, and which of its own arguments are not supported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from fastclip.checks import between
from fastclip.data.plan import SAMPLING
from fastclip.data.unit_ids import unit_numbers
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.explanation import Setup, explain

_WAYS = "Start one process per GPU (torchrun), for DistributedDataParallel or FSDP2 (fsdp=True)"


@dataclass
class PrivacyArguments:
    """The arguments of `make_private`, beside a Trainer's TrainingArguments.

    Attributes:
        per_sample_max_grad_norm: C, the (first) threshold of every row's own gradient. Not the
            TrainingArguments' max_grad_norm, which would clip the noisy mean.
        target_delta: delta of the epsilon that is logged, and of the budget; below 1 / rows.
        noise_multiplier: sigma, if the noise is given.
        target_epsilon: the budget of the whole run, if the noise is to be found; give either.
        clipping: a strategy of fastclip.clipping (a Clipping), or "flat", "per_layer", "adaptive".
        accountant: "prv", "pld", "rdp" or "gdp".
        secure_mode: noise and sampling from ChaCha20 (docs/secure_mode.md).
        poisson_sampling: draw every row independently. Else a pass is accounted as one step of q = 1.
        sample_rate, expected_batch_size, max_batch_size, unit_ids, max_rows_per_unit, unit_reduction: as
            of `make_private`: public q and B, patients as units. unit_ids may be a column's name.
        group_column: the column that holds each row's group, for strategies of groups.
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
    max_rows_per_unit: int | None = None
    unit_reduction: str = "mean"

    def sampling(self, dataset: Any) -> dict[str, Any]:
        """How rows are drawn, for `make_private`; units by number, for a Trainer drops columns."""
        own = [name for name in SAMPLING if hasattr(self, name)]
        found = {name: getattr(self, name) for name in own}
        if self.unit_ids is not None:
            found["unit_ids"] = unit_numbers(self.unit_ids, dataset)
        return found

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ArgumentError(
                "PrivacyArguments expects either noise_multiplier or target_epsilon, got "
                f"noise_multiplier={self.noise_multiplier}, target_epsilon={self.target_epsilon}"
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
            f"{type(privacy).__name__}"
        )
    if args.max_grad_norm not in (None, 0, 1.0):  # 1.0: the default, which says nothing
        raise ArgumentError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) would clip the noisy mean of "
            "the gradients, not the rows' own; the threshold of each row is "
            "PrivacyArguments(per_sample_max_grad_norm=...): leave max_grad_norm at its default"
        )
    for name, (refused, way_out) in _refusals(args, privacy).items():
        if refused:
            raise ArgumentError(f"TrainingArguments({name}) is not supported: {way_out}")


def check_still_private(trainer: Any) -> None:
    """Refuse what was changed after the arguments were checked: by hand, a callback, the environment.

    Raises:
        ArgumentError: with the way out.
    """
    args = trainer.args
    refused, way_out = _counts_tokens(args)
    if refused:
        raise ArgumentError(
            f"trainer.args.include_num_input_tokens_seen is not supported: {way_out}"
        )
    if args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"trainer.args.gradient_accumulation_steps was set to {args.gradient_accumulation_steps}, "
            "which would join several Poisson samples in one step; pass it to TrainingArguments before "
            "the trainer is made"
        )
    if args.max_grad_norm:
        raise ArgumentError(
            f"trainer.args.max_grad_norm was set to {args.max_grad_norm}, which would clip the noisy "
            "mean; leave it, the threshold of each row is per_sample_max_grad_norm"
        )
    kind = getattr(trainer.accelerator.distributed_type, "value", "NO")
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        raise ArgumentError(
            f"Accelerate was told to train by {kind}, which takes the gradients over before they are "
            "clipped; use DistributedDataParallel (its default for several processes) or FSDP2"
        )
    if trainer.accelerator.state.dynamo_plugin.backend.value != "NO":
        raise ArgumentError(
            "Accelerate was told to compile the model (ACCELERATE_DYNAMO_BACKEND, or its own "
            "configuration), which hides the layers whose gradients are clipped; unset it"
        )
    if trainer.accelerator.mixed_precision == "fp16":
        raise ArgumentError(
            "Accelerate was told to use fp16 (ACCELERATE_MIXED_PRECISION, or accelerate's own "
            "configuration), whose loss scaler looks at raw gradients; unset it, or use bf16"
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
        "it writes how many tokens the drawn samples have, without noise, into the log and checkpoints. "
        "Leave it at 'no'"
    )


def _refusals(args: Any, privacy: PrivacyArguments) -> dict[str, tuple[bool, str]]:
    """Argument -> whether it is set, and what to do instead."""

    def of(name: str) -> Any:
        """Not every version of transformers has every argument."""
        return getattr(args, name, None)

    sampling = of("train_sampling_strategy") or "random"
    optimizer = str(getattr(args.optim, "value", args.optim))
    return {
        "fp16=True": (
            bool(of("fp16")),
            "its loss scaler skips steps on overflow, which tells something about raw gradients. "
            "Use bf16=True",
        ),
        "deepspeed": (bool(of("deepspeed")), f"it takes the gradients over. {_WAYS}"),
        "fsdp_config={'version': 1}": (
            bool(of("fsdp")) and int((of("fsdp_config") or {}).get("version", 2)) == 1,
            "its flat parameters hide the layers' own. Use version 2",
        ),
        "parallelism_config": (
            bool(of("parallelism_config")),
            f"it splits layers or samples. {_WAYS}",
        ),
        "n_gpu > 1": (args.n_gpu > 1, f"DataParallel replicates the model. {_WAYS}"),
        "auto_find_batch_size=True": (
            bool(of("auto_find_batch_size")),
            "it would start again with another logical batch after steps were released. Choose "
            "per_device_train_batch_size",
        ),
        f"train_sampling_strategy={sampling!r}": (
            sampling != "random" or bool(of("group_by_length")),
            "samples must be drawn at random, whatever their length. Leave it at 'random'",
        ),
        "dataloader_drop_last=True": (
            bool(of("dataloader_drop_last")) and privacy.poisson_sampling,
            "Poisson sampling draws every sample independently and has no last batch to drop. Leave "
            "it False",
        ),
        "ignore_data_skip=True, data_seed=...": (
            bool(of("ignore_data_skip")) and of("data_seed") is not None,
            "a resumed epoch would begin with the very batches that were drawn before. Omit either",
        ),
        f"include_num_input_tokens_seen={of('include_num_input_tokens_seen')!r}": _counts_tokens(
            args
        ),
        "neftune_noise_alpha": (
            of("neftune_noise_alpha") is not None,
            "it scales a sample's noise by the length that the batch was padded to. Omit it",
        ),
        "use_liger_kernel=True": (
            bool(of("use_liger_kernel")),
            "its fused kernels bypass the layers whose gradients are clipped. Omit it",
        ),
        "torch_compile=True": (
            bool(of("torch_compile")),
            "a model that the Trainer compiles hides the layers whose gradients are clipped. Omit it",
        ),
        f"optim={optimizer!r}": (
            "layerwise" in optimizer or "lomo" in optimizer,
            "it steps inside the backward pass, before noise is added. Use 'adamw_torch'",
        ),
    }
