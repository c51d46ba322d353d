"""TRL's trainers with differential privacy: docs/llm.md.

TRL's fused head multiplies `lm_head.weight` in a custom autograd function, which no per-sample rule can
see into. Its losses are means over tokens, or over texts of which a pair has two. Here the model's own
head runs, and there is one loss per sample. A sample of DPO is a pair.

Index letters: b sample, t token, v entry of the vocabulary.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from fastclip.errors import ArgumentError
from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

__all__ = ["PrivacyArguments", "PrivateDPOTrainer", "PrivateSFTTrainer"]

IGNORED = -100
_COUPLED = {
    "aot": "it sorts the pairs of the batch",
    "aot_unpaired": "it sorts the pairs of the batch",
    "sft": "it is a mean over all tokens of the batch",
}
"""Losses of DPOConfig that couple pairs, and how."""
_PAIRED = ("input_ids", "attention_mask", "completion_mask", "token_type_ids")
"""Tensors of a batch of pairs, [2b, t]: the chosen texts, then the rejected ones."""


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """TRL's SFTTrainer with differentially private training; one sample of the data set is a sample.

    It trains on each sample's mean over its own tokens, averaged over samples (`loss_type` "nll" or
    "dft"), not on the mean over all tokens of the batch. Evaluation is unchanged.

    Args:
        given: as in SFTTrainer and PrivateTrainer.

    Raises:
        ArgumentError: for packing, padding_free, and the balancing loss of a mixture of experts, which
            couple samples; and as PrivateTrainer.

    Formal guarantee: as in PrivateTrainer.
    """

    serves = (SFTTrainer,)

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        super().__init__(*given, **kwargs)
        _check_experts(self)

    def default_arguments(self) -> SFTConfig:
        return SFTConfig("tmp_trainer")

    def check_arguments(self, args: Any) -> None:
        super().check_arguments(args)
        _check_padded(args)

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        args: Any = self.args
        if self.compute_loss_func is not None or args.loss_type != "dft":
            return super()._training_loss(model, inputs)
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        found, counted = log_probs(outputs.logits, labels), labels[:, 1:] != IGNORED
        losses = (-found * found.detach().exp()).sum(1)  # arXiv 2508.05629, equation 9
        return (losses / counted.sum(1).clamp(min=1)).mean(), outputs


class PrivateDPOTrainer(PrivateTrainer, DPOTrainer):
    """TRL's DPOTrainer with differentially private training; a pair is one sample.

    The gradient of a pair's loss, through its chosen and its rejected text, is clipped as one. The
    model runs on both in one pass, [b, 2, t]. Losses are those of TRL, computed in each process on its
    own pairs. The reference is that of TRL: another model, the same model without its adapter, or
    precomputed.

    Args:
        given: as in DPOTrainer and PrivateTrainer.

    Raises:
        ArgumentError: for losses that couple pairs ("aot", "aot_unpaired", "sft", the balancing loss of
            a mixture of experts), padding_free and images; and as PrivateTrainer.

    Formal guarantee: as in PrivateTrainer; neighbors differ in one pair, added or removed.
    """

    serves = (DPOTrainer,)
    precompute_ref_logps: bool

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        super().__init__(*given, **kwargs)
        _check_experts(self)
        self._metrics = {"train": _Unkept(), "eval": defaultdict(list)}
        columns: Any = getattr(self.train_dataset, "column_names", ())
        if not {"image", "images"}.isdisjoint(columns):
            raise ArgumentError(
                "PrivateDPOTrainer supports pairs of texts, and this data set has a column of images. "
                "Write your own loop, with pairs of shape [b, 2, t].",
                doc="integrations",
            )

    def default_arguments(self) -> DPOConfig:
        return DPOConfig("tmp_trainer")

    def check_arguments(self, args: Any) -> None:
        super().check_arguments(args)
        _check_padded(args)
        if getattr(args, "ld_alpha", None) is not None:
            raise ArgumentError(
                "DPOConfig(ld_alpha=...) is not supported: it weights tokens by the lengths of both "
                "texts of a pair, which the check of the loss cannot follow. Omit it.",
                doc="integrations",
            )
        for name in getattr(args, "loss_type", ()):
            if name in _COUPLED:
                raise ArgumentError(
                    f"DPOConfig(loss_type={name!r}) couples pairs: {_COUPLED[name]}. Use a mean over "
                    "pairs, such as 'sigmoid'.",
                    doc="integrations",
                )

    def one_entry_per_sample(self, collate: Callable[[list], Any]) -> Callable[[list], Any]:
        return PairCollate(collate)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _pairs_run(self.model):
            return super().train(*args, **kwargs)

    def with_references(self, batch: Any) -> Any:
        """Adds the reference's log-probabilities, which are not part of the traced loss."""
        if self.precompute_ref_logps:
            return batch
        inputs, reference = self._prepare_inputs(batch), self.ref_model or self.model
        with self.dp_optimizer.grad_state.trace.aside():
            chosen, rejected = self.compute_ref_log_probs(reference, _flat(inputs))
            # Views of tensors computed outside the trace would count as constants of the batch.
            chosen, rejected = chosen.clone(), rejected.clone()
        return {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _training_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        flat, before = _flat(inputs), self.precompute_ref_logps
        self.precompute_ref_logps = "ref_chosen_logps" in flat
        accelerator, self.accelerator = self.accelerator, _OneProcess(self.accelerator)
        run = functools.partial(_run_pairs, model, self.use_weighting)
        try:
            loss = DPOTrainer.compute_loss(self, run, flat)
        finally:
            self.accelerator, self.precompute_ref_logps = accelerator, before
        return loss, {}


def _flat(pairs: dict[str, Any]) -> dict[str, Any]:
    """Pairs in TRL's layout: the chosen texts, then the rejected ones."""
    return {
        name: value.transpose(0, 1).flatten(0, 1) if name in _PAIRED else value
        for name, value in pairs.items()
    }


class PairCollate:
    """Collates pairs into tensors [b, 2, t], the chosen text first; `collate` returns [2b, t]."""

    def __init__(self, collate: Callable[[list], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        batch = self.collate(samples)
        return {
            name: value.unflatten(0, (2, -1)).transpose(0, 1) if name in _PAIRED else value
            for name, value in batch.items()
        }


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each next label.

    Args:
        logits: [b, t, v]; virtual tokens may precede those of the labels.
        labels: int64 [b, t].

    Returns:
        [b, t - 1]; 0 if the label is -100.
    """
    answers = labels[:, 1:]
    logits = logits[:, -labels.shape[1] : -1]
    found = logits.log_softmax(-1).gather(-1, answers.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(answers == IGNORED, 0.0)


class _Scored(NamedTuple):
    """The outputs that TRL reads from its fused head, [2b, t - 1]; those for metrics only are 0."""

    log_probs: Tensor
    log_sum_sq_probs: Tensor
    entropy: Tensor
    mean_logits: Tensor
    is_top1: Tensor


def _run_pairs(
    model: nn.Module, weighted: bool, labels: Tensor, fused_lm_head: bool, **inputs: Any
) -> _Scored:
    """Runs the private model, with its own head, on pairs in TRL's layout."""
    pairs = {
        name: value.unflatten(0, (2, -1)).transpose(0, 1) if name in _PAIRED else value
        for name, value in inputs.items()
    }
    logits = model(**pairs).transpose(0, 1).flatten(0, 1)  # [2b, t, v]
    return _scored(logits, labels, weighted)


def _scored(logits: Tensor, labels: Tensor, weighted: bool) -> _Scored:
    found = log_probs(logits, labels)
    nothing = torch.zeros_like(found)
    squares = nothing
    if weighted:
        own = logits.detach()[:, -labels.shape[1] : -1]
        squares = (2 * own).logsumexp(-1) - 2 * own.logsumexp(-1)
    return _Scored(found, squares, nothing, nothing, nothing.bool())


class _Unkept(dict):
    """Discards TRL's metrics of private pairs, and the number of tokens in sampled batches."""

    def __missing__(self, name: str) -> list[Any]:
        return []

    def __setitem__(self, name: str, values: Any) -> None:
        pass


class _OneProcess:
    """An accelerator that gathers nothing, because processes sample different numbers of pairs."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, given: Any) -> Any:
        return given

    gather_for_metrics = gather


@contextmanager
def _pairs_run(model: Any) -> Iterator[None]:
    """Makes the model accept pairs, [b, 2, t], and return their logits, [b, 2, t, v]."""
    held, running = model.__dict__, []
    before, own = held.get("forward"), model.forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        if ids is None or ids.dim() != 3:
            if self.training and kwargs.get("fused_lm_head"):  # called as the reference of a step
                given = {n: v for n, v in kwargs.items() if n not in ("labels", "fused_lm_head")}
                return _scored(own(*args, **given).logits, kwargs["labels"], False)
            return own(*args, **kwargs)
        flat = {n: v.flatten(0, 1) if n in _PAIRED else v for n, v in kwargs.items()}
        running.append(ids.shape[:2])
        try:
            return own(*args, **flat).logits.unflatten(0, running[-1])
        finally:
            running.pop()

    def of_pairs(module: nn.Module, inputs: Any, samples: Tensor) -> Tensor | None:
        """Gives a leaf of `enable_input_require_grads` one entry per pair, not one per text."""
        if running and samples.requires_grad and samples.is_leaf:
            return samples.detach().unflatten(0, running[-1]).requires_grad_().flatten(0, 1)
        return None

    held["forward"] = MethodType(forward, model)
    hook = model.get_input_embeddings().register_forward_hook(of_pairs)
    try:
        yield
    finally:
        hook.remove()
        held.pop("forward", None)
        if before is not None:
            held["forward"] = before


def _check_padded(args: Any) -> None:
    """Checks that a sequence holds one sample."""
    for name in ("packing", "padding_free"):
        if getattr(args, name, False):
            raise ArgumentError(
                f"{type(args).__name__}({name}=True) puts several samples of the data set into one "
                f"sequence, so their gradients cannot be clipped separately. Leave {name}=False.",
                doc="integrations",
            )


def _check_experts(trainer: Any) -> None:
    if trainer.aux_loss_enabled:
        raise ArgumentError(
            "The balancing loss of a mixture of experts is a statistic of the whole batch. Pass "
            f"{type(trainer.args).__name__}(router_aux_loss_coef=0.0).",
            doc="integrations",
        )
