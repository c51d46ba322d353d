"""Private names of Opacus that fastclip needs, and differences between its versions.

Modules import these names from here, and all others from Opacus. The import of this module checks each
private name. A version that lacks one raises ImportError before a model is private. Otherwise an
override that is not called, or a mark that nobody sets, would be found in training or not at all.
tests/test_torch_names.py tests what is assumed of each name.
"""

from __future__ import annotations

import dis
import inspect
import re
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import opacus
from opacus import accountants, data_loader, grad_sample
from opacus.accountants import IAccountant, RDPAccountant
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule, gsm_base
from opacus.optimizers import DPOptimizer, optimizer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fastclip.errors import ArgumentError, say

VERSION: str = opacus.__version__
TESTED = ("1.5.4", "1.6.0")
"""Versions with which the tests pass, the newest last."""
_TESTED = f"fastclip is tested with ({' and '.join(TESTED)})"

# Private names

OPACUS_MARK = "_forward_counter"
"""Set by Opacus on every trainable parameter until cleanup(): its uses without a backward pass yet."""
OPACUS_HOOKS = "autograd_grad_sample_hooks"
"""The list, on a wrapped model, of the hook handles that its cleanup() removes."""
_CURRENT = "_current_grad_sample"
"""On a parameter: the sum of a pass that has not ended."""
_LIST = "OPACUS_PARAM_MONKEYPATCH_ATTRS"

_ENGINE = opacus.PrivacyEngine  # later fastclip.opacus.install may put its own there
ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    _ENGINE: (
        "_prepare_model", "_prepare_data_loader", "_prepare_optimizer", "_prepare_criterion",
    ),
    DPOptimizer: (
        "_get_flat_grad_sample", "_check_skip_next_step", "_step_skip_queue",
        "_is_last_step_skipped",
    ),
    optimizer: ("_check_processed_flag", "_mark_as_processed"),
    AbstractGradSampleModule: ("_module", "_close"),
    GradSampleModule: (OPACUS_HOOKS,),
    grad_sample.GradSampleModuleFastGradientClipping: ("_per_sample_gradient_norms",),
    gsm_base: (_LIST,),
}  # fmt: skip
"""Private names that fastclip reads, calls or overrides, by the class or module that has them."""


def _functions(kind: type) -> Iterator[FunctionType]:
    """Yields the functions of Opacus' part of a class, its properties included."""
    for part in kind.__mro__:
        for value in vars(part).values() if part.__module__.startswith("opacus.") else ():
            for function in (value, getattr(value, "fget", None), getattr(value, "fset", None)):
                if isinstance(function, FunctionType):
                    yield function


def _has(owner: Any, name: str) -> bool:
    """Whether the name exists, or is an attribute that methods set."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    return any(
        each.opname == "STORE_ATTR" and each.argval == name
        for function in _functions(owner)
        for each in dis.get_instructions(function)
    )


def _check_names() -> None:
    """Raises ImportError for private names that this version lacks."""
    lacking = [
        f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        for owner, names in ATTRIBUTES.items()
        for name in names
        if not _has(owner, name)
    ]
    known = getattr(gsm_base, _LIST, (OPACUS_MARK, _CURRENT))
    lacking += [f"Parameter.{name}" for name in (OPACUS_MARK, _CURRENT) if name not in known]
    if lacking:
        raise ImportError(
            f"Opacus {VERSION} lacks {', '.join(lacking)}, which fastclip needs. Install a version "
            f"that {_TESTED}: pip install opacus=={TESTED[-1]}."
        )


def _check_version() -> None:
    """Warns of a version that was not tested."""

    def numbers(version: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version)[:3]]

    if numbers(VERSION) > numbers(TESTED[-1]):
        say(
            f"Opacus {VERSION} is newer than the versions that {_TESTED}. If results look wrong, "
            f"run pip install opacus=={TESTED[-1]}.",
            doc="missing-libraries",
        )


_check_names()
_check_version()

OPACUS_PARAM_MONKEYPATCH_ATTRS: tuple[str, ...] = tuple(getattr(gsm_base, _LIST))
"""Attributes that Opacus sets on parameters."""
check_unprocessed: Callable[[Any], None] = optimizer._check_processed_flag
"""Raises ValueError if a gradient, or one of a list, has Opacus' mark of clipped gradients."""
mark_processed: Callable[[Any], None] = optimizer._mark_as_processed
"""Sets that mark on a gradient, or on each of a list."""


