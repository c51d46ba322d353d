"""The protocol of a layer's rule, and which rule a module has.

A rule has a forward pass, which says what to save, and a backward pass. The backward pass returns the
input's gradient and records the contribution of each parameter. The rule's name appears in
`engine.plan()`. A rule never sees clipping strategies, optimizers or other layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, is_
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import is_parametrized

from fastclip import ops
from fastclip.core.torch_names import Native, saving_hooks
from fastclip.errors import ArgumentError, ArgumentTypeError, GraphError, where
from fastclip.ops.planner import NormMethod
from fastclip.rules.records import KeptRecord, Record

# -------------------------------------------------------------------------------------------------
# Whether a module still computes what its rule was written for.
#
# torch's layers can be customized without overriding `forward`: by a method that it calls
# (`_conv_forward`), by a property instead of a weight, or for a single module by an attribute.
# A rule sees none of this.


_HARMLESS = {
    "_fill_padding_idx_with_zero",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "extra_repr",
    "from_pretrained",
    "reset_parameters",
    "reset_running_stats",
}
"""Methods of torch's layers that no forward pass goes through."""
_ACCESS = ("__getattr__", "__getattribute__")

_PARAMETERS = frozenset({"weight", "bias"})
"""An attribute of such a name is found before a module's parameter."""
_FORWARD = {"forward"}
"""Every private layer has its own, from fastclip."""

MARKS = frozenset({"_fastclip", "_fastclip_part"})
"""A module that has one of these has a forward from fastclip."""
OWN = "_fastclip_own"
"""The module's own `forward` before that, if it had one."""


def own_forward(module: Any) -> Any:
    """Returns the forward that was set on the object itself (`model.forward = ...`) and differs from the
    class's, else None."""
    held = module.__dict__
    found = held.get("forward")
    if not MARKS.isdisjoint(held):
        found = held[OWN].forward if OWN in held else None
    if isinstance(found, MethodType) and found.__self__ is module:
        return None if found.__func__ is getattr(type(module), "forward", None) else found
    return found


class Originals:
    """What the forward pass of a class may go through: its methods, and how attributes are found.

    It is not a Snapshot, because subclasses are compared with it, and these may behave differently.
    """

    def __init__(self, code: dict[str, Any]) -> None:
        self.code = code
        self.read = attrgetter(*code)
        """All of it, as a class has it."""
        self.names = frozenset(code) - _FORWARD
        """A module itself has none of these."""


def originals(cls: type) -> Originals:
    """Records what a class does when it is first used."""
    names = {
        name
        for base in _own_bases(cls)
        for name, value in vars(base).items()
        if not name.startswith("__") and name not in _HARMLESS and _is_code(value)
    }
    names = names | _FORWARD
    return Originals({name: getattr(cls, name) for name in (*sorted(names), *_ACCESS)})


def customized(module: Any, cls: type, known: Originals) -> list[str]:
    """Returns names of what `module` does differently from `cls` at the registration of its rule.

    Args:
        module: of the class `cls`, or of a subclass. known: `originals(cls)` at that time.
    """
    own = type(module)
    if own is cls and unchanged(module, own, known):
        return []
    found = [name for name, value in known.code.items() if getattr(own, name, None) is not value]
    found += [name for name in known.code if name in module.__dict__ and name != "forward"]
    return found if own is cls else [*found, *_shadows(own, cls)]


def unchanged(module: Any, own: type, known: Originals) -> bool:
    """Whether the class is unchanged and the module overrides nothing. Runs for each layer and step."""
    try:
        return known.names.isdisjoint(module.__dict__) and all(
            map(is_, known.read(own), known.code.values())
        )
    except AttributeError:
        return False


def are_unchanged(modules: Collection[Any], own: type, known: Originals) -> bool:
    """`unchanged` for many modules of one class, without a Python loop."""
    try:
        code = all(map(is_, known.read(own), known.code.values()))
    except AttributeError:
        return False
    kinds = code and {*map(type, modules)} == {own}
    plain = kinds and all(map((known.names | _PARAMETERS).isdisjoint, map(vars, modules)))
    return plain and all(map(_PARAMETERS.isdisjoint, map(vars, own.__mro__)))


