"""One engine for each parameter: which are alive, and what they hold.

Two engines that clip the same parameter would each release its share of every sample: 2 C for noise of
C. All is held weakly: an engine whose model was collected, or cleaned up, owns nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn

from fastclip._opacus import OPACUS_MARK, AbstractGradSampleHooks
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.segments import union
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.errors import ArgumentError, UnsupportedLayerError, say
from fastclip.model.interception import ATTRIBUTE
from fastclip.model.let_go import found_in, let_go_with, owners, trained_by
from fastclip.parallel.ranks import Ranks, whole_of

_FAST: WeakKeyDictionary[nn.Module, ref[BookKeeper]] = WeakKeyDictionary()
"""Models that were intercepted, and their book-keepers."""
_OPACUS: WeakSet[AbstractGradSampleHooks] = WeakSet()
"""What make_private returned in Opacus' modes."""
_BATCH = "fastclip_batch"
"""Its attribute: the logical batch of its newest optimizer, which a copy has, too."""

_TWICE = "a sample would be released once by each of the two engines"


def held_by(
    optimizer: Any, model: nn.Module, ranks: Ranks | None
) -> tuple[dict[nn.Parameter, str], dict[nn.Parameter, str]]:
    """The optimizer's parameters and their names, in its order: the trained ones, and the others.

    Args:
        model: whole on all ranks; of trained ones the parameters are given with which it computes.
    """
    name = {p: path for path, p in model.named_parameters()}
    held = [(p, whole_of(ranks, p)) for group in optimizer.param_groups for p in group["params"]]
    trained = {own: name[own] for p, own in held if p.requires_grad}
    return trained, {p: name[own] for p, own in held if not p.requires_grad}


def claim(model: nn.Module, keeper: BookKeeper) -> None:
    """`model` is intercepted for `keeper`, which owns its parameters until it is retired."""
    _FAST[model] = ref(keeper)


def claim_for_opacus(wrapper: AbstractGradSampleHooks, batch: LogicalBatch) -> None:
    """`wrapper` has a new optimizer; those that its parameters had before release nothing any more."""
    mine = {p for p in wrapper._module.parameters() if p.requires_grad}
    for other in list(_OPACUS):
        if other is wrapper or not mine.isdisjoint(other._module.parameters()):
            other.__dict__[_BATCH].retire()
    wrapper.__dict__[_BATCH] = batch
    let_go_with(wrapper, owners(wrapper._module), batch)
    _OPACUS.add(wrapper)


def is_claimed(wrapper: nn.Module) -> bool:
    """It is what make_private returned in one of Opacus' modes."""
    return _BATCH in wrapper.__dict__


def check_free(model: nn.Module, parameters: Mapping[nn.Parameter, str], again: Any = None) -> None:
    """Refuse a model that a living engine holds, as a whole, in part or by a parameter.

    Args:
        parameters: those that are to become private, and their names.
        again: what an earlier make_private returned, if this one goes on with the same model.

    Raises:
        UnsupportedLayerError: naming the module or parameter, and the way out.
    """
    if _conflict(model, parameters, again) is None:
        return
    gc.collect()  # models refer to themselves: one that was dropped may linger
    conflict = _conflict(model, parameters, again)
    if conflict is not None:
        raise UnsupportedLayerError(conflict)


def go_on_with(
    ledger: Ledger, again: Any, model: nn.Module, trained: Mapping[nn.Parameter, str]
) -> None:
    """A model that may be made private under this ledger, with all that its steps have spent so far.

    Args:
        again: what any earlier make_private returned, or a copy of that, if the model is that.
        trained: the parameters that are to become private, and their names.

    Raises:
        UnsupportedLayerError: another engine holds it. ArgumentError: it cannot count these steps.
    """
    check_free(model, trained, again=again)
    before = found_in(model)
    for batch in _batches_of(again, model):
        before += trained_by(batch)
    known = ledger.segments()
    segments, protected = known, ledger.protected
    try:
        for spent, drawn in before:
            if drawn is not None:
                ledger.drawn.join(drawn)
            segments = union(segments, spent.segments)
            protected = protected.beside(spent.protected)
        if segments == known:
            return
        ledger.join(segments, protected)
    except ArgumentError as error:
        raise ArgumentError(
            f"this engine cannot count the steps that are in the model's weights: {error}; to state "
            "an epsilon of each, call cleanup() on what make_private returned first and pass a "
            "copy.deepcopy of the model"
        ) from error
    say(
        "the model was made private before, by another FastPrivacyEngine whose steps are in its "
        "weights: this engine counts them from now on beside its own; for a model that is to begin "
        "anew, call make_private with one that was made anew"
    )


def _batches_of(again: Any, model: nn.Module) -> list[LogicalBatch]:
    """Whose releases are in the weights of a model, and may go on."""
    inside = set(owners(model))
    found = [w for w in list(_OPACUS) if not inside.isdisjoint(owners(w._module))]
    if again is not None and again not in found:
        found.append(again)
    batches = [w.keeper.batch if hasattr(w, "keeper") else w.__dict__.get(_BATCH) for w in found]
    return [batch for batch in batches if batch is not None and not batch.retired]


def _conflict(model: nn.Module, parameters: Mapping[nn.Parameter, str], again: Any) -> str | None:
    keeper = getattr(again, "keeper", None)
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        handle = module.__dict__.get(ATTRIBUTE)
        if handle is not None and handle.keeper is not keeper:
            return (
                f"{where} is private already: {_TWICE}; to go on with it pass the model that "
                "make_private returned, in the same mode, or call cleanup() on that first"
            )
        for wrapper in _opacus_engines(module):
            if wrapper is not again and _alive(wrapper):
                return (
                    f"{where} is private already, by Opacus' {type(wrapper).__name__}: {_TWICE}; "
                    "call cleanup() on what make_private returned first"
                )
    for other in _keepers():
        for p in other.names if other is not keeper else ():
            if p in parameters:
                return (
                    f"parameter {parameters[p]!r} is also {other.names[p]!r} of another private "
                    f"model: {_TWICE}; call cleanup() on what make_private returned for that model, "
                    "or put both into one model"
                )
    for wrapper in list(_OPACUS):
        for p in wrapper._module.parameters() if wrapper is not again else ():
            if p in parameters and OPACUS_MARK in p.__dict__:
                return (
                    f"parameter {parameters[p]!r} belongs to another private model, too "
                    f"({type(wrapper).__name__}): {_TWICE}; call cleanup() on what make_private "
                    "returned for that model, or put both into one model"
                )
    return None


def _keepers() -> Iterator[BookKeeper]:
    for held in list(_FAST.values()):
        keeper = held()
        if keeper is not None and not keeper.batch.retired:
            yield keeper


def _opacus_engines(module: nn.Module) -> Iterator[AbstractGradSampleHooks]:
    """The wrapper that this module is, and those whose hooks it carries (plain Opacus', too)."""
    for found in (
        module,
        *(getattr(hook, "__self__", None) for hook in module._forward_hooks.values()),
    ):
        if isinstance(found, AbstractGradSampleHooks) and not hasattr(found, "keeper"):
            yield found


def _alive(wrapper: AbstractGradSampleHooks) -> bool:
    """Whether it has not been cleaned up."""
    return any(OPACUS_MARK in p.__dict__ for p in wrapper._module.parameters())
