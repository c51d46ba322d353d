"""What a private run expects of Lightning's Trainer, and of the arguments in configure_optimizers."""

from __future__ import annotations

from typing import Any

from fastclip.data.design import epochs_of
from fastclip.errors import ArgumentError
from fastclip.integrations.lightning_ranks import check_strategy

_SET = {
    "grad_sample_mode": (
        "fast",
        "steps of Lightning's closures are followed in the fast mode, whose clipped rows are the same",
    ),
    "wrap_model": (False, "the module must stay the one that Lightning trains"),
    "data_loader": (None, "it is that of the trainer's DPLightningDataModule"),
}
"""Arguments of the engine's make_private that the integration sets: the value, and why."""


def in_place(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, without those that the integration sets itself.

    Raises:
        ArgumentError: another value is asked for.
    """
    for name, (value, why) in _SET.items():
        got = arguments.get(name, value)
        if got is not value and got != value:
            shown = repr(got) if isinstance(got, (str, bool)) else type(got).__name__
            raise ArgumentError(
                f"make_private of fastclip.integrations.lightning sets {name} itself, got {shown}: "
                f"{why}; omit {name}"
            )
    return {name: value for name, value in arguments.items() if name not in _SET}


def length_in_epochs(trainer: Any, steps_an_epoch: int) -> float:
    """The length of the trainer's run, in passes over the data.

    Raises:
        ArgumentError: it is not known.
    """
    if trainer.max_steps is not None and trainer.max_steps > 0:
        return epochs_of(trainer.max_steps, steps_an_epoch)
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        raise ArgumentError("target_epsilon needs the length of the run: Trainer(max_epochs=...)")
    return float(trainer.max_epochs)


def check_trainer(trainer: Any) -> None:
    """Refuse what would couple, scale or skip gradients, or try batches that it cannot get.

    Raises:
        ArgumentError: with the way out.
    """
    check_strategy(trainer.strategy)
    if trainer.world_size > 1 and trainer.overfit_batches:
        raise ArgumentError(
            "overfit_batches repeats the same batches, but each rank draws its share anew; use "
            "limit_train_batches"
        )
    if str(trainer.precision).startswith("16"):
        raise ArgumentError(
            f"Trainer(precision={trainer.precision!r}) scales the loss and skips steps on overflow, "
            "which tells something about raw gradients; use precision='bf16-mixed'"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ArgumentError(
            "accumulate_grad_batches joins several batches in one step, and one batch is one release, "
            "whose rows are drawn anew; leave it at 1 and make the batch larger"
        )
    if trainer.gradient_clip_val:
        raise ArgumentError(
            "gradient_clip_val would clip the mean of the batch, before there is any; each row's "
            "threshold is max_grad_norm: omit gradient_clip_val"
        )
    if any(
        kind.__name__ == "BatchSizeFinder" for c in trainer.callbacks for kind in type(c).__mro__
    ):
        raise ArgumentError(
            "BatchSizeFinder changes batch_size between steps, but a private loader draws at the rate "
            "that the fit has begun with, so that larger batches would not be tried; choose the "
            "batch_size of the data module without it"
        )
