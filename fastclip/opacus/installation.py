"""Makes `import opacus` give fastclip's classes, also in modules that have imported it already."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import opacus
from opacus import grad_sample, optimizers, privacy_engine
from opacus.grad_sample import grad_sample_module
from opacus.optimizers import ddpoptimizer, optimizer
from opacus.utils import batch_memory_manager

from fastclip.engine.opacus_modes import optimizers as materialized
from fastclip.errors import ArgumentError, StepError
from fastclip.opacus import engine
from fastclip.opacus.rest import OURS

_ALL = frozenset(kind.__name__ for kind in OURS)
_PUBLIC: dict[ModuleType, frozenset[str]] = {
    opacus: _ALL,
    grad_sample: _ALL,
    optimizers: _ALL,
    grad_sample_module: frozenset(("GradSampleModule",)),
    optimizer: frozenset(("DPOptimizer",)),
    ddpoptimizer: frozenset(("DistributedDPOptimizer",)),
    privacy_engine: frozenset(("PrivacyEngine",)),
    batch_memory_manager: frozenset(("BatchMemoryManager",)),
}
"""Modules that programs import from, and the names that Opacus' code there does not use itself."""
_PACKAGES = ("opacus", "fastclip")
_replaced: list[tuple[ModuleType, str, Any]] = []


def install(**defaults: Any) -> None:
    """Replaces Opacus' classes by fastclip's, wherever they are imported from.

    These are `opacus.PrivacyEngine`, `GradSampleModule`, `GradSampleHooks`, `DPOptimizer` and
    `BatchMemoryManager`.

    Args:
        **defaults: default keywords of make_private, such as clipping="automatic", gamma=0.0. Arguments
            of a strategy apply only to calls that name no clipping.

    Raises:
        ArgumentError: make_private does not take a keyword.
        StepError: a derived class or an object of one of these classes exists already, and would still
            use Opacus. Nothing is changed.
    """
    unknown = [n for n in defaults if n not in engine.KEYWORDS and "clipping" not in defaults]
    if unknown:
        raise ArgumentError(
            f"install got {', '.join(unknown)}, which make_private does not take. Name the strategy "
            "that takes it with clipping=....",
            doc="unsupported-options",
        )
    if not _replaced:
        _check_unused()
        for module, name, kind in list(_places()):
            _replaced.append((module, name, kind))
            setattr(module, name, OURS[kind])
        chosen = optimizers.get_optimizer_class
        for module in (privacy_engine, materialized):
            _replaced.append((module, chosen.__name__, chosen))
            setattr(module, chosen.__name__, partial(_of_opacus, chosen))
    engine.DEFAULTS.clear()
    engine.DEFAULTS.update(defaults)


def uninstall() -> None:
    """Undoes `install`. Objects that were made meanwhile are unchanged."""
    while _replaced:
        module, name, kind = _replaced.pop()
        now = vars(module).get(name)
        if type(now) is partial or now is OURS.get(kind):
            setattr(module, name, kind)
    engine.DEFAULTS.clear()


def _of_opacus(chosen: Callable[..., type], *args: Any, **options: Any) -> type:
    """The optimizer class of Opacus' own modes: Opacus' own."""
    kind = chosen(*args, **options)
    return next((own for own, ours in OURS.items() if ours is kind), kind)


def installed() -> bool:
    """Whether Opacus' names are fastclip's now."""
    return bool(_replaced)


def _places() -> Iterator[tuple[ModuleType, str, type]]:
    """The names of Opacus' classes, in its public modules and in modules of programs."""
    for module in list(sys.modules.values()):
        if not issubclass(type(module), ModuleType):
            continue
        inside = str(vars(module).get("__name__", "")).partition(".")[0] in _PACKAGES
        names = _PUBLIC.get(module, frozenset()) if inside else None
        for name, value in list(vars(module).items()):
            if names is not None and name not in names:
                continue
            if (
                issubclass(type(value), type) and value in OURS
            ):  # some other objects cannot be hashed
                yield module, name, value


def _check_unused() -> None:
    """Raise an error if the program has derived from Opacus' classes, or has objects of them."""
    for kind in OURS:
        for derived in _derived(kind):
            raise StepError(
                f"{derived.__module__}.{derived.__qualname__} was derived from Opacus' "
                f"{kind.__name__} before install(), and would still use Opacus. Call "
                "fastclip.opacus.install() before that module is imported.",
                doc="wrapped-model",
            )
    made = next((x for x in gc.get_objects() if type(x) in OURS), None)
    if made is not None:
        raise StepError(
            f"An object of Opacus' {type(made).__name__} was made before install(), and would still use "
            "Opacus. Call fastclip.opacus.install() first.",
            doc="wrapped-model",
        )


def _derived(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        if below.__module__.partition(".")[0] not in _PACKAGES:
            yield below
        yield from _derived(below)
