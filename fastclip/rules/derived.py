"""Values computed from parameters alone, and how their gradients go back to the parameters.

Every operation on them runs on separate leaves, in a private graph. A use of a derived value leaves its
per-sample gradient [b, *shape] there. At the end of the backward pass all of these go back through that
graph together, and become per-sample gradients of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fastclip.core.torch_names import (
    Native,
    memory_of,
    of_class,
    transformed,
    tree_leaves,
    tree_map,
)
from fastclip.errors import GraphError, ParameterLeakError, UnsupportedLayerError
from fastclip.rules.slices import FOLLOWED, Origin, follow, whole
from fastclip.rules.use import in_place, plain_name
from fastclip.samples.inputs import parts_of
from fastclip.samples.layout import Rows
from fastclip.samples.probing import of_samples

if TYPE_CHECKING:
    from fastclip.rules.use import Intercepts


@dataclass(eq=False)
class Source:
    """Where a derived value came from."""

    interceptor: Intercepts
    graph: DerivedGraph
    value: Tensor
    """With its history, in the separate graph."""
    parameters: set[nn.Parameter]
    """The parameters it was computed from. A value and its views share one set: both may be written."""
    label: int
    """The same for the same computation in every forward pass."""
    written: list[Hashable] = field(default_factory=list)
    """The calls that wrote parameters into a tensor of constants."""
    origin: Origin | None = None
    """Where its entries lie in one parameter, if they do."""
    version: int = 0
    """The version of the value that `origin` describes."""
    rows: set[Rows] = field(default_factory=set)
    """Constants whose rows it was computed from, according to the probe."""

    def __post_init__(self) -> None:
        self.version = self.value._version

    @property
    def lies(self) -> Origin | None:
        """`origin`, unless the value has been changed in place since."""
        return self.origin if self.value._version == self.version else None


class DerivedGraph:
    """The derived values of one forward pass.

    Args:
        interceptor: of the model.
    """

    def __init__(self, interceptor: Intercepts) -> None:
        self._interceptor = interceptor
        self.leaves: dict[nn.Parameter, Tensor] = {}

    def derive(self, func: Callable, args: tuple, kwargs: dict, label: int) -> Any:
        """Returns the result of `func`. Its tensors that need a gradient are derived values."""
        parameters: set[nn.Parameter] = set()

        def native(value: Any) -> Any:
            if type(value) is PrivateParameter:
                if not value.requires_grad:
                    return value.detach()
                parameters.add(value)
                return self._leaf(value)
            if type(value) is Derived:
                source = value.source
                check_current(source, self)
                parameters.update(source.parameters)
                return source.value
            if isinstance(value, Tensor) and value.requires_grad:
                raise UnsupportedLayerError(
                    f"{func.__name__} takes a parameter and a tensor that needs a gradient, but "
                    "its output has no samples, so per-sample gradients do not exist. Detach that "
                    "tensor."
                )
            return value

        given, named = tree_map(native, args), tree_map(native, kwargs)
        written = in_place(func) and type(args[0]) is Tensor
        with Native(), torch.enable_grad(), _unpacked():
            if written:  # a constant is filled with values of parameters
                given = (args[0].detach(), *given[1:])
            out = func(*given, **named)
        if written:
            source = Source(self._interceptor, self, given[0], parameters, hash((label, 0)))
            filled = Derived.become(args[0], source)
            return None if out is None else filled
        if in_place(func):
            args[0].source.parameters.update(parameters)
            return None if out is None else args[0]
        sources = [x.source for x in tree_leaves((args, kwargs)) if type(x) is Derived]
        origins = self._origins(func, args, kwargs, out)

        def wrap(number: int, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            own = next((s.parameters for s in sources if _one_memory(s.value, value)), None)
            own = set() if own is None else own
            own.update(parameters)
            source = Source(
                self._interceptor,
                self,
                value,
                own,
                hash((label, number)),
                origin=origins.get(number),
            )
            return Derived.of(value, source)

        if isinstance(out, (tuple, list)):
            wrapped = [wrap(i, value) for i, value in enumerate(out)]
            named = hasattr(out, "_fields") or type(out) not in (tuple, list)
            return type(out)(wrapped) if not named else tuple(wrapped)
        return wrap(0, out)

    @staticmethod
    def _origins(func: Callable, args: tuple, kwargs: dict, out: Any) -> dict[int, Origin | None]:
        """Returns where the values in `out` lie in a parameter, by their number."""
        if plain_name(func) not in FOLLOWED:
            return {}
        private = [x for x in tree_leaves((args, kwargs)) if is_private(x)]
        if len(private) != 1:
            return {}
        value = private[0]
        origin = whole(value) if type(value) is PrivateParameter else value.source.lies
        return (
            {}
            if origin is None
            else dict(enumerate(follow(origin, func, value, args, kwargs, out)))
        )

    def _leaf(self, parameter: nn.Parameter) -> Tensor:
        leaf = self.leaves.get(parameter)
        if leaf is None:
            leaf = self.leaves[parameter] = parameter.detach().requires_grad_()
        return leaf

    def pull_back(
        self, contributions: list[tuple[GradientEdge, Tensor]]
    ) -> dict[nn.Parameter, Tensor]:
        """Returns per-sample gradients [b, *shape] of the parameters.

        Args:
            contributions: derived values, and their per-sample gradients [b, *shape].
        """
        edges = [edge for edge, _ in contributions]
        gradients = [gradient for _, gradient in contributions]
        leaves = list(self.leaves.values())
        if not len(gradients[0]):
            shapes = [(0, *leaf.shape) for leaf in leaves]
            found: list[Tensor | None] = [
                leaf.new_zeros(s) for leaf, s in zip(leaves, shapes, strict=True)
            ]
        else:
            names = self._interceptor.grad_state.names
            with of_samples(", ".join(names.get(p, "?") for p in self.leaves)):
                found = _batched(edges, leaves, gradients)
        return {
            parameter: gradient
            for parameter, gradient in zip(self.leaves, found, strict=True)
            if gradient is not None
        }


def _one_memory(first: Tensor, second: Tensor) -> bool:
    """Whether an in-place change of one changes the other (of a sparse tensor, its values)."""
    return memory_of(parts_of(first)[-1]) == memory_of(parts_of(second)[-1])


def check_current(source: Source, graph: DerivedGraph | None) -> None:
    """Checks that a value belongs to this forward pass, and that its parameters are not frozen since.

    Raises:
        GraphError: saying so.
    """
    if source.graph is not graph:
        raise GraphError(
            "A value computed from parameters is used outside the forward pass that computed it, "
            "where it belongs to no sample. Compute it in every forward pass, or detach it.",
            doc="untracked-use",
        )
    if not all(parameter.requires_grad for parameter in source.parameters):
        raise GraphError(
            "A parameter was frozen (requires_grad_(False)) after a value was computed from it in "
            "the same forward pass, so its gradient would be lost. Freeze it before the forward "
            "pass.",
            doc="changed-model",
        )


def edge_of(derived: Derived) -> GradientEdge:
    """Returns the edge of the derived value as it is now, before later changes in place."""
    with Native():
        return get_gradient_edge(derived.source.value)


def _batched(
    edges: list[GradientEdge], leaves: list[Tensor], gradients: list[Tensor]
) -> list[Tensor | None]:
    with torch.enable_grad():
        try:
            return list(
                torch.autograd.grad(
                    edges, leaves, gradients, retain_graph=True, allow_unused=True,
                    is_grads_batched=True,
                )
            )  # fmt: skip
        except GraphError:
            raise
        except RuntimeError:  # a backward that cannot be batched: one sample at a time
            rows = [
                torch.autograd.grad(
                    edges, leaves, [g[i] for g in gradients], retain_graph=True, allow_unused=True
                )
                for i in range(len(gradients[0]))
            ]
    return [
        None if all(x is None for x in column)
        else torch.stack([torch.zeros_like(leaf) if x is None else x for x in column])
        for leaf, column in zip(leaves, zip(*rows, strict=True), strict=True)
    ]  # fmt: skip


@contextmanager
def _unpacked() -> Iterator[None]:
    """Keeps saved tensors unchanged. An enclosing checkpoint would recompute them."""
    with saved_tensors_hooks(_packed, _as_it_was):
        yield


def _packed(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # otherwise a saved tensor would hold itself


def _as_it_was(packed: tuple[Tensor, int]) -> Tensor:
    """Returns the saved tensor. With hooks, torch does not compare versions."""
    x, version = packed
    if x._version != version:
        raise GraphError(
            f"A tensor of shape {list(x.shape)} was changed in place after a value had been "
            "computed from it, so that value's gradient would be wrong. Change a clone, or change "
            "it after loss.backward().",
            doc="changed-tensors",
        )
    return x


# -------------------------------------------------------------------------------------------------
# Parameters and values computed from them, which see every function called with them.
#
# While the model runs, the class of a parameter is PrivateParameter. Torch then passes every function
# called with it to `__torch_function__`: in its own module, in another one, in a closure, in a list
# or in a recomputation. Identity, attributes and memory are unchanged. Optimizers, deepcopy and
# pickle see a parameter.


_INTERCEPTOR = "_fastclip_uses"


class PrivateParameter(nn.Parameter):
    """A trained parameter while the private model runs."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _called(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        with Native():
            return nn.Parameter.__reduce_ex__(self.detach().requires_grad_(), protocol)


