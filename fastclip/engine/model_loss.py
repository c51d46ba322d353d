"""Per-sample losses of models that compute their own loss: make_private(model_loss="per_sample").

A mean cross entropy divides by all counted labels of the batch, so a sample's gradient depends on the
other samples. While the model runs, each such mean becomes the mean over samples of each sample's own
mean. Other mean losses of torch (squared errors, binary cross entropies) divide by the same number for
every sample, and are unchanged.

Index letters: b sample, n labels of the batch, k class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastclip.core.compiler import as_written, ends_graph
from fastclip.distributed.processes import bare, uncompiled
from fastclip.errors import GraphError, say

if TYPE_CHECKING:
    from fastclip.backward.state import GradientState

_MEANS = {f: inspect.signature(f) for f in (F.cross_entropy, F.nll_loss)}
"""Losses whose mean divides by the number of counted labels, or by their weights."""
_ENDS, _COUNT = "start_positions", "num_items_in_batch"
_FUNCTION = "_loss_function"
"""The attribute in which a model of transformers holds a loss_function that was set."""
_KEPT = "_fastclip_loss"


def replace_losses(model: Any, criterion: Any = None) -> None:
    """Make the losses that a private model computes itself, and a criterion, per-sample losses.

    Args:
        model: what make_private returns.
        criterion: unchanged if it is not a module with a `reduction`.
    """
    grad_state, own = model.grad_state, uncompiled(bare(model._module))
    grad_state.model_loss, grad_state.calls.replaces_losses = (
        ModelLoss(grad_state, type(own).__name__),
        True,
    )
    grad_state.model_loss.replace(own, criterion)


class ModelLoss:
    """Replaces mean cross entropies inside a private model by their per-sample form.

    Evaluation under torch.no_grad keeps the model's own loss.

    Args:
        grad_state: knows the number of samples. name: the model's class, for messages.
    """

    def __init__(self, grad_state: GradientState, name: str) -> None:
        self._grad_state, self._name = grad_state, name
        self._mask: Any = None
        """Attention mask of the running call, if labels are positions: 0 for padding, [b, t]."""
        self._within = 0
        """Number of running calls of loss_function."""
        self.inline = False
        """The model's own code computed a loss, where torch.compile would not see the replacement."""
        self.replaced = False
        """A loss was replaced."""
        self.label_smoothing = 0.0
        """Label smoothing of a Trainer; 0 keeps that of the loss."""
        self._said: set[str] = set()
        self._criteria: list[ref[nn.Module]] = []

    def replace(self, model: nn.Module, criterion: Any = None) -> None:
        """Replace each `loss_function` in `model`, and a criterion with a `reduction`.

        `give_back` undoes it.
        """
        for module in model.modules():
            found = getattr(type(module), "loss_function", None)
            if isinstance(found, property) and found.fset is not None:
                _set(module, _FUNCTION, _loss_function, self)
        if isinstance(criterion, nn.Module) and hasattr(criterion, "reduction"):
            criterion = uncompiled(criterion)
            _set(criterion, "forward", _criterion_forward, ref(self))
            self._criteria.append(ref(criterion))

    def give_back(self, model: nn.Module) -> None:
        """Restore the losses of the model and the criterion."""
        for module in model.modules():
            _give_back(module, _FUNCTION, self)
        for criterion in (found() for found in self._criteria):
            if criterion is not None:
                _give_back(criterion, "forward", self)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with per-sample mean cross entropies."""
        return _Around(self, as_written(run))

    def within(self, kwargs: dict[str, Any] | None = None) -> Any:
        """A context with per-sample mean cross entropies."""
        return _PerSample(self, kwargs or {}) if torch.is_grad_enabled() else nullcontext()

    def inside_function(self, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a loss_function."""
        kwargs, given = self.without_count(kwargs), self._grad_state.forward.inputs
        of_call = {} if self._mask is not None or given is None else given[1]
        self._within += 1
        try:
            with self.within(of_call):
                return own(*args, **kwargs)
        finally:
            self._within -= 1

    def without_count(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call, without the number of labels in the batch that a Trainer counts."""
        if kwargs.get(_COUNT) is None or not torch.is_grad_enabled():
            return kwargs
        self._say(f"model_loss='per_sample' ignores {_COUNT}, which depends on the whole batch.")
        return {name: value for name, value in kwargs.items() if name != _COUNT}

    def of(self, mean: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """The value of a loss: its per-sample form if it is a mean over labels.

        Raises:
            GraphError: the number of labels is not a multiple of the number of samples.
        """
        given = _MEANS[mean].bind(*args, **kwargs)
        given.apply_defaults()
        asked, samples = given.arguments, self._samples()
        labels, old = asked["target"], (asked["size_average"], asked["reduce"])
        of_labels = isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point()
        if not (samples and of_labels and asked["reduction"] == "mean" and old == (None, None)):
            return mean(*args, **kwargs)
        if len(labels) % samples:
            raise GraphError(
                f"{self._name} computes a cross entropy over {len(labels)} labels for {samples} "
                "samples, which model_loss='per_sample' cannot replace. Return one loss per sample, "
                "[b].",
                doc="coupled-loss",
            )
        self.inline, self.replaced = self.inline or not self._within, True
        if labels.numel() > samples or asked["weight"] is not None:
            self._say(
                f"model_loss='per_sample' replaces the loss of {self._name} by the mean over samples of "
                "each sample's mean over its own counted labels."
            )
        self._without_padding(asked)
        if self.label_smoothing and mean is F.cross_entropy:
            asked["label_smoothing"] = self.label_smoothing
        losses = mean(**{**asked, "reduction": "none"}).reshape(samples, -1)  # [b, n / b]
        counted = (
            (asked["target"] != asked["ignore_index"]).reshape(samples, -1).sum(1).clamp(min=1)
        )
        return (losses.sum(1) / counted).mean()

    def _samples(self) -> int | None:
        grad_state = self._grad_state
        if grad_state.calls.probe is not None:
            return grad_state.calls.probe.rows
        return (grad_state.running_forward() or grad_state.forward).batch_size

    def _without_padding(self, asked: dict[str, Any]) -> None:
        """Exclude padding as an answer, because its share depends on the batch's longest sample."""
        mask, logits, labels = self._mask, asked["input"], asked["target"]
        if not isinstance(mask, Tensor) or mask.shape != logits.shape or labels.dim() != 1:
            return
        kept = F.pad(mask != 0, (0, 1))  # one more: outside
        inside = kept.gather(1, labels.clamp(0, mask.shape[1])[:, None])[:, 0]
        asked["target"] = labels.where(inside, asked["ignore_index"])
        asked["input"] = logits.masked_fill(mask == 0, torch.finfo(logits.dtype).min)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            say(message, doc="coupled-loss")


class _Around:
    def __init__(self, loss: ModelLoss, run: Callable[..., Any]) -> None:
        self._loss, self._run = loss, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = self._loss.without_count(kwargs)
        with self._loss.within(kwargs):
            return self._run(*args, **kwargs)


class _PerSample(TorchFunctionMode):
    """Intercepts every torch function called inside."""

    def __init__(self, loss: ModelLoss, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._loss, self._before = loss, loss._mask
        self._mask = kwargs.get("attention_mask") if kwargs.get(_ENDS) is not None else loss._mask

    def __enter__(self) -> Any:
        self._loss._mask = self._mask
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._loss._mask = self._before
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy or func is F.nll_loss:
            return self._loss.of(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Held(NamedTuple):
    """The record on a module whose loss was replaced.

    Attributes:
        loss: the private model's `ModelLoss`; a criterion outlives the model and holds it weakly.
        own: the value that had been set on the object.
    """

    loss: Any
    own: Any


@ends_graph
def _loss_function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The per-sample form of the `loss_function` of a model of transformers."""
    loss, own = self.__dict__[_KEPT]
    if own is None:
        kind: Any = type(self)
        own = kind.loss_function.fget(SimpleNamespace(loss_type=getattr(self, "loss_type", None)))
    return loss.inside_function(own, args, kwargs)


@ends_graph
def _criterion_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    held, own = self.__dict__[_KEPT]
    loss, run = held(), own or MethodType(type(self).forward, self)
    with nullcontext() if loss is None else loss.within():
        return run(*args, **kwargs)


def _set(module: nn.Module, name: str, function: Any, loss: Any) -> None:
    held = module.__dict__
    if _KEPT in held:
        _give_back(module, name)
    held[_KEPT] = _Held(loss, held.get(name))
    held[name] = MethodType(function, module)


def _give_back(module: nn.Module, name: str, loss: ModelLoss | None = None) -> None:
    """Restore a module's loss if `loss` (None: any) was set there."""
    held = module.__dict__
    kept = held.get(_KEPT)
    if kept is None:
        return
    of = kept.loss() if isinstance(kept.loss, ref) else kept.loss
    if loss is None or of is loss:
        del held[_KEPT], held[name]
        if kept.own is not None:
            held[name] = kept.own
