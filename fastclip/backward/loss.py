"""The loss: its reduction, its scale, what traced steps found, and tensors outside of the model.

Under "mean" the engine multiplies each gradient by b, the number of samples of the physical batch; under
"sum" it takes them as they are. A loss of the other kind leaves a factor b, or 1 / b, in every
contribution. Each is still clipped to C, but b is data under Poisson sampling: one sample more moves
every contribution that is not clipped, by up to C together, and adds its own, for noise of C.

The reduction is read before training from the criterion, and in every backward pass from the loss. If
the last operation is one of torch's losses, its node in the graph knows its reduction.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fastclip.core.autograd import Node, above_private, reached_without, takes_part
from fastclip.core.torch_names import (
    SAVED_REDUCTION,
    SAVED_WEIGHT,
    TARGET,
    TOTAL_WEIGHT,
    at_end_of_pass,
    backward_calls,
    current_node,
    current_task,
    node_type,
    number_of,
)
from fastclip.errors import ArgumentError, GraphError, ParameterLeakError
from fastclip.samples.calls import Forward
from fastclip.samples.inputs import tensors_of

# -------------------------------------------------------------------------------------------------
# The graph of the loss of the running backward pass, read from its top.
#
# A hook inside a backward pass sees gradients, and no edge of the graph leads upwards to the loss.
# But torch.autograd.backward waits for the pass to end, and what it was called with is noted.
# Nothing here reads a value, so no device is waited for. If the call cannot be identified, nothing is
# known.


class Roots(NamedTuple):
    """What a backward pass began with."""

    nodes: tuple[Node, ...]
    seeded: bool
    """Gradients were given, so the losses are not all of what is differentiated."""


def running_losses() -> list[Tensor]:
    """The losses of the running backward pass; empty if gradients were given for them, or they cannot be
    identified.
    """
    call = backward_calls.running()
    if call is None or call.seeded:
        return []
    return [loss for loss in call.losses if isinstance(loss, Tensor)]


def running_roots() -> Roots | None:
    """The nodes of the losses of the running backward pass; None if they cannot be identified."""
    call = backward_calls.running()
    if call is None:
        return None
    nodes = (getattr(loss, "node", None) or getattr(loss, "grad_fn", None) for loss in call.losses)
    return Roots(tuple(node for node in nodes if node is not None), call.seeded)


def is_output(loss: Tensor, outputs: Collection[int]) -> bool:
    """Whether the loss is a sum or a mean of an output of the model itself, without a target."""
    node = loss.grad_fn
    while node is not None and number_of(node) not in outputs:
        if node.name() not in ("SumBackward0", "MeanBackward0") or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None


# -------------------------------------------------------------------------------------------------
# What the traced steps have found about a loss, checked in every later step.
#
# A mean over classes divides by the number of labels that count. In the traced steps, perhaps no label
# was ignored except constants of the model, equally many per sample (a sequence shifted by one
# position). From the first batch that has more, the mean mixes samples.


_MEAN = 1
_IGNORED = (
    "Your loss is a mean over all labels that count, and this batch has ignored labels, so samples are "
    "not independent. Use fastclip.losses.per_sample_cross_entropy(...).mean()."
)


class LossGuard:
    """Checks means over classes before backward passes begin.

    Args:
        concerns: whether a pass trains the private model: asked with its private nodes.
        constants: number of ignored labels per sample that are constants of the model, for each mean.
            Means of several kinds may have none.
    """

    def __init__(self, concerns: Callable[[object], bool], constants: Collection[int] = ()) -> None:
        self.concerns = concerns
        self.constants = max(constants) if len(constants) == 1 else 0
        self._ignored: list[Tensor] = []
        """Number of ignored labels in each mean of the running pass, []."""
        backward_calls.add(self)

    def ended(self, failed: bool) -> None:
        """A backward pass is over."""

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Find the means over classes in the graph of these losses."""
        self._ignored = []
        private: list[object] = []
        nodes = deque(x.grad_fn for x in losses if x.grad_fn is not None)
        for node in above_private(nodes, private):
            if not node.name().startswith("NllLoss") or getattr(node, SAVED_REDUCTION) != _MEAN:
                continue
            target: Tensor = getattr(node, TARGET)
            if target.numel() >= 2:
                self._ignored.append(target.numel() - getattr(node, TOTAL_WEIGHT))
        if not any(map(self.concerns, private)):
            self._ignored = []

    def checked(self, norm_sq: Tensor, batch_size: int) -> Tensor:
        """Squared norms of a pass over so many samples. On an accelerator, which is not waited for, they
        are NaN if its loss mixes samples, so none contributes.

        Raises:
            GraphError: a mean over classes ignores labels of samples, and so mixes samples.
        """
        ignored, self._ignored = self._ignored, []
        for count in ignored:
            broken = count != batch_size * self.constants
            if count.device.type != "cpu":
                norm_sq = norm_sq.masked_fill(broken.to(norm_sq.device), torch.nan)
            elif bool(broken):
                raise GraphError(_IGNORED, doc="coupled-loss")
        return norm_sq