class Derived(Tensor):
    """A value computed from parameters and constants alone, such as a normalized weight or W + B A.

    It requires a gradient. A use that is not intercepted then raises an error.
    """

    source: Source

    @staticmethod
    def of(value: Tensor, source: Source) -> Derived:
        """Makes a derived value of these numbers."""
        with Native():
            derived = of_class(Derived, value)
            Tensor.register_hook(derived, _leaked)
        derived.source = source
        return derived

    @staticmethod
    def become(constant: Tensor, source: Source) -> Derived:
        """Turns a tensor of constants that was filled with such values into a derived one."""
        if constant._is_view() or constant.requires_grad:
            raise UnsupportedLayerError(
                "A view of a constant tensor is filled with values of parameters, so their "
                "gradients would be lost. Index the tensor itself, or use torch.cat or "
                "torch.stack."
            )
        constant.requires_grad_()
        constant.register_hook(_leaked)
        constant.__class__ = Derived
        constant.source = source  # type: ignore[attr-defined]
        return constant  # type: ignore[return-value]

    def register_hook(self, hook: Any) -> Any:
        """Raises an error, because no gradient of the whole batch exists that a hook could see.

        Raises:
            UnsupportedLayerError: always.
        """
        raise UnsupportedLayerError(
            "A hook on the gradient of a value computed from parameters would not run, because "
            "only its per-sample gradients exist. Remove the hook, and do its work in the forward "
            "pass.",
            doc="untracked-use",
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _called(func, args, kwargs or {})


def _leaked(gradient: Tensor) -> None:
    raise ParameterLeakError(
        "A value computed from parameters is used where fastclip cannot follow it, such as a "
        "custom autograd function or an outside loss, so its gradient would be unclipped. Use it "
        "in the model's forward with torch's own functions."
    )


_UNSEEN = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "data_ptr",
        "untyped_storage",
        "storage",
        "get_device",
        "requires_grad_",
        "register_hook",
        "retain_grad",
        "register_post_accumulate_grad_hook",
        "__repr__",
        "__format__",
        "__hash__",
        "__len__",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__deepcopy__",
        "__reduce_ex__",
        "__setstate__",
        "share_memory_",
        "is_shared",
        "is_pinned",
        "pin_memory",
        "detach",
        "is_signed",
        "is_inference",
        "has_names",
        "__set__",
        "__delete__",
        "backward",
        "is_set_to",
        "__dir__",
        "equal",
        "allclose",
        "__dlpack__",
        "__dlpack_device__",
        "is_same_size",
    ]
)
"""Functions without a gradient."""
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are views."""
_KNOWN: dict[Any, bool] = {}
APART: set[Any] = {torch.autograd.grad}
"""Functions that run another body than their own, or none, also without a graph."""


def _is_seen(func: Any) -> bool:
    known = _KNOWN.get(func)
    if known is None:
        name = func.__name__
        known = func.__self__.__name__ in _VIEWS if name == "__get__" else name not in _UNSEEN
        _KNOWN[func] = known
    return known


def _called(func: Callable, args: tuple, kwargs: dict) -> Any:
    if _is_seen(func) and (torch.is_grad_enabled() or func in APART):
        interceptor = _interceptor_of((*args, *kwargs.values()))
        if interceptor is not None:
            if transformed():
                raise UnsupportedLayerError(
                    f"{func.__name__} takes a parameter inside torch.func.vmap, grad or vjp, where "
                    "fastclip cannot follow its samples. Call it outside, on the whole batch.",
                    doc="untracked-use",
                )
            return interceptor.called(func, args, kwargs)
    with Native():
        return func(*args, **kwargs)


def _interceptor_of(values: Iterable[Any]) -> Intercepts | None:
    for value in values:
        kind = type(value)
        if kind is PrivateParameter:
            return value.__dict__.get(_INTERCEPTOR)
        if kind is Derived:
            return value.source.interceptor
        if kind in (list, tuple):
            found = _interceptor_of(value)
            if found is not None:
                return found
    return None


def is_private(value: Any) -> bool:
    """Whether this is an intercepted parameter, or a value derived from one."""
    return type(value) in (PrivateParameter, Derived)


def parameters_of(value: Any) -> Iterable[nn.Parameter]:
    """Returns the parameters that a private value is or was computed from."""
    return (value,) if type(value) is PrivateParameter else value.source.parameters


def detached(value: Any) -> Any:
    """Returns a private value detached, and any other value unchanged."""
    if is_private(value):
        with Native():
            return value.detach()
    return value


@contextmanager
def intercepted(parameters: Iterable[nn.Parameter], by: Intercepts) -> Iterator[None]:
    """Context in which the uses of these parameters are intercepted.

    Raises:
        UnsupportedLayerError: a parameter's class defines `__torch_function__` itself.
    """
    changed: list[nn.Parameter] = []
    try:
        for parameter in parameters:
            kind = type(parameter)
            if kind is PrivateParameter:
                continue
            if kind is not nn.Parameter:
                raise UnsupportedLayerError(
                    f"A parameter of class {kind.__name__} is used outside a layer with a rule, "
                    "where only torch.nn.Parameter can be followed. Register a layer rule with "
                    "@fastclip.rules.register_rule, or freeze the parameter."
                )
            parameter.__dict__[_INTERCEPTOR] = by
            parameter.__class__ = PrivateParameter
            changed.append(parameter)
        yield
    finally:
        for parameter in changed:
            parameter.__class__ = nn.Parameter
            parameter.__dict__.pop(_INTERCEPTOR, None)


# -------------------------------------------------------------------------------------------------
# Functions of torch that are composed of others: each function inside is seen separately.
#
# Those that check for overridden arguments themselves run unchanged, others as `composite` says.
# Those that read only a tensor's shape or type do not use its values.


_COMPOSITE = (F.multi_head_attention_forward,)


def _never(*args: Any) -> bool:
    return False


def _body(func: Any) -> FunctionType:
    asked = {n: _never for n in func.__globals__ if n.startswith("has_torch_function")}
    body = FunctionType(
        func.__code__, {**func.__globals__, **asked}, func.__name__, func.__defaults__,
        func.__closure__,
    )  # fmt: skip
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    other, *rest = args or (kwargs.pop("other", None),)
    if not isinstance(other, Tensor):
        return NotImplemented
    return x.to(other.device, other.dtype, *rest, **kwargs)


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


_BODIES: dict[Any, Callable[..., Any]] = {
    **{func: _body(func) for func in _COMPOSITE},
    Tensor.to: _to,
    Tensor.type_as: lambda x, other: x.to(other.device, other.dtype),
    Tensor.expand_as: lambda x, other: x.expand(other.shape),
    Tensor.view_as: lambda x, other: x.view(other.shape),
    Tensor.reshape_as: lambda x, other: x.reshape(other.shape),
    torch.broadcast_tensors: _broadcast,
}


def composite(func: Any, body: Callable[..., Any]) -> None:
    """Run `body` for this function.

    Also without a graph, because a checkpoint that recomputes it must draw the same random numbers.

    Args:
        body: returns NotImplemented for a call that it does not decompose.
    """
    _BODIES[func] = body
    APART.add(func)


def opened(func: Any, args: tuple, kwargs: dict) -> Callable[..., Any] | None:
    """Returns the body of a composite function, None for any other."""
    if func is F.scaled_dot_product_attention:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        return _attention if is_private(mask) else None
    return _BODIES.get(func)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with a trained bias. Its gradient is that of the scores, which no fused kernel gives."""
    if is_causal:
        raise RuntimeError("scaled_dot_product_attention takes attn_mask or is_causal, not both.")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1) + attn_mask
    return torch.dropout(scores.softmax(-1), dropout_p, train=True) @ value
