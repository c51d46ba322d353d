"""No optimizer but the private one may step on a model of Opacus' modes: there `p.grad` is raw.

The gate of an inner optimizer (inner_step.py) knows the one that was given to make_private. Any other,
made before or after, is met here: one hook of torch's hears of every optimizer's step, and looks whether
it holds a parameter of a living private model. All is held weakly, and ends with `cleanup()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastclip._opacus import OPACUS_MARK, AbstractGradSampleHooks
from fastclip.errors import StepError
from fastclip.optim.inner_step import Gate, is_open, parameters_of


@dataclass(frozen=True)
class _Claim:
    """What a private model's newest optimizer may step on."""

    parameters: frozenset[int]
    """Ids of all of the model's, frozen ones included: they may be trained again."""
    gate: Gate
    inner: weakref.ref[Optimizer]


_CLAIMS: WeakKeyDictionary[AbstractGradSampleHooks, _Claim] = WeakKeyDictionary()
_INSTALLED: list[Any] = []
"""The handle of the hook, once a model was made private by one of Opacus' modes."""


def watch_steps(wrapper: AbstractGradSampleHooks, inner: Optimizer, gate: Gate) -> None:
    """From now on only `inner`, while its gate is open, may step on the parameters of `wrapper`."""
    known = frozenset(id(p) for p in wrapper._module.parameters())
    _CLAIMS[wrapper] = _Claim(known, gate, weakref.ref(inner))
    if not _INSTALLED:
        _INSTALLED.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse raw gradients; to an optimizer of another model this is one look at its list.

    Raises:
        StepError: naming a parameter, and the way out.
    """
    if not _CLAIMS or isinstance(optimizer, DPOptimizer) or is_open(optimizer):
        return  # of a private one the inner optimizer is looked at
    held = [id(p) for p in parameters_of(optimizer)]
    for wrapper, claim in list(_CLAIMS.items()):
        if not claim.parameters.isdisjoint(held):
            _check(optimizer, held, wrapper, claim)


def _check(
    optimizer: Optimizer, held: Iterable[int], wrapper: AbstractGradSampleHooks, claim: _Claim
) -> None:
    parameters = dict(wrapper._module.named_parameters())
    if not any(OPACUS_MARK in p.__dict__ for p in parameters.values()):
        del _CLAIMS[wrapper]  # it was cleaned up
        return
    inner = claim.inner()
    if claim.gate.passing and inner is not None and _within(held, parameters.values(), inner):
        return  # an optimizer inside the inner one (ZeRO, Lookahead): it steps on what is released
    mine = set(held)
    name = next((name for name, p in parameters.items() if id(p) in mine), None)
    if name is None:
        return  # the model's parameters were replaced, and the number is another tensor's now
    raise StepError(
        f"step() of {type(optimizer).__name__} was called on parameter {name!r} of a private model, "
        "whose gradient nobody has clipped or added noise to; call step() of the optimizer that "
        "make_private returned, with all in it that is to be trained, or cleanup() on the model that "
        "it returned, to train without privacy"
    )


def _within(held: Iterable[int], parameters: Iterable[nn.Parameter], inner: Optimizer) -> bool:
    """Whether what an optimizer holds of a model is the inner optimizer's, too."""
    released = {id(p) for p in parameters_of(inner)}
    return {id(p) for p in parameters}.intersection(held) <= released
