"""What may reach the step of the inner optimizer: released gradients, nothing else.

In Opacus' modes autograd writes `p.grad` beside the per-sample gradients, unclipped and without noise.
In the fast mode there is no `p.grad` before the release, and sums would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from fastclip import ops
from fastclip.backward.batch_states import State
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.guards import OPACUS_MARK
from fastclip.errors import StepError


class Gate:
    """A hook before the inner optimizer's step: it is open once after a release.

    It stays with the inner optimizer when the private one is dropped: a script that goes on with
    the optimizer that it gave to make_private would train on raw gradients.
    """

    def __init__(self) -> None:
        self.open = False
        self.passing = False
        """The step that it was open for runs."""
        self.keeper: Callable[[], BookKeeper | None] = lambda: None
        """Of the fast mode: whose sums are to be released first, while it is alive."""

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.open, self.passing = False, self.open
        if self.passing:
            return
        keeper = self.keeper()
        if keeper is not None and keeper.batch.state in _UNRELEASED:
            raise StepError(
                f"step() of {type(optimizer).__name__} was called on a private model, whose gradients "
                "it would not find; call step() of the optimizer that make_private returned, or "
                "cleanup() on the model that it returned, to train without privacy"
            )
        if not any(OPACUS_MARK in p.__dict__ for p in parameters_of(optimizer)):
            return
        raise StepError(
            f"step() of {type(optimizer).__name__} was called on a private model's gradients, which "
            "nobody has clipped or added noise to; call step() of the optimizer that make_private "
            "returned, or cleanup() on the model that it returned, to train without privacy"
        )

    def shut(self, *_: Any) -> None:
        """Nothing is released just now; also a hook after the inner optimizer's step."""
        self.open = self.passing = False


_UNRELEASED = (State.GATHERED, State.HELD, State.JOINED, State.STALE)

_GATES: WeakKeyDictionary[Optimizer, Gate] = WeakKeyDictionary()


def gate_of(optimizer: Optimizer) -> Gate:
    """The one gate of an inner optimizer, closed."""
    gate = _GATES.get(optimizer)
    if gate is None:
        gate = _GATES[optimizer] = Gate()
        optimizer.register_step_pre_hook(gate)
        optimizer.register_step_post_hook(gate.shut)
    gate.shut()
    return gate


def is_open(optimizer: Optimizer) -> bool:
    """Whether this is the inner optimizer of a private one that has just released its gradients."""
    gate = _GATES.get(optimizer)
    return gate is not None and gate.open


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, frozen ones included."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def release_to(parameters: Sequence[nn.Parameter], gradients: Iterable[Tensor]) -> None:
    """Let the inner optimizer find these released gradients, each in its parameter's memory layout."""
    given = [*gradients]
    if [*map(Tensor.stride, given)] != [*map(Tensor.stride, parameters)]:
        given = [ops.laid_out_as(x, p) for x, p in zip(given, parameters, strict=True)]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient


def keep_only(optimizer: Optimizer, released: Iterable[nn.Parameter]) -> None:
    """Drop the gradient of every parameter that this step does not release."""
    parameters, kept = parameters_of(optimizer), {*map(id, released)}
    for own, p in zip(map(id, parameters), parameters, strict=True):
        if own not in kept:
            p.grad = None