def _shadows(own: type, cls: type) -> tuple[str, ...]:
    """Attributes of the layer, its weights among them, that a subclass has defined as its own."""
    data = {name for base in _own_bases(cls) for name in vars(base).get("__annotations__", ())}
    data.update({"weight", "bias"}, getattr(cls, "__constants__", ()))
    subclasses = own.__mro__[: own.__mro__.index(cls)]
    return tuple(sorted(data & {name for base in subclasses for name in vars(base)}))


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base not in nn.Module.__mro__]


def _is_code(value: Any) -> bool:
    """Whether this is a method or a property. A class method is made anew at each access."""
    return not isinstance(value, classmethod) and (callable(value) or hasattr(value, "__get__"))


# -------------------------------------------------------------------------------------------------


class Plans(Protocol):
    """How the norms of a contribution are computed.

    Attributes:
        last_input: what is known of the last input in the pass.
    """

    last_input: ops.LastInput

    def plan_linear(self, a: Tensor, g: Tensor, name: str = "weight") -> NormMethod:
        """The planner's choice for a [b, t, d] and g [b, t, p]."""

    def is_alone(self, name: str) -> bool:
        """Whether the parameter has one contribution, whose rows are samples."""

    def plan_conv(
        self, x: Tensor, g: Tensor, geometry: ops.ConvGeometry, name: str = "weight"
    ) -> NormMethod:
        """The planner's choice for a convolution over x [b, c, *space]."""


class LayerCall(Plans, Protocol):
    """What the backward pass of a rule may see and do; the gradient state implements it.

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
        """`x` with samples along axis 0, in the order of the batch."""

    def record(self, name: str, record: Record) -> None:
        """Add a contribution to the parameter of this name."""


class LayerRule(ABC):
    """Exact per-sample gradients of one kind of layer that maps one tensor to one tensor."""

    name = "layer"
    parameter_names: tuple[str, ...] = ("weight", "bias")
    """The parameters that the rule covers. If a module has others, all are followed by their uses."""
    multiplies = False
    """The layer is a product with its input: `forward` gets it in the type that autocast multiplies."""
    counts_samples = False
    """The layer's input is flat: its samples are the rows of its output."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRule:
        return self  # rules hold no state of a model

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        """Split the call into the tensor that carries samples and everything else.

        Runs under autograd, so it may pad or cast the input, or make one tensor of several inputs.
        Tensors among everything else would not get a gradient: one that needs it raises an error.
        """
        if len(args) + len(kwargs) != 1:
            raise TypeError(
                f"{type(module).__name__}.forward expects one tensor, got {len(args)} positional and "
                f"{len(kwargs)} keyword arguments."
            )
        return (args[0] if args else next(iter(kwargs.values()))), None

    @abstractmethod
    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Returns the layer's output and the tensors that `backward` needs. Runs without autograd."""

    @abstractmethod
    def backward(self, call: LayerCall) -> Tensor | None:
        """Records every contribution that `call.wants`, and returns the input's gradient or None."""

    def axis(self, module: Any) -> int | None:
        """Returns the batch axis of the input if the layer prescribes it, else None."""
        return None


Matcher = str | type
_RULES: dict[Matcher, LayerRule] = {}
_ORIGINALS: dict[type, Originals] = {}
"""The state of each class when its rule was registered, or first found by name."""
R = TypeVar("R", bound=type[LayerRule])


def register_rule(*types: Matcher) -> Callable[[R], R]:
    """Class decorator: use this rule for these module types.

    A type may be given as its qualified name ("package.module.Class"): the library need not be
    installed. A rule matches the exact type. It also matches subclasses that override neither
    `forward` nor a method or attribute that `forward` may use.

    Examples:
        >>> @register_rule(MyScale)
        ... class MyScaleRule(LayerRule):
        ...     def forward(self, module, x, extra): ...
        ...     def backward(self, call): ...

    Raises:
        ArgumentTypeError, ArgumentError: no layer class was given, or the decorated class is no
            LayerRule.
    """
    if not types:
        raise ArgumentError("register_rule expects at least one layer class, got none.")
    for matcher in types:
        if not isinstance(matcher, str) and not _is_kind(matcher, nn.Module):
            raise ArgumentTypeError(
                f"register_rule expects a layer class or its qualified name, got {_shown(matcher)}. "
                "Write @register_rule(MyLayer) above the rule.",
                doc="layer-rule",
            )

    def decorate(rule: R) -> R:
        _check_rule_class(rule)
        for matcher in types:
            _RULES[matcher] = rule()
            if isinstance(matcher, type):
                _ORIGINALS[matcher] = originals(matcher)
        return rule

    return decorate


