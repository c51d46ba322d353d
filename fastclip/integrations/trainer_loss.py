"""A transformers.Trainer whose training loss is the mean of its rows' own losses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.integrations.row_losses import (
    IGNORED,
    WAY_OUT,
    Checked,
    answer_losses,
    check_function,
    check_uncoupled,
    rows_of,
    take,
    telling,
)
from fastclip.integrations.trainer_ranks import RanksTrainer
from fastclip.layers.customised import MARKS, OWN
from fastclip.losses import per_sample_cross_entropy
from fastclip.parallel.ranks import whole

_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")
_ANSWERS, _ENDS = "ForQuestionAnswering", ("start_positions", "end_positions")
_TOKEN_LOSSES = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM")


class RowLossTrainer(RanksTrainer):
    """Computes row by row what is a cross entropy, and checks that any other loss keeps rows apart.

    Evaluation, and everything outside of private training, is the Trainer's own.

    Raises:
        ArgumentError: for a compute_loss of another class than transformers.Trainer, before this one in
            the method resolution order, or behind it, where there is no compute_loss_func.
    """

    _private = False
    """Inside a private train()."""

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
            if kind is not Trainer and "compute_loss" in vars(kind):
                raise ArgumentError(
                    f"{kind.__name__}.compute_loss stands behind PrivateTrainer, which trains on rows' "
                    f"own losses in its place; {WAY_OUT}"
                )

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """The mean of the rows' own losses while training; the Trainer's own loss elsewhere."""
        if not self._private or not model.training:
            if self.compute_loss_func is None or not isinstance(self._labels(inputs), dict):
                return super().compute_loss(model, inputs, return_outputs)
            # to which the Trainer would give no labels
            loss, outputs = self._training_loss(model, inputs)
            return (loss, outputs) if return_outputs else loss
        if self.compute_loss_func is None:
            due = self._checked.due(inputs)
            with whole(self.ranks, due):  # all processes come here, if one of them has to look
                if due:
                    self._check_loss(model, inputs)
        loss, outputs = self._training_loss(model, inputs)
        return (loss, outputs) if return_outputs else loss

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        inputs = dict(inputs)
        labels = self._labels(inputs)
        if self.compute_loss_func is not None:
            inputs.pop("labels", None)
            outputs = model(**inputs)
            given = {**inputs, "labels": labels}
            rows = rows_of(given)
            losses = self._own_losses(outputs, labels, rows)
            if self._private and model.training and self._checked.due(given):
                check_function(lambda o, y: self._own_losses(o, y, None), outputs, given)
                self._checked.done(given)
            return losses.mean(), outputs
        if not self._has_row_loss(labels):
            if self.label_smoother is not None:
                raise ArgumentError(
                    f"label_smoothing_factor is not known to keep rows apart: {WAY_OUT}"
                )
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            return loss, outputs
        if isinstance(labels, dict):
            outputs = model(**{n: v for n, v in inputs.items() if n not in labels})
            return answer_losses(outputs, labels, inputs.get("attention_mask")).mean(), outputs
        assert labels is not None
        if not self._config("is_encoder_decoder"):  # whose decoder's inputs are made from labels
            inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        losses = per_sample_cross_entropy(
            logits, self._behind_prompts(labels, logits), shift=self._loss_type() == "ForCausalLM",
            label_smoothing=self.args.label_smoothing_factor,
        )  # fmt: skip
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
        ends = _ENDS if self._loss_type() == _ANSWERS else ()
        names = dict.fromkeys([*self.label_names, *ends])
        named = {n: inputs[n] for n in names if isinstance(inputs.get(n), Tensor)}
        return inputs.get("labels", named or None)

    def _behind_prompts(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The labels, and none for the virtual tokens that PEFT puts before a row's own."""
        config = getattr(self.model, "active_peft_config", None)
        more = logits.shape[1] - labels.shape[1] if labels.dim() == 2 else 0
        if more and more == getattr(config, "num_virtual_tokens", None):
            return F.pad(labels, (more, 0), value=IGNORED)
        return labels

    def _has_row_loss(self, labels: Any) -> bool:
        """The model's loss is a cross entropy that can be computed row by row from its logits."""
        if isinstance(labels, dict):
            known = self._loss_type() == _ANSWERS and set(labels) == {*_ENDS}
            return known and self.label_smoother is None
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
        """The loss keeps rows apart, and on one row it is the model's own."""
        if self._loss_type() == _ANSWERS and not self._has_row_loss(self._labels(inputs)):
            raise ArgumentError(
                "the loss of question answering averages over the answers inside the batch, and is "
                "known row by row for start_positions and end_positions alone, without label smoothing; "
                f"got {sorted(inputs)}; {WAY_OUT}"
            )
        few = telling(inputs)
        smoothed = self.label_smoother is not None
        model.eval()
        try:
            with _plain_forward(model):
                check_uncoupled(
                    lambda batch: self._loss_and_logits(model, batch), few, _rounding(model)
                )
                if not smoothed and self._has_row_loss(self._labels(inputs)):
                    self._check_own_loss(model, take(inputs, [0]))
        finally:
            model.train()
        self._checked.done(few)

    def _loss_and_logits(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        loss, outputs = self._training_loss(model, batch)
        logits = outputs.get("logits") if isinstance(outputs, dict) else None
        return loss, logits

    @torch.no_grad()
    def _check_own_loss(self, model: nn.Module, one: dict[str, Any]) -> None:
        found = super().compute_loss(model, dict(one), return_outputs=True)  # type: ignore[arg-type]
        own, labels = float(found[0]), self._labels(one)
        if isinstance(labels, dict):  # padding may be an answer there
            ours = float(answer_losses(found[1], labels))
        else:
            ours = float(self._training_loss(model, one)[0])
        if math.isfinite(own) and not abs(own - ours) <= _rounding(model) * max(1.0, abs(own)):
            raise ArgumentError(
                f"{type(self._plain_model()).__name__} computes a loss of its own ({own:.6g} on "
                f"one row, where cross entropy is {ours:.6g}); {WAY_OUT}"
            )


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


def _rounding(model: nn.Module) -> float:
    """Relative, of a loss; TF32 of a GPU included."""
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return 0.03 if half else 1e-3


@contextmanager
def _plain_forward(model: nn.Module) -> Iterator[None]:
    """Without the engine's layers, which would record a backward pass, and without autocast; with
    forwards that were set on modules before."""
    taken = {}
    for module in model.modules():
        held = module.__dict__
        if OWN not in held and ("forward" not in held or "_hf_hook" in held):
            continue
        if not MARKS.isdisjoint(held) or "_original_forward" in held:
            taken[module] = held.pop("forward")
            if OWN in held:
                held["forward"] = held[OWN].forward
    try:
        yield
    finally:
        for module, forward in taken.items():
            module.__dict__["forward"] = forward