# -------------------------------------------------------------------------------------------------
# The scale of a loss, and how the backward pass that it starts learns it.
#
# A scaled loss multiplies the gradient by its scale when the backward pass enters it, before the pass
# reaches the model, and notes the scale under the id of the running pass. The gradient state reads it
# there. A pass of an unscaled loss has scale 1. Notes are kept by pass, not by thread, because passes of
# CUDA devices run on threads of their own.
#
# One pass has one scale. A note that comes after the gradient state has read it, a part of the loss that
# reaches the model without the scale, and a scaled loss within a scaled loss raise an error.


_running: dict[int, float] = {}
"""The scale of each backward pass under way, by its id."""

_FIX = "Add the losses, and scale the sum once: scaler.scale(a + b).backward()."


class ScaledLoss(Function):
    """loss * scale, in float32 at least; its backward pass knows the scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _set_scale(ctx.scale)
        _check_scaled_once(ctx)
        return (gradient * ctx.scale).to(ctx.dtype), None


def is_scaled(node: Node) -> bool:
    """Whether a node of the graph is that of a scaled loss."""
    return type(node) is node_type(ScaledLoss)


def running_scale() -> float:
    """The scale of the loss, once its backward pass has reached a model's output; 1 if it has none.

    Raises:
        GraphError: a part of the loss reaches this output without the scale.
    """
    scale = _running.get(current_task())
    if scale is None:
        _set_scale(1.0)
        return 1.0
    roots = running_roots()
    if scale != 1.0 and roots is not None:
        unscaled, _ = reached_without(roots.nodes, is_scaled)
        if current_node() in unscaled:
            raise GraphError(
                f"A part of the loss reached the private model without the scale {scale} of the rest, "
                f"so clipping would be wrong. {_FIX}",
                doc="mixed-precision",
            )
    return scale


def _set_scale(scale: float) -> None:
    task = current_task()
    if task not in _running:
        at_end_of_pass(partial(_forget, task))
    if _running.setdefault(task, scale) != scale:
        raise GraphError(
            f"One backward pass holds losses of the scales {_running.pop(task)} and {scale}, so "
            f"clipping would be wrong. {_FIX}",
            doc="mixed-precision",
        )


def _check_scaled_once(node: Node) -> None:
    roots = running_roots()
    if roots is None or node in roots.nodes:
        return
    _, outermost = reached_without(roots.nodes, is_scaled)
    if node not in outermost:
        raise GraphError(
            f"A scaled loss is part of a loss that was scaled again, so clipping would be wrong. {_FIX}",
            doc="mixed-precision",
        )


def _forget(task: int) -> None:
    _running.pop(task, None)


# -------------------------------------------------------------------------------------------------
# Tensors that are trained alongside the private model: their gradients come from the same samples,
# without clipping.
#
# A criterion with weights of its own (centers of classes, a temperature), or a part before the private
# model, is trained by another optimizer on gradients that get neither clipping nor noise. They are not
# parameters of the model, so they have no guard. The graph of the loss shows them.


OUTSIDE = "Make one module of it and the model, detach it, or train only it in engine.paused()."
"""The usual fixes. A GAN's generator, for example, is trained through its paused discriminator."""


