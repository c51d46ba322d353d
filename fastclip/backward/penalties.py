"""Terms of the loss that hold no data: the distance from given weights (FedProx), L1, L2, orthogonality.

Their gradient tells nothing about a sample, so it needs neither clipping nor noise: it is added to the
noisy gradient as it is, in the unit of the loss. Whether a gradient that autograd brings to a private
parameter is such a one, the traced steps tell, which follow samples through every operation. In later
steps the terms must be the same functions: the same nodes of the graph, joined in the same way.
Constants in them are taken to be public, as the learning rate is.
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
"""Which functions a loss makes of parameters past the private model."""


class Penalties:
    """Gradients of such terms since the last real step, by parameter.

    Args:
        names: of the private parameters. A copy has no sums.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._forms: set[Form] = set()
        """Those that a traced step has found to hold no sample."""
        self.known = False
        """The pass that runs is over a loss of such a form."""
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._passes, self._over = 0, False
        """Passes over samples in the physical batch that is summed, and whether it is complete."""
        self._came: list[tuple[nn.Parameter, Tensor | None, float]] = []
        """What the running pass brings: the parameter, its `grad` before, and the scale of the loss."""
        self._task = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> Penalties:
        return Penalties({})

    def __reduce__(self) -> Any:
        return Penalties, ({},)

    def allow(self) -> bool:
        """A traced step has found that what comes of its losses past the model holds no sample.

        Returns:
            False if functions that are not torch's own have a part in it: they may change unseen.
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
        """Autograd is about to add such a gradient to `parameter.grad`, which gets another place.

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
        """The end of a pass that has not trained the model; of others the gradient state tells."""
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
        """The running pass is over: `p.grad` is what it was before."""
        for parameter, before, _ in self._came:
            parameter.grad = before
        self._came, self._task = [], -1

    def part_is_over(self) -> None:
        """A step that only accumulates: the next physical batch brings the same terms again."""
        self._over = True

    def add_to(self, parameters: Collection[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Add the terms' gradients to the noisy ones, in place: once a step, and of several batches that
        are averaged in one step their mean.
        """
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if (found := self._sums.get(parameter)) is not None:
                gradient.add_(found.to(gradient.dtype), alpha=1 / max(1, self._passes))
        self.clear()

    def clear(self) -> None:
        """The step is made, or the batch given up."""
        self._sums.clear()
        self._passes, self._over = 0, False


def form_of(losses: Sequence[Node], names: Mapping[nn.Parameter, str]) -> Form | None:
    """The functions through which gradients of these losses reach parameters, not through the model.

    Args:
        losses: their nodes. names: of the parameters.

    Returns:
        Of every such node, in the order in which it is met, the name and where its results go. None if
        one of them is not torch's own.
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
    """Not a function that somebody has written, whose backward pass may do other things later."""
    return is_scaled(node) or (
        type(node).__module__ == "builtins" and "Cpp" not in type(node).__name__
    )
