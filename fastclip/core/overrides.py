"""Methods of Opacus' engine that a subclass may override, and checks of their arguments and results.

`make_private` calls them as Opacus' own does. An override may read all arguments, and change the result
of super() in place. The privacy parameters, and what is accounted for, must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

from fastclip.core.opacus_names import handed_on
from fastclip.errors import ArgumentError, StepError

MODEL, LOADER = "_prepare_model", "_prepare_data_loader"
OPTIMIZER, CRITERION = "_prepare_optimizer", "_prepare_criterion"
METHODS = (MODEL, LOADER, OPTIMIZER, CRITERION)
_HARM = {
    MODEL: "model than super(), so its gradients would not be clipped",
    LOADER: "data loader than super(), so its batches would not be counted",
    OPTIMIZER: "optimizer than super(), so its steps would not be accounted for",
    CRITERION: "criterion than super(), so its gradients would not be clipped",
}


_RUNNING: ContextVar[Preparation | None] = ContextVar("the make_private under way", default=None)


class Preparation:
    """The calls of these methods in one make_private of an engine; a context manager."""

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.undo = ExitStack()
        """Restores everything if an error ends the block."""
        self.made: dict[str, Any] = {}
        """The results of the engine's own methods, by their names."""
        self._asked: dict[str, tuple[Callable[[], Any], Sequence[Any], dict[str, Any]]] = {}

    def __enter__(self) -> Preparation:
        self._before = _RUNNING.set(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _RUNNING.reset(self._before)
        if error is not None:
            self.undo.__exit__(kind, error, trace)
        self.made.clear()  # which would keep it until the garbage is collected
        self._asked.clear()

    def call(self, name: str, make: Callable[[], Any], *first: Any, **asked: Any) -> Any:
        """Calls the method, which may be overridden.

        Args:
            make: the engine's own body. first, asked: arguments of the method.
        """
        asked = handed_on(name, asked)
        self._asked[name] = make, first, asked
        return getattr(self.engine, name)(*first, **asked)

    def call_for_own(self, name: str, make: Callable[[], Any], *first: Any, **asked: Any) -> Any:
        """Does the same, and raises ArgumentError unless the result is that of `make`."""
        returned = self.call(name, make, *first, **asked)
        self.check(name, returned)
        return returned

    def make(self, name: str, *first: Any, **given: Any) -> Any:
        """Runs the engine's own method, which an override calls through super().

        Raises:
            ArgumentError: the arguments differ from the override's, or it is called again.
        """
        who = overriding(self.engine, name)
        if name in self.made or name not in self._asked:
            raise ArgumentError(
                f"{who} calls super().{name} again, which each make_private calls once. Call it "
                "once, and keep what it returns.",
                doc="layer-rule",
            )
        make, before, asked = self._asked[name]
        others = [key for key in given if key not in asked or not _same(given[key], asked[key])]
        if len(first) != len(before) or not all(map(_same, first, before)):
            others.append("module" if name == MODEL else "data_loader")
        if others:
            raise ArgumentError(
                f"{who} passes another {others[0]} to super() than it received, so accounting "
                "would not fit the run. Pass it on unchanged, and give make_private the other "
                "one.",
                doc="layer-rule",
            )
        self.made[name] = make()
        return self.made[name]

    def check(self, name: str, returned: Any, same: bool | None = None) -> None:
        """Checks that the result is the model, loader or optimizer of the engine's own method.

        Args:
            same: whether it is that one, if another object is allowed.
        """
        made = self.made.get(name)
        if made is None or not (returned is made if same is None else same):
            raise ArgumentError(
                f"{overriding(self.engine, name)} returns another {_HARM[name]}. Return what "
                "super() returned, changed in place if needed.",
                doc="layer-rule",
            )


def own_method(name: str) -> Callable[..., Any]:
    """Returns the engine's own method of this name, for the running make_private."""

    def method(self: Any, *first: Any, **given: Any) -> Any:
        running = _RUNNING.get()
        if running is None or running.engine is not self:
            raise StepError(
                f"{type(self).__name__}.{name} is part of make_private, and a direct call would "
                "not be accounted for. Call make_private.",
                doc="layer-rule",
            )
        return running.make(name, *first, **given)

    method.__name__ = name
    return method


def overriding(engine: object, name: str) -> str:
    """Returns the name of the method that is called first, for messages."""
    kind = type(engine)
    if name not in vars(engine):
        kind = next((each for each in kind.__mro__ if name in vars(each)), kind)
    return f"{kind.__name__}.{name}"


def check_reached(engine: object, own: type) -> None:
    """Raises ArgumentError for an override in a class after the engine's own, which would not be called.

    Args:
        own: the engine's class that has these methods.
    """
    kinds = type(engine).__mro__
    for kind in kinds[kinds.index(own) + 1 :]:
        for name in METHODS:
            if name in vars(kind) and kind.__module__.partition(".")[0] not in (
                "fastclip",
                "opacus",
            ):
                raise ArgumentError(
                    f"{kind.__name__}.{name} comes after FastPrivacyEngine in the method order, so "
                    f"it would not be called. Name {kind.__name__} before FastPrivacyEngine among "
                    f"the bases of {type(engine).__name__}.",
                    doc="layer-rule",
                )


def _same(given: Any, asked: Any) -> bool:
    if given is asked:
        return True
    try:
        return type(given) is type(asked) and bool(given == asked)
    except (TypeError, ValueError, RuntimeError):  # arrays compare entry by entry
        return False