class Outside:
    """Finds leaves outside the private model that may be trained, as a backward pass opens.

    A gradient for them raises an error. A leaf that only makes a checkpoint run gets none.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Outside:
        return Outside()

    def __reduce__(self) -> Any:
        return Outside, ()

    def check(self, forward: Forward, *known: Container[nn.Parameter]) -> None:
        """Raise an error if the pass that has begun brings a gradient to anything else.

        Args:
            forward: the call whose output the gradient has reached.
            known: parameters that are guarded by hooks of their own.

        Raises:
            ParameterLeakError: one has come already. Later ones raise it as they come.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        roots = running_roots()
        nodes = deque([] if roots is None else roots.nodes)
        if forward.inputs is not None:
            inputs = (x for x in tensors_of(forward.inputs) if x.requires_grad)
            nodes.extend(get_gradient_edge(x).node for x in inputs)
        for node in above_private(nodes):
            leaf = getattr(node, "variable", None)
            if leaf is None or any(leaf in some for some in known):
                continue
            if _is_trained(leaf, forward.batch_size) and takes_part(node):
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
                what = f"A {kind} of shape {list(leaf.shape)}"
                check = partial(_check_untrained, what, current_task())
                check(leaf.grad)  # what lies between the model and the loss has had its turn
                self._handles.append(leaf.register_hook(check))


def _check_untrained(what: str, task: int, gradient: Tensor | None) -> None:
    if gradient is not None and current_task() == task:  # else the pass has failed long ago
        raise ParameterLeakError(
            f"{what} outside the private model is trained by this loss, and its gradient gets neither "
            f"clipping nor noise. {OUTSIDE}"
        )


def _is_trained(leaf: Tensor, samples: int | None) -> bool:
    """Whether it is trained. A tensor with an entry per sample is a batch, not a parameter. Values that
    are computed from private parameters have a guard of their own."""
    if isinstance(leaf, nn.Parameter):
        return True
    return type(leaf) is Tensor and samples is not None and samples not in leaf.shape


# -------------------------------------------------------------------------------------------------


_REDUCTIONS = ("none", "mean", "sum")
"""In the order of torch's numbers for them."""
_OF_ROWS = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
_WHOLE = {"MeanBackward0": "mean", "SumBackward0": "sum"}
_SAME = (
    "ToCopyBackward0",
    "CloneBackward0",
    "AliasBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
)
_DIVIDES_BY_WEIGHTS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.NLLLoss2d)

_COUPLED = (
    "divides by the class weights of the whole batch, so the privacy guarantee does not hold. Use "
    "fastclip.losses.per_sample_cross_entropy(..., weight=...).mean()."
)


def _contradiction(what: str, found: str, expected: str) -> str:
    return (
        f"{what} is a {found} over the batch, but loss_reduction={expected!r}, so each contribution "
        "depends on the batch size and the privacy guarantee does not hold. Pass "
        f"loss_reduction={found!r}, or take the {expected} of the samples' losses."
    )


def check_criterion(criterion: Any, loss_reduction: str, model: nn.Module) -> None:
    """Check that a criterion does not contradict `loss_reduction`, and is not trained itself.

    Args:
        criterion: a module or a function (functools.partial included). An unknown reduction is accepted.
        model: the criterion may hold parameters of it.

    Raises:
        ArgumentError: with the suggested fix.
    """
    if isinstance(criterion, nn.Module) and isinstance(model, nn.Module):
        of_model = set(model.parameters())
        own = [n for n, p in criterion.named_parameters() if p.requires_grad and p not in of_model]
        if own:
            raise ArgumentError(
                f"criterion {type(criterion).__name__} trains parameters of its own ({', '.join(own)}), "
                f"and their gradients get neither clipping nor noise. {OUTSIDE}",
                doc="untracked-use",
            )
    reduction = _reduction(criterion)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    if reduction == "none":
        raise ArgumentError(
            f"criterion expects reduction={loss_reduction!r} as in loss_reduction, got {name} with "
            f"reduction='none'. Change its reduction, or omit criterion and call .{loss_reduction}() on "
            "its losses.",
            doc="coupled-loss",
        )
    found = _OF_ROWS.get(reduction or "")
    if found is not None and found != loss_reduction:
        raise ArgumentError(
            _contradiction(f"criterion {name}", found, loss_reduction), doc="coupled-loss"
        )


