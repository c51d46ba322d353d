"""A transformers.Trainer whose training loss is the mean of its rows' own losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastclip.errors import ArgumentError
from fastclip.integrations.row_losses import WAY_OUT, check_uncoupled, rows_of, take
from fastclip.losses import per_sample_cross_entropy

_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")
_TOKEN_LOSSES = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM")


class RowLossTrainer(Trainer):
    """Computes row by row what is a cross entropy, and checks once that any other loss keeps rows apart.

    Evaluation, and everything outside of private training, is the Trainer's own.
    """

    _private = False
    """Inside a private train()."""
    _loss_checked = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """The mean of the rows' own losses while training; the Trainer's own loss elsewhere."""
        if not self._private or not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        if not self._loss_checked and rows_of(inputs) > 1:
            self._check_loss(model, inputs)
        loss, outputs = self._training_loss(model, inputs)
        return (loss, outputs) if return_outputs else loss

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        inputs = dict(inputs)
        labels = inputs.get("labels")
        if self.compute_loss_func is not None:
            inputs.pop("labels", None)
            outputs = model(**inputs)
            losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
            if losses.dim() > 1:  # a mean over padded positions would divide by the longest row
                raise ArgumentError(
                    f"compute_loss_func expects to return one loss a row, [b], or their mean, got "
                    f"{list(losses.shape)}; average inside each row first"
                )
            return losses.mean(), outputs
        if not self._has_row_loss(labels):
            if self.label_smoother is not None:
                raise ArgumentError(
                    f"label_smoothing_factor is not known to keep rows apart: {WAY_OUT}"
                )
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            return loss, outputs
        assert labels is not None
        if not self._config("is_encoder_decoder"):  # whose decoder's inputs are made from labels
            inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        losses = per_sample_cross_entropy(
            logits, labels, shift=self._loss_type() == "ForCausalLM",
            label_smoothing=self.args.label_smoothing_factor,
        )  # fmt: skip
        return losses.mean(), outputs

    def _has_row_loss(self, labels: Any) -> bool:
        """The model's loss is a cross entropy that can be computed row by row from its logits."""
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return False
        if self._loss_type() in _CLASSIFIERS:
            kind = self._config("problem_type")
            return labels.dim() == 1 and self._config("num_labels") > 1 and kind != "regression"
        known = self._loss_type() in _TOKEN_LOSSES or self._config("is_encoder_decoder")
        return bool(known) and labels.dim() == 2

    def _plain_model(self) -> Any:
        base = getattr(self.model, "get_base_model", None)  # PEFT's
        return self.model if base is None else base()

    def _loss_type(self) -> str | None:
        model = self._plain_model()
        if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return "ForCausalLM"  # such as GPT2LMHeadModel, whose name does not say so
        return getattr(model, "loss_type", None)

    def _config(self, name: str) -> Any:
        return getattr(getattr(self._plain_model(), "config", None), name, None)

    def _check_loss(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Once: the loss keeps rows apart, and on one row it is the model's own."""
        self._loss_checked = True
        tolerance = 0.03 if self.args.bf16 else 1e-4
        labels = inputs.get("labels")
        if self._loss_type() == "ForQuestionAnswering" and self.compute_loss_func is None:
            raise ArgumentError(
                f"the loss of question answering averages over the answers inside the batch; {WAY_OUT}"
            )
        model.eval()
        try:
            check_uncoupled(lambda batch: self._training_loss(model, batch)[0], inputs, tolerance)
            smoothed = self.label_smoother is not None or self.compute_loss_func is not None
            if not smoothed and self._has_row_loss(labels):
                one = take(inputs, [0])
                with torch.no_grad():
                    own = float(super().compute_loss(model, dict(one)))  # type: ignore[arg-type]
                    ours = float(self._training_loss(model, one)[0])
                if math.isfinite(own) and not abs(own - ours) <= tolerance * max(1.0, abs(own)):
                    raise ArgumentError(
                        f"{type(self._plain_model()).__name__} computes a loss of its own ({own:.6g} on "
                        f"one row, where cross entropy is {ours:.6g}); {WAY_OUT}"
                    )
        finally:
            model.train()