def _check_rule_class(rule: Any) -> None:
    """Raises ArgumentTypeError for a class that cannot be a rule."""
    if not _is_kind(rule, LayerRule):
        raise ArgumentTypeError(
            f"register_rule expects a subclass of LayerRule, got {_shown(rule)}.", doc="layer-rule"
        )
    names = rule.parameter_names
    if isinstance(names, str):
        raise ArgumentTypeError(
            f"parameter_names of {rule.__name__} expects a tuple of names, got {names!r}. Write "
            f"({names!r},).",
            doc="layer-rule",
        )


def _is_kind(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def uncovered(module: Any) -> tuple[str, list[str]] | None:
    """Why a registered rule is not used: its name, and the trained parameters that it leaves out.

    None if the module's class has no rule, or the rule covers all.
    """
    _, rule = _matching(module)
    if rule is None:
        return None
    trained = [name for name, p in module._parameters.items() if p is not None and p.requires_grad]
    left_out = [name for name in trained if name not in rule.parameter_names]
    return (type(rule).__name__, left_out) if left_out else None


def registered_rule(module: Any) -> LayerRule | None:
    """Returns the rule registered for `module`, or None if the module differs from its class."""
    cls, rule = _matching(module)
    own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
    if cls is None or rule is None or not own.keys() <= set(rule.parameter_names):
        return None
    if len({*map(id, own.values())}) < len(
        own
    ):  # weight and bias are one parameter, and a record covers one
        return None
    return None if is_parametrized(module) or customized(module, cls, _ORIGINALS[cls]) else rule


def is_registered(cls: type) -> bool:
    """Whether a rule was registered for exactly this class."""
    return cls in _RULES or f"{cls.__module__}.{cls.__qualname__}" in _RULES


def check_customized(module: Any) -> None:
    """Raises TypeError if methods of a module with a rule were replaced since make_private."""
    own = type(module)
    if own in _RULES and unchanged(module, own, _ORIGINALS[own]):
        return  # nearly all, in every call
    cls, _ = _matching(module)
    changed = [] if cls is None else customized(module, cls, _ORIGINALS[cls])
    if changed:
        raise TypeError(
            f"{', '.join(changed)} have been replaced since make_private, which chose the rule of "
            f"the original {type(module).__name__}. Call make_private after the change."
        )


def all_unchanged(cls: type, modules: Collection[Any]) -> bool:
    """Whether no method of these modules of a class was replaced."""
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


# -------------------------------------------------------------------------------------------------
# Layers for whose class the user has registered a grad sampler with Opacus.
#
# `opacus.grad_sample.register_grad_sampler(Layer)` takes a function of the layer, its inputs and
# its output's gradient, and returns per-sample gradients. It is needed for layers that cannot be
# followed, such as one with the user's own autograd.Function. These are not known in advance, so it
# is used for every layer without a rule.


Sampler = Callable[[Any, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]
_HOW = "Return {parameter: gradients [samples, *parameter.shape]} for every trained parameter."


def find_rule(module: Any) -> LayerRule | None:
    """Returns the rule of `module`, or a rule from the grad sampler of exactly its class.

    None if it has neither, or differs from its class.
    """
    if own_forward(module) is not None:
        return None
    return registered_rule(module) or _by_sampler(module)


def _by_sampler(module: nn.Module) -> SamplerRule | None:
    """Returns None without a grad sampler, and for those that Opacus ships.

    A layer whose submodules are trained too is followed: the sampler does not cover these.
    """
    kind = type(module)
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
    if sampler is None or str(getattr(sampler, "__module__", "")).startswith("opacus."):
        return None
    own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
    trained = [p for p in module.parameters() if p.requires_grad]
    if is_registered(kind) or len({*map(id, own)}) < len(own) or len(trained) > len(own):
        return None
    return SamplerRule(sampler, tuple(module._parameters))


class _Called(NamedTuple):
    """The rest of a call.

    Attributes:
        graph: input and output of the layer's own graph, if it has one.
    """

    args: tuple
    kwargs: dict
    graph: list[Tensor]


class SamplerRule(LayerRule):
    """The rule of a grad sampler, which computes sample b's gradients from x_b and g_b.

    The layer runs unchanged, and its own backward computes the input's gradient. The sampler is
    trusted, like a user's rule. `fastclip.testing.check_rule` compares it with autograd.
    """

    name = "grad_sampler"

    def __init__(self, sampler: Sampler, names: tuple[str, ...]) -> None:
        self._sampler, self.parameter_names = sampler, names

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        if not args or not all(isinstance(x, Tensor) for x in args):
            raise TypeError("its grad sampler expects positional inputs that are all tensors.")
        return args[0], _Called(args[1:], kwargs, [])

    def forward(self, module: Any, x: Tensor, extra: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.set_grad_enabled(x.requires_grad), Native(), _kept_here():
            own = x.detach().requires_grad_(x.requires_grad)
            out = type(module).forward(module, own, *extra.args, **extra.kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(
                "its grad sampler expects a layer that returns one tensor, got "
                f"{type(out).__name__}"
            )
        if out.requires_grad:
            extra.graph[:] = own, out
        return out.detach(), (x,)

    def backward(self, call: LayerCall) -> Tensor | None:
        wanted = {n: call.module._parameters[n] for n in self.parameter_names if call.wants(n)}
        if wanted:
            self._record(call, wanted)
        if not call.needs_input_grad:
            return None
        if not call.extra.graph:  # it has no derivative
            return torch.zeros_like(call.saved[0])
        own, out = call.extra.graph
        with torch.enable_grad(), Native():
            (found,) = torch.autograd.grad(out, own, call.g, retain_graph=True, allow_unused=True)
        return torch.zeros_like(own) if found is None else found

    def _record(self, call: LayerCall, wanted: dict[str, nn.Parameter]) -> None:
        (x,) = call.saved
        g, inputs = call.samples(call.g), [call.samples(x), *self._others(call, x)]
        each = g.shape[1] if g.dim() > call.g.dim() else 0
        """Rows of the layer per sample, if samples are flattened with other axes."""
        if each:
            g, *inputs = (rows.flatten(0, 1) for rows in (g, *inputs))
        with Native():
            found = self._sampler(call.module, [t.detach() for t in inputs], g)
        self._check(call, found, wanted, len(g))
        for name, parameter in wanted.items():
            own = found[parameter].detach()
            if each:
                own = ops.widen(own).unflatten(0, (len(own) // each, each)).sum(1)
            call.record(name, KeptRecord(own))

    @staticmethod
    def _others(call: LayerCall, x: Tensor) -> list[Tensor]:
        """Returns further positional inputs, which Opacus passes unchanged."""
        others = list(call.extra.args)
        if others and call.samples(x) is not x:
            raise _broken(
                call, "is called with several inputs, but its samples do not lie along axis 0",
                "Register a rule with @fastclip.rules.register_rule.",
            )  # fmt: skip
        return others

    @staticmethod
    def _check(call: LayerCall, found: Any, wanted: dict[str, nn.Parameter], rows: int) -> None:
        """Checks that the sampler returned gradients of the layer's parameters, for each sample."""
        if not isinstance(found, Mapping):
            raise _broken(call, f"returned a {type(found).__name__}", _HOW)
        known = set(call.module._parameters.values())
        if any(key not in known for key in found):
            raise _broken(call, "returned gradients of keys that are not its parameters", _HOW)
        for name, parameter in wanted.items():
            own = found.get(parameter)
            if not isinstance(own, Tensor):
                raise _broken(call, f"returned no gradients of {name}", _HOW)
            if own.shape != (rows, *parameter.shape):
                raise _broken(
                    call, f"returned gradients of {name} of shape {[*own.shape]} instead of "
                    f"{[rows, *parameter.shape]}", _HOW,
                )  # fmt: skip


def _kept_here() -> AbstractContextManager[Any]:
    """Keeps tensors saved by the layer's graph, because a checkpoint runs the whole layer again."""
    if saving_hooks(False) is None:
        return nullcontext()
    return saved_tensors_hooks(Tensor.detach, lambda kept: kept)


def _broken(call: LayerCall, what: str, fix: str) -> GraphError:
    text = f"{where(call.path, call.module)}: its grad sampler {what}. {fix}"
    return GraphError(text, doc="layer-rule")
