"""Calls by which a training loop reaches private layers past the model's own forward.

Whatever computes with private layers is run on a few rows before it trains
(fastclip.samples.learning): the model's forward when it begins; another method of the model, or a part
of it that is called by itself, when it first reaches a private layer, for most methods compute nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from fastclip._dynamo import ends_graph, is_exporting, pass_over
from fastclip.errors import GraphError
from fastclip.model.following import exports_as_it_was, follow, shown_as
from fastclip.model.given import check_given
from fastclip.model.own_forward import give_back, plain_forward, replace, run_plain

if TYPE_CHECKING:
    from fastclip.backward.bookkeeping import BookKeeper

_PART = "_fastclip_part"
_LIGHTNING = ("lightning.", "pytorch_lightning.")
_LOGS = ("log", "log_dict")
"""Lightning's methods that keep numbers elsewhere: a look on a few rows leaves nothing there."""
_MOST = 64
_signatures: dict[FunctionType, inspect.Signature] = {}
"""Of so many functions: torch.compile, which may trace whoever asks, warns of functools.lru_cache."""


class Method:
    """A bound method of a module other than `forward`, whose calls are known while they run.

    Args:
        path: of the module, in the model.
    """

    def __init__(self, model: nn.Module, name: str, keeper: BookKeeper, path: str = "") -> None:
        self.model, self.name, self.keeper = model, name, keeper
        self.path, self.called = path, f"{path}.{name}".lstrip(".")
        functools.update_wrapper(self, getattr(type(model), name))

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the bound method: models look at their own, some of them in every forward pass."""
        return _signature(getattr(type(self.model), self.name))

    @property
    def _plain(self) -> MethodType:
        return MethodType(getattr(type(self.model), self.name), self.model)

    @pass_over
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() or self.keeper.bare.traced(self.path):
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        return self._call(*args, **kwargs)

    @ends_graph
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._plain
        lightnings = str(plain.__func__.__module__).startswith(_LIGHTNING)
        if lightnings and self.name == "all_gather":
            self._check_gathering()
        if self.keeper.calls.probe and lightnings:
            return None if self.name in _LOGS else plain(*args, **kwargs)
        if self.keeper.depth:
            return plain(*args, **kwargs)
        run: Any = plain if self.keeper.model_loss is None else self.keeper.model_loss.around(plain)
        with self.keeper.calls.inside(self.called, self.model, run, args, kwargs) as returned:
            return returned(run(*args, **kwargs))

    def _check_gathering(self) -> None:
        """Refuse to let rows of one rank into another's loss, where none is clipped for both."""
        if self.keeper.clipping.ranks is not None and self.keeper.calls.runs("training_step"):
            raise GraphError(
                "self.all_gather in training_step hands rows of one rank to the loss of others, which "
                "are clipped apart from them; log numbers with sync_dist=True, and let every row's loss "
                "depend on that row alone"
            )


def _signature(function: FunctionType) -> inspect.Signature:
    """Of a function as a method of an object."""
    found = _signatures.get(function)
    if found is None:
        if len(_signatures) >= _MOST:
            _signatures.clear()
        _signatures[function] = found = inspect.signature(MethodType(function, object()))
    return found


def attach_methods(path: str, module: nn.Module, keeper: BookKeeper) -> None:
    """Let the book-keeper know of calls of the methods of the model, or of a part of it."""
    for name in _methods(module):
        module.__dict__[name] = Method(module, name, keeper, path)


def attach_part(path: str, module: nn.Module, keeper: BookKeeper) -> None:
    """Let the book-keeper know of calls of a module that holds private layers."""
    attach_methods(path, module, keeper)
    replace(module, shown_as(_part_forward, module), path, keeper)
    module.__dict__[_PART] = (path, keeper)


def detach(module: nn.Module) -> None:
    """Undo `attach_methods` and `attach_part`."""
    for name in [n for n, value in vars(module).items() if isinstance(value, Method)]:
        del module.__dict__[name]
    if module.__dict__.pop(_PART, None) is not None:
        give_back(module)


@exports_as_it_was
def _part_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    path, keeper = getattr(self, _PART)
    if keeper.bare.traced(path):
        return run_plain(self, *args, **kwargs)
    return _called_part(path, keeper, self, args, kwargs)


@ends_graph
def _called_part(path: str, keeper: BookKeeper, self: nn.Module, args: tuple, kwargs: dict) -> Any:
    plain = plain_forward(self)
    if keeper.depth or keeper.calls.probe or keeper.recomputes:
        return follow(path, keeper, plain, args, kwargs)
    if not keeper.paused:
        check_given(path, self, args, kwargs)
    run = plain if keeper.model_loss is None else keeper.model_loss.around(plain)
    with keeper.calls.inside(f"{path}()", self, run, args, kwargs) as returned:
        return returned(run(*args, **kwargs))


def _methods(model: nn.Module) -> Iterator[str]:
    """Methods that torch's own modules do not have."""
    for name in dir(type(model)):
        if name.startswith("__") or name in vars(model) or hasattr(nn.Module, name):
            continue
        base = next((b for b in type(model).__mro__ if name in vars(b)), object)
        torchs = base.__module__.startswith("torch.")
        if not torchs and isinstance(vars(base).get(name), FunctionType):  # not static, of no class
            yield name