def check_coupling(criterion: Any) -> None:
    """Check that a criterion does not divide by the class weights of the batch.

    Raises:
        ArgumentError: with the suggested fix.
    """
    weighted = isinstance(criterion, _DIVIDES_BY_WEIGHTS) and criterion.weight is not None
    if weighted and criterion.reduction == "mean":
        name = type(criterion).__name__
        raise ArgumentError(
            f"criterion {name}(weight=...) with a mean {_COUPLED}", doc="coupled-loss"
        )


def _reduction(criterion: Any) -> str | None:
    """The reduction that the criterion states; None if it states none."""
    value = getattr(criterion, "reduction", None)
    if value is None and not isinstance(criterion, nn.Module) and callable(criterion):
        try:
            value = inspect.signature(criterion).parameters["reduction"].default
        except (KeyError, TypeError, ValueError):  # it takes none, or has no signature
            return None
    return value if isinstance(value, str) else None


class SeenLoss(NamedTuple):
    """What the graph of a loss shows."""

    name: str
    reduction: str
    weighted: bool


def running_loss() -> SeenLoss | None:
    """What is known about the loss of the running backward pass; None for most losses.

    A loss that is multiplied, divided or added to after its reduction may be anything.
    """
    roots = running_roots()
    if roots is None or roots.seeded or len(roots.nodes) != 1:
        return None
    (node,), whole = roots.nodes, None
    while node is not None:
        name = node.name()
        saved = getattr(node, SAVED_REDUCTION, None)
        if saved is not None and saved < len(_REDUCTIONS):
            own = _REDUCTIONS[saved]
            if own == "none" and whole is not None:
                return SeenLoss(name, whole, False)
            if own != "none" and whole is None:
                return SeenLoss(name, own, own == "mean" and _weighted(node))
            return None
        if name in _WHOLE and whole is None:
            whole = _WHOLE[name]
        elif name not in _SAME and not is_scaled(node):
            return None
        node = node.next_functions[0][0]
    return None


def _weighted(node: Node) -> bool:
    """Whether a mean over classes divides by class weights."""
    if not node.name().startswith("NllLoss"):
        return False
    try:
        return getattr(node, SAVED_WEIGHT) is not None
    except RuntimeError:  # there was one, and the pass has freed it
        return True


def check_begun() -> None:
    """Check that the loss of the pass was recorded, because checks need it.

    Raises:
        GraphError: with the suggested fix.
    """
    if backward_calls.none_runs:
        raise GraphError(
            "The backward pass was not started by torch.autograd.backward, so its loss cannot be "
            "checked. Call loss.backward() instead of an imported or replaced torch.autograd.backward.",
            doc="coupled-loss",
        )


def check_loss(loss: SeenLoss | None, loss_reduction: str, batch_size: int) -> None:
    """Check that a loss does not contradict `loss_reduction`, nor couple samples.

    Raises:
        GraphError: with the suggested fix. For one sample, a sum and a mean are the same.
    """
    if loss is None or batch_size < 2:
        return
    if loss.reduction != loss_reduction:
        what = f"The loss ({loss.name})"
        raise GraphError(_contradiction(what, loss.reduction, loss_reduction), doc="coupled-loss")
    if loss.weighted:
        raise GraphError(
            f"The loss ({loss.name} with class weights) is a mean that {_COUPLED}",
            doc="coupled-loss",
        )


def of_a_part(samples: int, whole: int, expected: str) -> GraphError:
    """The error for the loss of a part of a batch that has another weight than `expected`."""
    return GraphError(
        f"This backward pass holds {samples} of the {whole} samples of a sampled batch, and its loss is "
        f"not their {expected}. To accumulate gradients, take the {expected} of each part, and let "
        "BatchMemoryManager split batches.",
        doc="step-order",
    )
