"""Several make_private calls in one configure_optimizers: each makes one part of the module private."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastclip.errors import ArgumentError
from fastclip.optim.optimizer import FastDPOptimizer

_PARTS = "_fastclip_parts"
"""Attribute of a LightningModule: what is private of it."""


@dataclass(eq=False)
class Part:
    """What one call has made private.

    Attributes:
        module: the part, or the whole LightningModule.
        handle: has `cleanup()`.
        optimizer: a weak reference to the private one.
        trainer: a weak reference to the trainer of the call.
    """

    module: nn.Module
    handle: Any
    optimizer: Callable[[], FastDPOptimizer | None]
    trainer: Callable[[], Any]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module is of no trainer."""
        return {**self.__dict__, "optimizer": _nobody, "trainer": _nobody}


def _nobody() -> None:
    return None


def made_before(module: nn.Module, trainer: Any) -> list[Part]:
    """What the configure_optimizers that is running has made private already.

    What is left of an earlier fit is cleaned up: its optimizers are those of the trainer's strategy, or
    it had another trainer.
    """
    parts: list[Part] = module.__dict__.get(_PARTS, [])
    known = [*map(id, trainer.strategy.optimizers)]
    if any(part.trainer() is not trainer or id(part.optimizer()) in known for part in parts):
        clean_up(module)
        return []
    return parts


def keep(module: nn.Module, part: nn.Module, handle: Any, private: Any, trainer: Any) -> None:
    """Remember what a call has made private."""
    made = Part(part, handle, weakref.ref(private), weakref.ref(trainer))
    module.__dict__.setdefault(_PARTS, []).append(made)


def clean_up(module: nn.Module) -> bool:
    """Make all parts ordinary again; whether there were any."""
    parts: Sequence[Part] = module.__dict__.pop(_PARTS, ())
    for part in parts:
        part.handle.cleanup()
    return bool(parts)


def check_part(
    module: nn.Module, part: nn.Module | None, before: Sequence[Part], engine: Any,
    arguments: Mapping[str, Any], trainer: Any,
) -> None:  # fmt: skip
    """Raise an error if this call does not go with the module, or with the calls before it.

    Raises:
        ArgumentError: naming the way.
    """
    if part is not None and not any(part is each for each in module.modules()):
        raise ArgumentError(
            f"part expects a submodule of the LightningModule, got a {type(part).__name__} that it does "
            "not hold. Pass self.encoder, for instance."
        )
    if part is not None and part is not module and trainer.world_size > 1:
        raise ArgumentError(
            "part makes one submodule private, which several processes cannot train together. Use one "
            "process, or make the whole module private by one call, with param_groups."
        )
    mine = module if part is None else part
    held = {*map(id, mine.modules()), *map(id, mine.parameters())}
    for other in before:
        private = other.optimizer()
        if private is None or private.ledger is not engine.accountant:
            raise ArgumentError(
                "two engines make parts of one LightningModule private, so neither's epsilon would be "
                "that of the fit. Use one engine for all parts."
            )
        theirs = (*other.module.modules(), *other.module.parameters())
        if any(id(each) in held for each in theirs):
            raise ArgumentError(
                "make_private was called twice for the same parameters in one configure_optimizers, and "
                "the second call would end the first. Call it once, with one optimizer that has "
                "param_groups, or pass part= for parts that share nothing."
            )
    if before and ("target_epsilon" in arguments or "_fastclip_budget" in module.__dict__):
        raise ArgumentError(
            "target_epsilon is of one call, and each of several would spend it. Pass noise_multiplier "
            "to every call; engine.get_epsilon is that of all of them."
        )
