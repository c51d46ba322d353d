"""A transformers.Trainer whose training loss is the mean of per-sample losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from fastclip.core.torch_names import tree_flatten, tree_unflatten
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.integrations.trainer_run import RanksTrainer

# -------------------------------------------------------------------------------------------------
# A check that a Trainer's compute_loss_func keeps samples independent.


IGNORED = -100
FIX = "Pass a compute_loss_func that returns one loss per sample, of shape [b]."

TOLERANCE = 1e-4
"""Relative tolerance, in float32, between numbers computed from the same outputs."""


def samples_in(inputs: dict[str, Any]) -> int:
    """The number of samples in a batch, by its labels or else its first tensor."""
    tensors = [v for v in inputs.values() if isinstance(v, Tensor) and v.dim()]
    labels = inputs.get("labels")
    return len(labels) if isinstance(labels, Tensor) and labels.dim() else len(tensors[0])


def take(inputs: dict[str, Any], samples: list[int]) -> dict[str, Any]:
    """These samples of a batch."""
    size = samples_in(inputs)

    def few(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: few(v) for name, v in value.items()}
        return (
            value[samples]
            if isinstance(value, Tensor) and value.dim() and len(value) == size
            else value
        )

    return {name: few(value) for name, value in inputs.items()}


def telling_samples(inputs: dict[str, Any], most: int) -> dict[str, Any]:
    """Samples with different labels, on which a coupled loss can be detected.

    If labels are tokens, the last sample keeps a single one. A mean over tokens then differs from a
    mean over samples.
    """
    labels, size = inputs.get("labels"), samples_in(inputs)
    if not isinstance(labels, Tensor) or not labels.dim():
        return take(inputs, list(range(min(size, most))))
    different: dict[Any, int] = {}
    tokens = labels.dim() == 2 and not labels.is_floating_point()
    order = list(range(size))
    if tokens:  # the longest first
        order = (labels != IGNORED).sum(1).argsort(descending=True, stable=True).tolist()
    for sample in order:
        different.setdefault(str(labels[sample].tolist()), sample)
    chosen = list(different.values())[:most]
    chosen += [sample for sample in order if sample not in chosen][
        : max(0, min(most, size) - len(chosen))
    ]
    few = take(inputs, chosen)
    if tokens:
        kept = few["labels"].clone()
        places = (kept[-1] != IGNORED).nonzero().flatten()
        kept[-1, places[:-1]] = IGNORED  # keeps the last: a shifted loss does not use the first
        few["labels"] = kept
    return few


class Checked:
    """The labels that were compared with each other, which decide what batch must be checked.

    Class weights and ignored samples show only in a batch with labels that they treat differently.
    """

    def __init__(self) -> None:
        self._enough = False
        self._together: list[frozenset] = []

    def due(self, inputs: dict[str, Any]) -> bool:
        """Whether this batch may show a coupling that earlier batches could not."""
        if samples_in(inputs) < 2 or self._enough:
            return False
        values = _classes(inputs)
        return values is None or not any(values <= known for known in self._together)

    def done(self, inputs: dict[str, Any]) -> None:
        """Records that these samples were compared."""
        values, labels = _classes(inputs), inputs.get("labels")
        if values is None:
            if not isinstance(labels, Tensor) or not labels.dim():
                self._enough = True
                return
            compared = labels
            if compared.dim() == 2 and not compared.is_floating_point():
                compared = (compared != IGNORED).sum(1)
            self._enough = bool((compared != compared[:1]).any())
            return
        separate = []
        for known in self._together:
            if known & values:
                values |= known
            else:
                separate.append(known)
        self._together = [*separate, values] if len(values) > 1 else self._together


def _classes(inputs: dict[str, Any]) -> frozenset | None:
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        return None
    return frozenset(labels.tolist())


def check_function(
    function: Callable[[Any, Any], Tensor], outputs: Any, inputs: dict[str, Any]
) -> None:
    """Checks that a compute_loss_func is the mean of per-sample losses.

    It is called with random numbers instead of the model's outputs. An untrained model gives every
    token the same loss, which would hide a mean over tokens.

    Args:
        function: (outputs, labels) -> loss, one per sample or their mean.
        inputs: the batch with the labels.

    Raises:
        ArgumentError: if samples are coupled; it names a fix.
    """
    size = samples_in(inputs)
    values, shape = tree_flatten(outputs)
    values = [v.detach() if isinstance(v, Tensor) else v for v in values]
    places = [i for i, v in enumerate(values) if _differentiable(v)]
    order = torch.arange(size, device="cpu")
    few = telling_samples({"samples": order, "labels": inputs.get("labels")}, most=size)
    chosen, labels = few["samples"].tolist(), few["labels"]
    generator = torch.Generator().manual_seed(0)
    for synthetic in (True, False):  # a loss of probabilities may not take any number
        leaves = list(values)
        for i in places:
            drawn = torch.randn(
                values[i].shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            leaves[i] = drawn.to(values[i].device) if synthetic else values[i].float()

        def gradients(
            samples: list[int], labels: Any, leaves: list[Any] = leaves
        ) -> list[Tensor | None]:
            own = list(leaves)
            for i in places:
                per_sample = len(own[i]) == size
                own[i] = (own[i][samples] if per_sample else own[i].clone()).requires_grad_()
            with torch.enable_grad():
                loss = function(tree_unflatten(own, shape), labels).mean()
                if not loss.requires_grad:
                    return [None for _ in places]
                return list(torch.autograd.grad(loss, [own[i] for i in places], allow_unused=True))

        try:
            together = gradients(chosen, labels)
            alone = [
                gradients([sample], take({"samples": order, "labels": labels}, [number])["labels"])
                for number, sample in enumerate(chosen)
            ]
        except Exception:
            if synthetic:
                continue
            raise
        if synthetic and not all(g is None or g.isfinite().all() for g in together):
            continue
        break
    for number, i in enumerate(places):
        found = together[number]
        if found is None:
            continue
        if len(values[i]) != size and bool(found.any()):
            raise ArgumentError(
                f"compute_loss_func uses an output of shape {list(values[i].shape)}, which does not "
                f"hold one entry per sample, so it couples samples. {FIX}",
                doc="coupled-loss",
            )
        if len(values[i]) == size:
            own = [gradient[number] for gradient in alone]
            _compare(found, [None if g is None else g[0] for g in own], TOLERANCE)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _compare(together: Tensor, alone: list[Tensor | None], tolerance: float) -> None:
    """Compares each sample's gradient in the batch, times the batch size, with that of it alone."""
    for sample, own in enumerate(alone):
        if own is None or own.shape != together[sample].shape or not own.isfinite().all():
            continue
        found = together[sample] * len(alone)
        if not (found - own).norm() <= tolerance * max(
            float(own.norm()), float(found.norm()), 1e-12
        ):
            raise ArgumentError(
                "The loss couples samples: the gradient norm of a sample's outputs is "
                f"{found.norm():.4g} in the batch, {own.norm():.4g} alone (possible cause: a mean over "
                f"all tokens, or class weights). {FIX}",
                doc="coupled-loss",
            )


