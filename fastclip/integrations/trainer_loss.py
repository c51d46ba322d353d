"""A transformers.Trainer whose training loss is the mean of its rows' own losses."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.integrations.row_losses import FIX, WAY_OUT, Checked, check_function, rows_of
from fastclip.integrations.trainer_ranks import RanksTrainer

_ENDS = ("start_positions", "end_positions")
_OF_TRL = ("PrivateDPOTrainer", "PrivateSFTTrainer")
"""What fastclip.integrations.trl has."""


class RowLossTrainer(RanksTrainer):
    """Trains on the model's own loss per sample (model_loss of make_private), or on compute_loss_func,
    and checks that this keeps samples apart.

    Evaluation, and everything outside of private training, is the Trainer's own.

    Raises:
        ArgumentError: for a compute_loss of another class than transformers.Trainer, before this one in
            the method resolution order, or behind it, where there is no compute_loss_func.
    """

    _private = False
    """Inside a private train()."""
    serves: tuple[type, ...] = ()
    """Classes behind this one in whose place its own `_training_loss` gives samples' losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if type(self).compute_loss is not RowLossTrainer.compute_loss:
            raise ArgumentError(
                f"{type(self).__name__} overrides compute_loss, so that nothing would check that its "
                f"loss keeps rows apart; {WAY_OUT}"
            )
        self._checked = Checked()
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is None:
            self._check_behind()

    def _check_behind(self) -> None:
        """No class behind this one has a loss of its own, which would not be trained on."""
        for kind in _behind(type(self)):
            if kind in (Trainer, *self.serves) or "compute_loss" not in vars(kind):
                continue
            private, way_out = f"Private{kind.__name__}", WAY_OUT
            if private in _OF_TRL and kind.__module__.startswith("trl."):
                way_out = f"use fastclip.integrations.trl.{private}, or {WAY_OUT}"
            raise ArgumentError(
                f"{kind.__name__}.compute_loss stands behind PrivateTrainer, which trains on rows' "
                f"own losses in its place; {way_out}"
            )

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """The mean of the samples' own losses while training; the Trainer's own loss elsewhere."""
        # of a dict of labels the Trainer would give compute_loss_func none
        plain = self.compute_loss_func is None or not isinstance(self._labels(inputs), dict)
        if plain and not (self._private and model.training):
            return super().compute_loss(model, inputs, return_outputs)
        loss, outputs = self._training_loss(model, inputs)
        return (loss, outputs) if return_outputs else loss

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        if self.compute_loss_func is not None:
            return self._given_loss(model, dict(inputs))
        if self.label_smoother is None:
            found: Any = Trainer.compute_loss(self, model, inputs, return_outputs=True)
            return found
        if isinstance(self._labels(inputs), dict):
            raise ArgumentError(
                f"label_smoothing_factor expects one label a token or sample. {FIX}"
            )
        outputs = model(**inputs)  # which takes it into account
        if not self.dp_optimizer.keeper.model_loss.replaced:
            raise ArgumentError(
                f"label_smoothing_factor needs a cross entropy that the model computes. {FIX}"
            )
        return (outputs["loss"] if isinstance(outputs, dict) else outputs[0]), outputs

    def _given_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """By compute_loss_func."""
        labels = self._labels(inputs)
        inputs.pop("labels", None)
        outputs = model(**inputs)
        given = {**inputs, "labels": labels}
        rows = rows_of(given)
        losses = self._own_losses(outputs, labels, rows)
        if self._private and model.training and self._checked.due(given):
            check_function(lambda o, y: self._own_losses(o, y, None), outputs, given)
            self._checked.done(given)
        return losses.mean(), outputs

    def _own_losses(self, outputs: Any, labels: Any, rows: int | None) -> Tensor:
        losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)  # type: ignore[misc]
        # a mean over all positions, padded ones included, would divide by the longest row
        if losses.dim() and rows is not None and losses.shape != (rows,):
            raise ArgumentError(
                f"compute_loss_func expects to return one loss a row, [{rows}], or their mean, got "
                f"{list(losses.shape)}; average inside each row first"
            )
        return losses

    def _labels(self, inputs: dict[str, Any]) -> Any:
        """What the loss compares with: `labels`, or a dict of what has other names; None without any."""
        names = dict.fromkeys([*self.label_names, *_ENDS])
        named = {n: inputs[n] for n in names if isinstance(inputs.get(n), Tensor)}
        return inputs.get("labels", named or None)


def by_name(kind: type, given: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments of a trainer, by the names that the class behind the private one gives them.

    Raises:
        ArgumentTypeError: more than it names.
    """
    names: list[str] = []
    for behind in _behind(kind):
        if "__init__" not in vars(behind):
            continue
        own = list(inspect.signature(behind).parameters.values())
        names = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        if names or not any(p.kind is p.VAR_POSITIONAL for p in own):
            break  # else it hands on all of them as they come
    if len(given) > len(names):
        raise ArgumentTypeError(
            f"{kind.__name__} got {len(given)} positional arguments, of which {len(names)} have a name; "
            "pass them by keyword"
        )
    return dict(zip(names, given, strict=False))


def _behind(kind: type) -> tuple[type, ...]:
    """The classes that RowLossTrainer's own super() finds."""
    return kind.__mro__[kind.__mro__.index(RowLossTrainer) + 1 :]
