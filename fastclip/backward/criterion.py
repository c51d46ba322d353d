"""A loss must be what `loss_reduction` says, or what a sample contributes depends on the others.

Under "mean" the engine multiplies each gradient by b, the number of rows of the physical batch; under
"sum" it takes them as they are. A loss of the other kind leaves a factor b, or 1 / b, in every
contribution. Each is still clipped to C, but b is data under Poisson sampling: one row more moves
every contribution that is not clipped, by up to C together, and adds its own, for noise of C.

What can be told is told before training from the criterion, and in every backward pass from the
loss: where its last operation is one of torch's losses, its node in the graph knows its reduction.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

from fastclip._torch import SAVED_REDUCTION, SAVED_WEIGHT, backward_calls
from fastclip.backward.loss_graph import Node, running_roots
from fastclip.backward.loss_scale import is_scaled
from fastclip.backward.outside import OUTSIDE
from fastclip.errors import ArgumentError, GraphError

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
    "divides by the weights of the batch, so each sample's gradient depends on the others and the "
    "guarantee does not hold; use fastclip.losses.per_sample_cross_entropy(..., weight=...).mean()"
)


def _contradiction(what: str, found: str, expected: str) -> str:
    return (
        f"{what} is a {found} over the batch, but loss_reduction={expected!r}: every contribution "
        f"{'grows' if expected == 'mean' else 'shrinks'} with the number of rows drawn, which is "
        "data, so that one row moves their sum by up to 2 C where the noise is for C, and the "
        f"guarantee does not hold; pass loss_reduction={found!r}, or take the {expected}"
    )


def check_criterion(criterion: Any, loss_reduction: str, model: nn.Module) -> None:
    """Refuse a criterion whose reduction contradicts `loss_reduction`, or that is trained itself.

    Args:
        criterion: a module or a function (functools.partial included); one whose reduction cannot
            be told is accepted.
        model: whose parameters it may hold.

    Raises:
        ArgumentError: with the way out.
    """
    if isinstance(criterion, nn.Module) and isinstance(model, nn.Module):
        of_model = set(model.parameters())
        own = [n for n, p in criterion.named_parameters() if p.requires_grad and p not in of_model]
        if own:
            raise ArgumentError(
                f"criterion {type(criterion).__name__} trains parameters of its own ({', '.join(own)}), "
                f"on gradients that are neither clipped nor noised: {OUTSIDE}"
            )
    reduction = _reduction(criterion)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    if reduction == "none":
        raise ArgumentError(
            f"criterion {name} has reduction='none', but loss_reduction={loss_reduction!r} speaks of "
            f"a {loss_reduction} over the batch: pass one with reduction={loss_reduction!r}, or omit "
            f"criterion and call .{loss_reduction}() on its losses"
        )
    found = _OF_ROWS.get(reduction or "")
    if found is not None and found != loss_reduction:
        raise ArgumentError(_contradiction(f"criterion {name}", found, loss_reduction))


def check_coupling(criterion: Any) -> None:
    """Refuse a criterion that divides by the weights of the batch's rows.

    Raises:
        ArgumentError: with the way out.
    """
    weighted = isinstance(criterion, _DIVIDES_BY_WEIGHTS) and criterion.weight is not None
    if weighted and criterion.reduction == "mean":
        name = type(criterion).__name__
        raise ArgumentError(f"criterion {name}(weight=...) with a mean {_COUPLED}")


def _reduction(criterion: Any) -> str | None:
    """What the criterion says of itself; None where it says nothing."""
    value = getattr(criterion, "reduction", None)
    if value is None and not isinstance(criterion, nn.Module) and callable(criterion):
        try:
            value = inspect.signature(criterion).parameters["reduction"].default
        except (KeyError, TypeError, ValueError):  # it takes none, or has no signature
            return None
    return value if isinstance(value, str) else None


class SeenLoss(NamedTuple):
    """What the graph of a loss tells."""

    name: str
    reduction: str
    weighted: bool


def running_loss() -> SeenLoss | None:
    """What can be told of the loss whose backward pass is running; None for most losses.

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
    """Whether a mean over classes divides by their weights."""
    if not node.name().startswith("NllLoss"):
        return False
    try:
        return getattr(node, SAVED_WEIGHT) is not None
    except RuntimeError:  # there was one, and the pass has freed it
        return True


def check_begun() -> None:
    """Refuse a pass whose loss nobody has seen, so that nothing of it could be checked.

    Raises:
        GraphError: with the way out.
    """
    if backward_calls.none_runs:
        raise GraphError(
            "the backward pass was not begun by torch.autograd.backward as it is while a private model "
            "lives, so its loss cannot be checked: call loss.backward(), or torch.autograd.backward by "
            "that name, instead of a function imported from there or replaced since"
        )


def check_loss(loss: SeenLoss | None, loss_reduction: str, batch_size: int) -> None:
    """Refuse a loss that contradicts `loss_reduction`, or that couples rows.

    Raises:
        GraphError: with the way out. Of one row, a sum and a mean are the same.
    """
    if loss is None or batch_size < 2:
        return
    if loss.reduction != loss_reduction:
        raise GraphError(_contradiction(f"the loss ({loss.name})", loss.reduction, loss_reduction))
    if loss.weighted:
        raise GraphError(
            f"the loss ({loss.name} with weights of the classes) is a mean that {_COUPLED}"
        )
