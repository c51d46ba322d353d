"""The clipped sums of a logical batch: they belong to the one who clipped, not to the parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from fastclip import ops
from fastclip._torch import base_of, plain_results
from fastclip.errors import GraphError, StepError

_NONE = None, 0, None, None
_SHAPE, _NOTHING = attrgetter("shape"), {type(None)}


def _shown_of(parameters: Iterable[nn.Parameter]) -> list[Any]:
    return [*map(getattr, parameters, repeat("summed_grad"), repeat(None))]


class ShownSum(Tensor):
    """A clipped sum as `p.summed_grad` shows it: what is computed of it is a plain tensor.

    Whoever saves a parameter (`torch.save(net.head.weight, file)`, the state of an optimizer, a list of
    parameters) saves its attributes, and a sum without noise is raw data: it is pickled as an empty
    tensor. So are copies that are made of it with a module (`copy.deepcopy`).
    """

    __torch_function__ = plain_results  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.new_empty(0).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownSum:
        return self.detach().clone().as_subclass(ShownSum)


class SumsOfOne(ABC):
    """Sums that one process makes alone."""

    @abstractmethod
    def add(self, parameter: nn.Parameter, clipped: Tensor) -> None:
        """Add a clipped sum of one backward pass, of as many elements as the parameter."""

    def add_all(self, parameters: Sequence[nn.Parameter], clipped: Sequence[Tensor]) -> None:
        """`add` of several."""
        for parameter, total in zip(parameters, clipped, strict=True):
            self.add(parameter, total)

    def together(self, entries: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Lists of parameters, in the order in which a pass is to sum what it holds for them."""
        return [list(entries)[::-1]]

    def exchange(self, parameters: list[nn.Parameter]) -> None:  # noqa: B027 - nobody to tell
        """A pass has summed all that it holds for these."""


class ClippedSums(SumsOfOne):
    """What one engine has summed since its last real step, by parameter.

    `p.summed_grad` shows a sum and is never read back: another engine of the same parameter, or a
    caller, could put something in its place that nobody has clipped. A copy is born empty: raw sums
    are neither copied nor pickled with a model, nor with its parameters (`ShownSum`).
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, int, nn.Parameter, Tensor]] = {}
        """By the parameter's id, which is quicker to find than itself; no other has it: it is held."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ClippedSums:
        return ClippedSums()

    def __reduce__(self) -> Any:
        return ClippedSums, ()

    def add_all(self, parameters: Sequence[nn.Parameter], clipped: Sequence[Tensor]) -> None:
        own = {*map(id, parameters)}
        first = len(own) == len(parameters) and self._held.keys().isdisjoint(own)
        alone = {*map(type, _shown_of(parameters)), *map(type, map(base_of, clipped))} == _NOTHING
        shapes = [*map(_SHAPE, clipped)] == [*map(_SHAPE, parameters)]
        strides = [*map(Tensor.stride, clipped)] == [*map(Tensor.stride, parameters)]
        if not (first and alone and shapes and strides):
            super().add_all(parameters, clipped)
            return
        for parameter, total in zip(parameters, clipped, strict=True):
            shown = total.as_subclass(ShownSum)
            self._held[id(parameter)] = total, total._version, parameter, shown
            parameter.summed_grad = shown  # type: ignore[attr-defined]

    def add(self, parameter: nn.Parameter, clipped: Tensor) -> None:
        if clipped.shape != parameter.shape and clipped.numel() != parameter.numel():
            raise GraphError(
                f"a rule recorded gradients of size {clipped.numel()} for a parameter of shape "
                f"{list(parameter.shape)}; a record holds [b, *parameter shape]"
            )
        total = self.take(parameter)
        if total is None:
            # A part of a larger buffer would change its version together with the other parts.
            own = base_of(clipped) is None or clipped.untyped_storage().nbytes() == clipped.nbytes
            total = ops.shaped(clipped if own else clipped.clone(), *parameter.shape)
            total = ops.laid_out_as(total, parameter)
            shown: Tensor = total.as_subclass(ShownSum)
        else:
            total.add_(ops.shaped(clipped, *parameter.shape))
            shown = self._held[id(parameter)][3]
        self._held[id(parameter)] = total, total._version, parameter, shown
        parameter.summed_grad = shown  # type: ignore[attr-defined]

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum of this parameter; None where no sample has touched it.

        Raises:
            StepError: if `p.summed_grad` is not what was summed, as far as this can be seen.
        """
        total, version, _, own = self._held.get(id(parameter), _NONE)
        shown = parameter.__dict__.get("summed_grad")
        if shown is not own or (total is not None and total._version != version):
            raise changed(f"a parameter of shape {tuple(parameter.shape)}")
        return total

    def take_all(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The sums of these parameters, as of `take`."""
        held = [self._held.get(own, _NONE) for own in map(id, parameters)]
        shown = _shown_of(parameters)
        alike = all(map(is_, shown, [own for *_, own in held]))
        if not alike or not all(x is None or x._version == version for x, version, *_ in held):
            return [self.take(parameter) for parameter in parameters]  # which says where
        return [total for total, *_ in held]

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget all sums, and show none on these parameters."""
        for parameter in (*parameters, *[held[2] for held in self._held.values()]):
            parameter.summed_grad = None  # type: ignore[attr-defined]
        self._held.clear()

    def __bool__(self) -> bool:
        return bool(self._held)


def changed(what: str) -> StepError:
    """Sums were changed by somebody else."""
    return StepError(
        f"p.summed_grad of {what} was set or changed since its samples were clipped and summed: it is "
        "there to be read; change p.grad after the noise (optimizer.pre_step() or a step hook), and "
        "call optimizer.zero_grad() now"
    )
