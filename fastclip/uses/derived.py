"""Values computed from parameters and constants alone, and the way back from them to the parameters.

Every operation on them runs on leaves of its own, in a graph that no one else sees. A use of a derived
value leaves its per-sample gradient [b, *shape] there; at the end of the backward pass they go back
through that graph together, and become per-sample gradients of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fastclip._torch import Native, memory_of, tree_leaves, tree_map
from fastclip.errors import GraphError, UnsupportedLayerError
from fastclip.samples.chosen import Rows
from fastclip.samples.foreign import of_samples
from fastclip.samples.parts import parts_of
from fastclip.uses.origin import FOLLOWED, Origin, follow, whole
from fastclip.uses.proxy import Derived, PrivateParameter, is_private
from fastclip.uses.rule import in_place, plain_name

if TYPE_CHECKING:
    from fastclip.uses.keeper import Intercepts


@dataclass(eq=False)
class Source:
    """Where a derived value came from."""

    interceptor: Intercepts
    graph: DerivedGraph
    value: Tensor
    """With its history, in the graph of its own."""
    parameters: set[nn.Parameter]
    """What it was computed from; one set for a value and its views, through which it may be written."""
    label: int
    """The same for the same computation in every forward pass."""
    written: list[Hashable] = field(default_factory=list)
    """The calls that wrote parameters into a tensor of constants."""
    origin: Origin | None = None
    """Where its entries lie in one parameter, if they do."""
    version: int = 0
    """Of the value for which that is so."""
    rows: set[Rows] = field(default_factory=set)
    """Constants whose rows it was computed of, as a probe has seen it."""

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
        """The result of `func`, whose tensors are derived values where they have a gradient."""
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
                    f"{func.__name__} takes a parameter and a tensor that needs a gradient, but its "
                    "output has no samples, so no per-sample gradient exists; detach that tensor"
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
        """Where the values in `out` lie in a parameter, by their number."""
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
        """Per-sample gradients [b, *shape] of the parameters.

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
            names = self._interceptor.keeper.names
            with of_samples(", ".join(names.get(p, "?") for p in self.leaves)):
                found = _batched(edges, leaves, gradients)
        return {
            parameter: gradient
            for parameter, gradient in zip(self.leaves, found, strict=True)
            if gradient is not None
        }


def _one_memory(first: Tensor, second: Tensor) -> bool:
    """A change of the one in place changes the other; of a sparse tensor its values count."""
    return memory_of(parts_of(first)[-1]) == memory_of(parts_of(second)[-1])


def check_current(source: Source, graph: DerivedGraph | None) -> None:
    """Refuse a value of another forward pass, or of parameters that have been frozen since.

    Raises:
        GraphError: saying so.
    """
    if source.graph is not graph:
        raise GraphError(
            "a value computed from parameters alone is used outside the forward pass that computed it "
            "(kept from an earlier one, or returned by the model): it belongs to no sample there; "
            "compute it in every forward pass and use it with the batch, or detach it"
        )
    if not all(parameter.requires_grad for parameter in source.parameters):
        raise GraphError(
            "a parameter was frozen (requires_grad_(False)) between the computation of a value from it "
            "and the use of that value in the same forward pass, so its gradient would be lost; freeze "
            "it before the forward pass, or detach the value"
        )


def edge_of(derived: Derived) -> GradientEdge:
    """The derived value as it is now: a later change in place makes it another one."""
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
    """What is saved here is kept as it is: a checkpoint around it would compute it again."""
    with saved_tensors_hooks(_packed, _as_it_was):
        yield


def _packed(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # what was saved would hold itself else


def _as_it_was(packed: tuple[Tensor, int]) -> Tensor:
    """What was saved; torch compares versions only of what no hooks have packed."""
    x, version = packed
    if x._version != version:
        raise GraphError(
            f"a tensor of shape {list(x.shape)} (a parameter, or a value computed from such) was "
            "changed in place after another value had been computed from it, whose gradient asks for "
            "what it was; change a clone of it, or change it after loss.backward()"
        )
    return x
