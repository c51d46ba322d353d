"""Private functions in torch's graph: which take part in a backward pass, and what they save for it;
and the nodes of a graph.

They can be differentiated once. A second derivative raises GraphError.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastclip.core.torch_names import (
    RECOMPUTATION,
    StorageWeakRef,
    memory_of,
    node_type,
    saving_hooks,
    will_run,
)
from fastclip.errors import GraphError

Node = Any
"""A node of autograd's graph."""


_PRIVATE: set[type] = set()


def private_function(function: type[Function]) -> type[Function]:
    """Class decorator of a function of the private model: `is_private` recognizes its nodes."""
    _PRIVATE.add(node_type(function))
    return function


def is_private(node: Node) -> bool:
    """Whether a node of the graph belongs to a private layer or use."""
    return type(node) in _PRIVATE or is_of_cpp(node)


def is_of_cpp(node: Node) -> bool:
    """Whether a node is one of csrc/step."""
    return "fastclip::" in node.name()


def above_private(nodes: deque[Node], private: list[Node] | None = None) -> Iterator[Node]:
    """Yields the nodes reached without passing through a private one, nearest first.

    Args:
        nodes: start of the walk; it is used up. private: takes the private nodes that end the walk.
    """
    seen: set[Node] = set()
    while nodes:
        node = nodes.popleft()
        if node in seen:
            continue
        seen.add(node)
        if is_private(node):
            if private is not None:
                private.append(node)
            continue
        yield node
        nodes.extend(below for below, _ in node.next_functions if below is not None)


def differentiable_once(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorator of the backward of a private function, instead of torch's `once_differentiable`.

    Under create_graph=True the gradients are the same numbers. Differentiating them raises
    GraphError.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor | None) -> tuple:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            outputs = backward(ctx, *gradients)
        return tuple(out if out is None else refusing(out, *gradients) for out in outputs)

    return wrapper


def refusing(x: Tensor, *gradients: Tensor | None) -> Tensor:
    """Returns `x`, computed from these gradients, whose derivative raises GraphError.

    It depends on the gradients, and the error lies between them and the model's inputs. It also depends
    on a leaf, for gradients that depend only on the weights.
    """
    with torch.enable_grad():
        return _DifferentiableOnce.apply(x.detach().requires_grad_(), *gradients)


def unopened(layer: str) -> GraphError:
    """Returns the error for a backward pass that reached a layer but did not begin at the output."""
    return GraphError(
        f"The backward pass reached {layer} without passing through the output of the private "
        "model. Compute the loss from what the model's own forward returns, or wrap the pass in "
        "engine.paused() if it must not train.",
        doc="untracked-use",
    )


class _DifferentiableOnce(Function):
    """The identity on the first argument, whose derivative raises GraphError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *gradients: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        raise GraphError(
            "The loss contains gradients taken through the private model, but private layers can "
            "be differentiated only once. Penalize the difference of its outputs at two inputs "
            "instead, (model(x + e * v) - model(x)) / e.",
            doc="second-backward",
        )


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Calls `ctx.save_for_backward`. If a user's hooks take the tensors, it notes their memory."""
    ctx.save_for_backward(*tensors)
    hooks = saving_hooks(False)
    ctx.lay = None
    if hooks is not None and not _is_of_torch(hooks[0]):
        ctx.lay = [None if x is None else StorageWeakRef(x.untyped_storage()) for x in tensors]


def saved(ctx: Any) -> tuple[Any, ...]:
    """Returns the tensors that `save` was given.

    Raises:
        GraphError: hooks that are not torch's replaced them. The new ones may depend on all samples (one
            scale of a compressed batch), and no dry run would show it.
    """
    found: tuple[Any, ...] = ctx.saved_tensors
    if ctx.lay is None:
        return found
    for x, lay in zip(found, ctx.lay, strict=True):
        if x is not None and (lay.expired() or lay.cdata != memory_of(x)):
            raise GraphError(
                "saved_tensors_hooks replaced a tensor that a private layer saved, so one "
                "sample's gradient may depend on other samples. Use torch's own hooks, "
                "torch.autograd.graph.save_on_cpu or torch.utils.checkpoint.",
                doc="changed-tensors",
            )
    return found


def fills_a_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint recomputes the running code only for its saved tensors.

    No gradient goes through these results: the nodes of the first computation take the saved tensors.
    """
    hooks = saving_hooks(False)
    return hooks is not None and _is_of_torch(hooks[0]) and RECOMPUTATION in hooks[0].__qualname__


def _is_of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.")


def taking_part(
    ctx: Any, parameters: Collection[nn.Parameter], known: Container[nn.Parameter]
) -> list[bool]:
    """Returns which of a private function's last arguments are known and take part in the backward pass.

    `needs_input_grad` does not shrink under autograd.grad. Instead this checks whether autograd will run
    the parameter's own node.
    """
    edges = ctx.next_functions
    edges = edges[len(edges) - len(parameters) :]
    pairs = zip(parameters, edges, strict=True)
    return [takes_part(node) and parameter in known for parameter, (node, _) in pairs]


def takes_part(node: Any) -> bool:
    """Whether the running backward pass computes the gradient of this node's parameter."""
    if node is None:
        return False
    try:
        return will_run(node)
    except RuntimeError as error:
        if "autograd.grad" in str(error):
            return False  # it asks for tensors, not for p.grad
        raise GraphError(
            f"Torch does not report whether a parameter takes part in the backward pass ({error}), "
            "so it could be left untrained. Call loss.backward().",
            doc="second-backward",
        ) from error


def reached_without(roots: Iterable[Node], stop: Callable[[Node], bool]) -> tuple[set, set]:
    """Walks down from `roots`, not through nodes for which `stop` is true.

    Returns:
        The other nodes that were reached, and those at which the walk stopped.
    """
    passed: set[Node] = set()
    stopped: set[Node] = set()
    ahead = list(roots)
    while ahead:
        node = ahead.pop()
        if node in passed or node in stopped:
            continue
        if stop(node):
            stopped.add(node)
            continue
        passed.add(node)
        ahead += [below for below, _ in node.next_functions if below is not None]
    return passed, stopped
