"""Parameters and values computed from them, which notice every function that is called with them.

While the model runs, the class of a parameter is PrivateParameter: torch then shows it every function
that it is an argument of (`__torch_function__`), wherever that is: in its own module, in another one, in
a closure, in a list, in a recomputation. Identity, attributes and memory stay as they are; optimizers,
deepcopy and pickle see a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastclip._torch import Native, of_class, transformed
from fastclip.errors import VALUES_IN_LOSSES, ParameterLeakError, UnsupportedLayerError

if TYPE_CHECKING:
    from fastclip.uses.derived import Source
    from fastclip.uses.keeper import Intercepts

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
    """What has been computed from parameters and constants alone: a normalised weight, W + B A.

    It requires a gradient, so that a use which nobody noticed is not lost without a word.
    """

    source: Source

    @staticmethod
    def of(value: Tensor, source: Source) -> Derived:
        """A derived value of these numbers."""
        with Native():
            derived = of_class(Derived, value)
            Tensor.register_hook(derived, _refuse)
        derived.source = source
        return derived

    @staticmethod
    def become(constant: Tensor, source: Source) -> Derived:
        """A plain tensor of constants, which has been filled with such values."""
        if constant._is_view() or constant.requires_grad:
            raise UnsupportedLayerError(
                "a view of a tensor of constants is filled with values of parameters, so that these "
                "would be lost in the tensor that it is a view of; index the tensor itself, or use "
                "torch.cat or torch.stack"
            )
        constant.requires_grad_()
        constant.register_hook(_refuse)
        constant.__class__ = Derived
        constant.source = source  # type: ignore[attr-defined]
        return constant  # type: ignore[return-value]

    def register_hook(self, hook: Any) -> Any:
        """Refused: there is no gradient of the whole batch that it could be shown.

        Raises:
            UnsupportedLayerError: always.
        """
        raise UnsupportedLayerError(
            "a hook is registered on the gradient of a value computed from parameters alone, which "
            "would not run: per-sample gradients are clipped without one; remove the hook, and do its "
            "work in the forward pass (a mask that the value is multiplied by)"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _called(func, args, kwargs or {})


def _refuse(gradient: Tensor) -> None:
    raise ParameterLeakError(
        "a value computed from parameters alone (a normalised weight, a position table) was used where "
        "it could not be followed (a custom autograd function, a scripted function, a loss outside the "
        "model), so its gradient would be unclipped; use torch's own functions there, write the layer's "
        f"rule with @fastclip.layers.register_rule, or freeze these parameters; {VALUES_IN_LOSSES}"
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
"""Functions of which no gradient comes back."""
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are views."""
_KNOWN: dict[Any, bool] = {}
APART: set[Any] = {torch.autograd.grad}
"""Functions for which another body than their own runs, or none, without a graph, too."""


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
                    f"{func.__name__} takes a parameter inside torch.func.vmap, grad or vjp, where its "
                    "samples cannot be followed; call it outside, on the whole batch"
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
    """A parameter that is intercepted, or a value derived from such."""
    return type(value) in (PrivateParameter, Derived)


def parameters_of(value: Any) -> Iterable[nn.Parameter]:
    """What a private value is, or was computed from."""
    return (value,) if type(value) is PrivateParameter else value.source.parameters


def detached(value: Any) -> Any:
    """The numbers of a private value; any other as it is."""
    if is_private(value):
        with Native():
            return value.detach()
    return value


@contextmanager
def intercepted(parameters: Iterable[nn.Parameter], by: Intercepts) -> Iterator[None]:
    """These parameters notice their uses inside.

    Raises:
        UnsupportedLayerError: a parameter has a class that does so itself.
    """
    changed: list[nn.Parameter] = []
    try:
        for parameter in parameters:
            kind = type(parameter)
            if kind is PrivateParameter:
                continue
            if kind is not nn.Parameter:
                raise UnsupportedLayerError(
                    f"a parameter of class {kind.__name__} is used outside a layer with a rule, where "
                    "only torch.nn.Parameter can be followed; write the layer's rule with "
                    "@fastclip.layers.register_rule, or freeze it"
                )
            parameter.__dict__[_INTERCEPTOR] = by
            parameter.__class__ = PrivateParameter
            changed.append(parameter)
        yield
    finally:
        for parameter in changed:
            parameter.__class__ = nn.Parameter
            parameter.__dict__.pop(_INTERCEPTOR, None)
