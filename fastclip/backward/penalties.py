"""Terms of the loss that hold no data: the distance from given weights (FedProx), L1, L2, orthogonality.

Their gradient depends on no sample, so it needs neither clipping nor noise. It is added to the noisy
gradient unchanged, in the unit of the loss. The traced steps follow samples through every operation, and
determine which gradients of private parameters are such ones. In later steps the terms must be the same
functions: the same nodes of the graph, joined in the same way. Constants in them are taken to be public,
as the learning rate is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from fastclip.backward.loss import is_scaled, running_roots, running_scale
from fastclip.core.autograd import Node, above_private
from fastclip.core.torch_names import at_end_of_pass, backward_calls, current_task

Form = tuple[Any, ...]
"""The functions that a loss applies to parameters outside the private model."""


class Penalties:
    """Gradients of such terms since the last real step, by parameter.

    Args:
        names: of the private parameters. A copy has no sums.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._forms: set[Form] = set()
        """Forms that hold no data, as a traced step has found."""
        self.known = False
        """The running pass has a loss of such a form."""
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._passes, self._over = 0, False
        """Passes over samples in the physical batch that is summed, and whether it is complete."""
        self._came: list[tuple[nn.Parameter, Tensor | None, float]] = []
        """Gradients of the running pass: the parameter, its `grad` before, and the scale of the loss."""
        self._task = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> Penalties:
        return Penalties({})

    def __reduce__(self) -> Any:
        return Penalties, ({},)

    def allow(self) -> bool:
        """Note that the terms of a traced step's losses outside the model hold no data.

        Returns:
            False if functions that are not torch's own take part: they may change unnoticed.
        """
        if self._task == current_task():
            return True  # of another parameter of this pass
        roots = running_roots()
        form = None if roots is None or roots.seeded else form_of(roots.nodes, self._names)
        if form is None:
            return False
        self._forms.add(form)
        backward_calls.add(self)
        return True

    def begins(self, losses: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """A backward pass is about to begin."""
        given = any(gradient is not None for gradient in gradients)
        nodes = [x.grad_fn for x in losses if x.grad_fn is not None]
        self.known = not given and form_of(nodes, self._names) in self._forms

    def ended(self, failed: bool) -> None:
        """It is over."""
        self.known = False

    def take(self, parameter: nn.Parameter, trains: ref[Any]) -> None:
        """Take such a gradient, which autograd is about to add to `parameter.grad`.

        Args:
            trains: the model's gradient state.
        """
        task = current_task()
        if self._task != task:
            self.drop()
            self._task = task
            at_end_of_pass(partial(self._end, trains, task))
        self._came.append((parameter, parameter.grad, running_scale()))
        parameter.grad = None

    def _end(self, trains: ref[Any], task: int) -> None:
        """End a pass that has not trained the model; the gradient state ends the others."""
        grad_state = trains()
        if self._task == task and not (grad_state is not None and grad_state.running):
            self.finish(trained=False)

    def finish(self, *, trained: bool = True) -> None:
        """The running pass has ended well."""
        if self._over and self._came:
            self.clear()
        self._passes += trained and not self._over
        for parameter, _, scale in self._came:
            if (gradient := parameter.grad) is None:
                continue
            gradient = gradient if scale == 1.0 else gradient / scale
            before = self._sums.get(parameter)
            self._sums[parameter] = gradient if before is None else before + gradient
        self.drop()

    def drop(self) -> None:
        """Restore `p.grad`, because the running pass is over."""
        for parameter, before, _ in self._came:
            parameter.grad = before
        self._came, self._task = [], -1

    def part_is_over(self) -> None:
        """Note a step that only accumulates: the next physical batch has the same terms again."""
        self._over = True

    def add_to(self, parameters: Collection[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Add the terms' gradients to the noisy ones in place, once per step. If one step averages
        several batches, add their mean.
        """
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if (found := self._sums.get(parameter)) is not None:
                gradient.add_(found.to(gradient.dtype), alpha=1 / max(1, self._passes))
        self.clear()

    def clear(self) -> None:
        """Forget the sums: the step is made, or the batch given up."""
        self._sums.clear()
        self._passes, self._over = 0, False


def form_of(losses: Sequence[Node], names: Mapping[nn.Parameter, str]) -> Form | None:
    """The functions outside the model through which gradients of these losses reach parameters.

    Args:
        losses: their nodes. names: of the parameters.

    Returns:
        The name and the inputs of every such node, in the order of the search. None if one of them is
        not torch's own.
    """
    nodes = [*above_private(deque(losses))]
    leaves = {node: names[node.variable] for node in nodes if _leaf_of(node) in names}
    number = {node: i for i, node in enumerate(_reaching(nodes, leaves))}
    if not all(map(_is_of_torch, number)):
        return None
    return tuple(
        (
            leaves.get(node) or node.name(),
            *(_place(below, number) for below, _ in node.next_functions),
        )
        for node in number
    )


def _reaching(nodes: list[Node], leaves: Collection[Node]) -> list[Node]:
    """Those of `nodes` from which one of the leaves is reached."""
    reaching, before = set(leaves), -1
    while len(reaching) > before:
        before = len(reaching)
        for node in reversed(nodes):
            if any(below in reaching for below, _ in node.next_functions):
                reaching.add(node)
    return [node for node in nodes if node in reaching]


def _leaf_of(node: Node) -> nn.Parameter | None:
    return getattr(node, "variable", None)


def _place(below: Node | None, number: Mapping[Node, int]) -> int | str:
    return "constant" if below is None else number.get(below, "elsewhere")


def _is_of_torch(node: Node) -> bool:
    """Whether it is not a custom function, which could do something else in a later backward pass."""
    return is_scaled(node) or (
        type(node).__module__ == "builtins" and "Cpp" not in type(node).__name__
    )
