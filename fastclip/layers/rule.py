"""The protocol of a layer's rule, and the registry that finds the rule of a module.

A rule is three things: a forward pass that says what to save, a backward pass that returns the
input's gradient and records each parameter's contribution, and the name under which it appears in
`engine.plan()`. It never sees clipping strategies, optimizers or other layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from fastclip import ops
from fastclip.layers.customised import (
    Originals,
    are_unchanged,
    customised,
    originals,
    unchanged,
)
from fastclip.layers.records import Record
from fastclip.planner import Choice


class Plans(Protocol):
    """How the norms of a contribution are computed.

    Attributes:
        last_input: what is known of the one that the pass has met last.
    """

    last_input: ops.LastInput

    def plan_linear(self, a: Tensor, g: Tensor, name: str = "weight") -> Choice:
        """The planner's choice for a [b, t, d] and g [b, t, p]."""

    def is_alone(self, name: str) -> bool:
        """Whether the parameter's norm is that of one contribution, of rows that are samples."""

    def plan_conv(
        self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, name: str = "weight"
    ) -> Choice:
        """The planner's choice for a convolution over x [b, c, *space]."""


class LayerCall(Plans, Protocol):
    """What the backward pass of a rule may see and do; the book-keeping stands behind it.

    Attributes:
        g: gradient of the layer's output. saved: what its forward saved. extra: the rest of the
            call. module: the layer, with its current parameters. path: its path in the model.
        needs_input_grad: whether the input's gradient must be returned.
    """

    g: Tensor
    saved: tuple[Any, ...]
    extra: Any
    module: Any
    path: str
    needs_input_grad: bool

    def wants(self, name: str) -> bool:
        """Whether the parameter of this name takes part in the backward pass."""

    def samples(self, x: Tensor) -> Tensor:
        """`x` with one row a sample, in the order of the batch, along axis 0."""

    def record(self, name: str, record: Record) -> None:
        """Add a contribution to the parameter of this name."""


class LayerRule(ABC):
    """Exact per-sample gradients of one kind of layer that maps one tensor to one tensor."""

    name = "layer"
    parameter_names: tuple[str, ...] = ("weight", "bias")
    """The parameters that the rule answers for; those of a module with others are followed by use."""
    multiplies = False
    """The layer is a product with its input: `forward` gets it in the type that autocast multiplies."""
    counts_rows = False
    """The layer's input is flat: its samples are the rows of its output."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRule:
        return self  # rules hold no state of a model

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        """Split the call into the tensor that carries samples and everything else.

        Runs under autograd, so it may pad or cast the input, or make one tensor of several inputs:
        what needs a gradient and is among everything else would not get any, and is refused.
        """
        if len(args) + len(kwargs) != 1:
            raise TypeError(
                f"{type(module).__name__}.forward takes one tensor, got {len(args)} positional and "
                f"{len(kwargs)} keyword arguments"
            )
        return (args[0] if args else next(iter(kwargs.values()))), None

    @abstractmethod
    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The layer's output, and a tuple of tensors that `backward` needs. Runs without autograd."""

    @abstractmethod
    def backward(self, call: LayerCall) -> Tensor | None:
        """Record every contribution that `call.wants`; return the input's gradient or None."""

    def axis(self, module: Any) -> int | None:
        """The axis of the input that holds the samples where the layer prescribes it, else None."""
        return None


Matcher = str | type
_RULES: dict[Matcher, LayerRule] = {}
_ORIGINALS: dict[type, Originals] = {}
"""What each class did when its rule was registered, or first found by name."""
R = TypeVar("R", bound=type[LayerRule])


def register_rule(*types: Matcher) -> Callable[[R], R]:
    """Class decorator: use this rule for these module types.

    A type may be given as its qualified name ("package.module.Class"), so that a library need not
    be installed to have a rule. A rule matches the exact type, and subclasses that override neither
    `forward` nor a method or attribute that it may go through.

    Examples:
        >>> @register_rule(MyScale)
        ... class MyScaleRule(LayerRule):
        ...     def forward(self, module, x, extra): ...
        ...     def backward(self, call): ...
    """

    def decorate(rule: R) -> R:
        for matcher in types:
            _RULES[matcher] = rule()
            if isinstance(matcher, type):
                _ORIGINALS[matcher] = originals(matcher)
        return rule

    return decorate


def registered_rule(module: Any) -> LayerRule | None:
    """The rule that was registered for `module`, or None where it does anything in a way of its own."""
    cls, rule = _matching(module)
    own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
    if cls is None or rule is None or not own.keys() <= set(rule.parameter_names):
        return None
    if len({*map(id, own.values())}) < len(own):  # weight and bias in one: a record would be of one
        return None
    return None if is_parametrized(module) or customised(module, cls, _ORIGINALS[cls]) else rule


def is_registered(cls: type) -> bool:
    """Whether a rule was registered for exactly this class."""
    return cls in _RULES or f"{cls.__module__}.{cls.__qualname__}" in _RULES


def check_customised(module: Any) -> None:
    """Raise if a module that has a rule has been given methods of its own since."""
    own = type(module)
    if own in _RULES and unchanged(module, own, _ORIGINALS[own]):
        return  # nearly all, in every call
    cls, _ = _matching(module)
    changed = [] if cls is None else customised(module, cls, _ORIGINALS[cls])
    if changed:
        raise TypeError(
            f"{', '.join(changed)} have been replaced since make_private, which chose the rule of "
            f"the original {type(module).__name__}; call make_private after the change"
        )


def all_unchanged(cls: type, modules: Collection[Any]) -> bool:
    """Whether none of these modules of a class has been given methods of its own."""
    known = _ORIGINALS.get(cls)
    return known is not None and are_unchanged(modules, cls, known)


def _matching(module: Any) -> tuple[type | None, LayerRule | None]:
    """The first class of `module` that has a rule, and the rule."""
    for cls in type(module).__mro__:
        rule = _RULES.get(cls) or _RULES.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule is not None:
            if cls not in _ORIGINALS:
                _ORIGINALS[cls] = originals(cls)
            return cls, rule
    return None, None