def forget_passes(module: nn.Module) -> None:
    """Drops Opacus' state of passes that did not end: inputs of layers, counts, sums of one pass."""
    for part in module.modules():
        for left in ("activations", "max_batch_len"):
            part.__dict__.pop(left, None)
    for p in module.parameters():
        p.__dict__.pop(_CURRENT, None)
        if OPACUS_MARK in p.__dict__:
            setattr(p, OPACUS_MARK, 0)


def handed_on(method: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords with which this Opacus calls a method of its engine. Overrides written for it
    take no others."""
    taken = inspect.signature(getattr(_ENGINE, method)).parameters
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return dict(asked)
    return {name: value for name, value in asked.items() if name in taken}


# Names missing before version 1.6

HANDLES = hasattr(grad_sample, "GradSampleHooks")
"""Whether Opacus trains models that are not wrapped (wrap_model=False) or sharded (ghost_fsdp)."""

if TYPE_CHECKING or HANDLES:
    from opacus.grad_sample import AbstractGradSampleHooks, GradSampleHooks
    from opacus.optimizers import FSDPOptimizerFastGradientClipping
else:

    class AbstractGradSampleHooks(ABC):  # noqa: B024
        """Base of objects that hold a private model: Opacus' wrappers and fastclip's module handles."""

    AbstractGradSampleHooks.register(AbstractGradSampleModule)

    GradSampleHooks = GradSampleModule
    """In these versions the wrapper hooks the model's layers, and the model works without it."""

    class FSDPOptimizerFastGradientClipping(DPOptimizer):
        """Unused: these versions have no "ghost_fsdp"."""


if not hasattr(AbstractGradSampleModule, "cleanup"):

    def _cleanup(wrapper: Any) -> None:
        """Makes the model non-private again. The name is that of version 1.6, used in messages."""
        with suppress(ValueError):  # it already is
            wrapper.to_standard_module()

    AbstractGradSampleModule.cleanup = _cleanup  # type: ignore[method-assign,assignment]


def check_mode(mode: str, module: Any, *, wrap_model: bool) -> None:
    """Checks that this version supports the mode.

    Raises:
        ArgumentError: with the version.
    """
    if HANDLES:
        return
    what = None if wrap_model else f"wrap_model=False in grad_sample_mode={mode!r}"
    if mode in ("ghost_fsdp", "ghost_tp"):
        what = f"grad_sample_mode={mode!r}"
    elif isinstance(module, FSDPModule):
        what = f"a model of fully_shard in grad_sample_mode={mode!r}"
    if what is not None:
        raise ArgumentError(
            f"{what} expects Opacus 1.6, got {VERSION}. Install opacus>=1.6, or omit "
            "grad_sample_mode.",
            doc="missing-libraries",
        )


def without_empty(collate: Any) -> Any:
    """Returns a collate function without Opacus' wrapper for empty sampled batches."""
    kind, function = (getattr(data_loader, n, None) for n in ("CollateFnWithEmpty", "collate"))
    while True:
        if kind is not None and isinstance(collate, kind):
            collate = collate.wrapped_collator_fn or list
        elif isinstance(collate, partial) and collate.func is function:  # before 1.6
            collate = collate.keywords["collate_fn"]
        else:
            return collate


if TYPE_CHECKING or hasattr(accountants, "register_accountant"):
    from opacus.accountants import create_accountant, register_accountant
else:
    _OTHERS: dict[str, type[IAccountant]] = {}

    def register_accountant(
        mechanism: str, accountant: type[IAccountant], force: bool = False
    ) -> None:
        """Registers a mechanism for `create_accountant` of this module."""
        if not force and mechanism in ("rdp", "gdp", "prv", *_OTHERS):
            raise ValueError(
                f"An accountant for {mechanism!r} is registered already. Pass force=True to "
                "replace it."
            )
        _OTHERS[mechanism] = accountant

    def create_accountant(mechanism: str) -> IAccountant:
        """Returns an accountant of Opacus, or a registered one."""
        if mechanism in _OTHERS:
            return _OTHERS[mechanism]()
        return accountants.create_accountant(mechanism)


_SAVES_NAMES = RDPAccountant().state_dict()["mechanism"] == RDPAccountant.mechanism()
"""Whether an accountant's state holds its mechanism's name; before 1.6 it holds the method."""


def mechanism_of(state: Mapping[str, Any]) -> Any:
    """Returns the name of the mechanism of an accountant's state, of any version."""
    said = state["mechanism"]
    return said() if callable(said) else said


def to_load(accountant: IAccountant, state: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an accountant's state for load_state_dict of this version."""
    own = mechanism_of(state) == accountant.mechanism() and not _SAVES_NAMES
    return {**state, "mechanism": type(accountant).mechanism if own else mechanism_of(state)}