# -------------------------------------------------------------------------------------------------


_ENDS = ("start_positions", "end_positions")
_OF_TRL = ("PrivateDPOTrainer", "PrivateSFTTrainer")
"""The trainers of fastclip.integrations.trl."""


class SampleLossTrainer(RanksTrainer):
    """Trains on per-sample losses of the model (model_loss of make_private), or on compute_loss_func.

    It checks that the loss keeps samples independent. Evaluation, and everything outside of private
    training, is unchanged.

    Raises:
        ArgumentError: if a class before this one in the method resolution order overrides
            compute_loss, or, without a compute_loss_func, a class after it other than
            transformers.Trainer.
    """

    _private = False
    """Whether a private train() is running."""
    serves: tuple[type, ...] = ()
    """Classes after this one whose loss `_training_loss` replaces by per-sample losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if type(self).compute_loss is not SampleLossTrainer.compute_loss:
            raise ArgumentError(
                f"{type(self).__name__} overrides compute_loss, so fastclip cannot check that its loss "
                f"keeps samples independent. {FIX}",
                doc="integrations",
            )
        self._checked = Checked()
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is None:
            self._check_behind()

    def _check_behind(self) -> None:
        """Checks that no class after this one has its own loss, which would not be trained on."""
        for kind in _behind(type(self)):
            if kind in (Trainer, *self.serves) or "compute_loss" not in vars(kind):
                continue
            private, fix = f"Private{kind.__name__}", FIX
            if private in _OF_TRL and kind.__module__.startswith("trl."):
                fix = f"Use fastclip.integrations.trl.{private}, or {FIX[0].lower()}{FIX[1:]}"
            raise ArgumentError(
                f"{kind.__name__}.compute_loss is not used by PrivateTrainer, which trains on one loss "
                f"per sample instead. {fix}",
                doc="integrations",
            )

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """The mean of per-sample losses in training; the Trainer's loss elsewhere."""
        # The Trainer would pass no labels to compute_loss_func if they are a dict.
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
                f"label_smoothing_factor expects one label per token or per sample. {FIX}",
                doc="integrations",
            )
        outputs = model(**inputs)  # its loss includes label smoothing
        if not self.dp_optimizer.grad_state.model_loss.replaced:
            raise ArgumentError(
                f"label_smoothing_factor needs a cross entropy that the model computes. {FIX}",
                doc="integrations",
            )
        return (outputs["loss"] if isinstance(outputs, dict) else outputs[0]), outputs

    def _given_loss(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The loss of compute_loss_func."""
        labels = self._labels(inputs)
        inputs.pop("labels", None)
        outputs = model(**inputs)
        given = {**inputs, "labels": labels}
        samples = samples_in(given)
        losses = self._own_losses(outputs, labels, samples)
        if self._private and model.training and self._checked.due(given):
            check_function(lambda o, y: self._own_losses(o, y, None), outputs, given)
            self._checked.done(given)
        return losses.mean(), outputs

    def _own_losses(self, outputs: Any, labels: Any, samples: int | None) -> Tensor:
        losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)  # type: ignore[misc]
        # A mean over all positions, padding included, would divide by the longest sample.
        if losses.dim() and samples is not None and losses.shape != (samples,):
            raise ArgumentError(
                f"compute_loss_func expects to return one loss per sample, [{samples}], or their mean, "
                f"got shape {list(losses.shape)}. Average inside each sample first.",
                doc="coupled-loss",
            )
        return losses

    def _labels(self, inputs: dict[str, Any]) -> Any:
        """The labels: `labels`, a dict of labels with other names, or None."""
        names = dict.fromkeys([*self.label_names, *_ENDS])
        named = {n: inputs[n] for n in names if isinstance(inputs.get(n), Tensor)}
        return inputs.get("labels", named or None)


def by_name(kind: type, given: Sequence[Any]) -> dict[str, Any]:
    """Positional arguments of a trainer, by their names in the class after the private one.

    Raises:
        ArgumentTypeError: there are more than names.
    """
    names: list[str] = []
    for behind in _behind(kind):
        if "__init__" not in vars(behind):
            continue
        own = list(inspect.signature(behind).parameters.values())
        names = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        if names or not any(p.kind is p.VAR_POSITIONAL for p in own):
            break  # otherwise it passes all of them on
    if len(given) > len(names):
        raise ArgumentTypeError(
            f"{kind.__name__} got {len(given)} positional arguments, of which {len(names)} have a name. "
            "Pass them by keyword."
        )
    return dict(zip(names, given, strict=False))


def _behind(kind: type) -> tuple[type, ...]:
    """The classes after SampleLossTrainer in the method resolution order."""
    return kind.__mro__[kind.__mro__.index(SampleLossTrainer) + 1 :]
