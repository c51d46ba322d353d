"""The forward that a module has without fastclip: its class's, or one that was set on the object.

Libraries replace `model.forward` on the object: Accelerate's hooks, TRL, many a patch. An intercepted
module keeps what it had there, runs it as its own, and has it back when it is let go.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.jit import ScriptModule

from fastclip._dynamo import pass_over
from fastclip.errors import UnsupportedLayerError, where
from fastclip.layers.customised import MARKS, OWN, own_forward

if TYPE_CHECKING:
    from fastclip.backward.bookkeeping import BookKeeper

_DEEPEST, _MOST = 8, 4096
"""A forward is looked through so deep, and so many objects of it."""


def run_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as it was; torch.compile and torch.export trace it."""
    own = module.__dict__.get(OWN)
    if own is None:
        return type(module).forward(module, *args, **kwargs)
    return own.forward(*args, **kwargs)


@pass_over
def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The same, as what is called."""
    own = module.__dict__.get(OWN)
    plain = MethodType(type(module).forward, module) if own is None else own.forward
    return plain  # type: ignore[no-any-return]


class Own:
    """What a module had as `forward`. A copy of the module has one that runs the copy.

    Args:
        path: of the module in the model of `keeper`.
    """

    def __init__(self, forward: Any, path: str, keeper: BookKeeper) -> None:
        self.forward, self.path, self.keeper = forward, path, keeper

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        """
        Raises:
            UnsupportedLayerError: what is copied as it is, a function, runs the original.
        """
        if _runs(self.forward, self.keeper.calls.known):
            raise UnsupportedLayerError(
                f"{where(self.path)}: the function that was set as its forward holds the model itself, "
                "so a copy would run this model. Set types.MethodType(function, module), whose copy "
                "has the copied module"
            )
        given = copy.deepcopy(self.forward, memo), self.path, copy.deepcopy(self.keeper, memo)
        return Own(*given)


def replace(module: nn.Module, forward: MethodType, path: str, keeper: BookKeeper) -> None:
    """Make this the module's forward; one that was set on the object is kept.

    Raises:
        UnsupportedLayerError: the module has a forward from fastclip, of an engine that is gone.
    """
    held = module.__dict__
    if "forward" in held:
        if not MARKS.isdisjoint(held):
            raise UnsupportedLayerError(
                f"{where(path, module)} has had its forward replaced by fastclip already; pass the "
                "original model"
            )
        held[OWN] = Own(held["forward"], path, keeper)
    held["forward"] = forward


def give_back(module: nn.Module) -> None:
    """The module has the forward that it had."""
    held = module.__dict__
    held.pop("forward", None)
    if OWN in held:
        held["forward"] = held.pop(OWN).forward


def check_copied(model: nn.Module) -> None:
    """Refuse a copy with a forward that runs what it was copied from.

    Raises:
        UnsupportedLayerError: naming the module.
    """
    modules = ((p, m) for p, m in model.named_modules() if not isinstance(m, ScriptModule))
    own = {path: module for path, module in modules if own_forward(module) is not None}
    inside = {*model.modules()} if own else set()
    kinds = {*map(_kind, inside)}
    for path, module in own.items():
        reached = [value for value, _ in _reached(own_forward(module))]
        held = [x for x in reached if isinstance(x, nn.Module)]
        others = {m for m in held if m not in inside and _kind(m) in kinds and _has_weights(m)}
        methods = [x for x in reached if isinstance(x, MethodType)]
        methods = [x for x in methods if getattr(x, "__name__", "") == "forward"]
        bound = {x.__self__ for x in methods if isinstance(x.__self__, nn.Module)}
        if others and (inside.isdisjoint(held) or not others.isdisjoint(bound)):
            raise UnsupportedLayerError(
                f"{where(path, module)}: the function that was set as its forward runs the model that "
                "this one is a copy of. Set forward on the copy itself, once it is made "
                "(get_compatible_module makes one, too)"
            )


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *(p.shape for p in module.parameters())


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _runs(forward: Any, parameters: set[nn.Parameter]) -> bool:
    """Whether functions, of which there are no copies, hold modules with any of these parameters."""
    for value, shared in _reached(forward):
        held = value.parameters() if isinstance(value, nn.Module) else (value,)
        known = isinstance(value, (nn.Module, nn.Parameter))
        if shared and known and not parameters.isdisjoint(held):
            return True
    return False


def _reached(forward: Any) -> Iterator[tuple[Any, bool]]:
    """All that a forward holds, and whether a function does: copies of a function hold the same."""
    seen: set[tuple[int, bool]] = set()
    level = [(forward, False)]
    for _ in range(_DEEPEST):
        ahead: list[tuple[Any, bool]] = []
        for value, shared in level:
            if (id(value), shared) in seen or len(seen) == _MOST:
                continue
            seen.add((id(value), shared))
            yield value, shared
            inside = shared or isinstance(value, FunctionType)
            ahead += ((part, inside) for part in _parts(value))
        level = ahead


def _parts(value: Any) -> Iterable[Any]:
    """What a forward is made of; of modules the functions that are set on them."""
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values(), *vars(value).values()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, nn.Module):
        kinds = FunctionType, MethodType, partial
        return [x for x in vars(value).values() if isinstance(x, kinds)]
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (type, ModuleType)):
        return ()
    return getattr(value, "__dict__", {}).values()


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue
    known = function.__globals__
    yield from (known[name] for name in _names_in(function.__code__) if name in known)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
