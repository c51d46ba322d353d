"""Methods of Opacus' engine that a subclass may override: what they hand on, and what they return.

`make_private` calls them as Opacus' own does. An override may look at all of it, and change in place
what its super() has made; what makes a run private, and what is told of it, stays as it was asked for.
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
    """The calls of these methods in one make_private: inside of `with`, those of this engine."""

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.undo = ExitStack()
        """Leaves everything as it was, where an error ends the block."""
        self.made: dict[str, Any] = {}
        """What the engine's own methods have made, by their names."""
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
        """What the method returns, whoever overrides it.

        Args:
            make: what the engine's own does. first, asked: what the method is called with.
        """
        asked = handed_on(name, asked)
        self._asked[name] = make, first, asked
        return getattr(self.engine, name)(*first, **asked)

    def call_for_own(self, name: str, make: Callable[[], Any], *first: Any, **asked: Any) -> Any:
        """The same; refused unless it is what `make` has made."""
        returned = self.call(name, make, *first, **asked)
        self.check(name, returned)
        return returned

    def make(self, name: str, *first: Any, **given: Any) -> Any:
        """The engine's own method, which an override calls through super().

        Raises:
            ArgumentError: with other values than the override was called with, or a second time.
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
        """Refuse another model, loader or optimizer than the engine's own method has made.

        Args:
            same: whether it is that one, where another object may be.
        """
        made = self.made.get(name)
        if made is None or not (returned is made if same is None else same):
            raise ArgumentError(
                f"{overriding(self.engine, name)} returns another {_HARM[name]}. Return what "
                "super() returned, changed in place if needed.",
                doc="layer-rule",
            )


def own_method(name: str) -> Callable[..., Any]:
    """The engine's own method of this name: what it makes in the make_private under way."""

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
    """The method that is called first, as messages name it."""
    kind = type(engine)
    if name not in vars(engine):
        kind = next((each for each in kind.__mro__ if name in vars(each)), kind)
    return f"{kind.__name__}.{name}"


def check_reached(engine: object, own: type) -> None:
    """Refuse an override of a class behind the engine's own classes, which would not call it.

    Args:
        own: that of them that has these methods.
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
    except (TypeError, ValueError, RuntimeError):  # an array's, which is many answers
        return False
