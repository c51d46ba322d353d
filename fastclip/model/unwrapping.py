"""From what training wraps back to the user's model, and its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from fastclip._opacus import AbstractGradSampleHooks
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.parallel.processes import bare, uncompiled

Value = TypeVar("Value")
PREFIXES = ("_module.", "module.", "_orig_mod.")
"""Of state_dict keys: make_private's, DistributedDataParallel's, torch.compile's."""


def unwrap(model: nn.Module | AbstractGradSampleHooks) -> nn.Module:
    """The model as it was given to make_private: its class, its methods, its state_dict keys.

    It stays private while it is trained; `model.cleanup()` makes it ordinary again.

    Args:
        model: what make_private returned, also inside DistributedDataParallel or torch.compile.

    Raises:
        ArgumentTypeError: for something else than a model.
    """
    if not isinstance(model, (nn.Module, AbstractGradSampleHooks)):
        raise ArgumentTypeError(
            f"unwrap expects the model that make_private returned, got {type(model).__name__}"
        )
    inner: nn.Module = model
    while True:
        outer, inner = inner, bare(uncompiled(inner))
        if isinstance(inner, (AbstractGradSampleModule, AbstractGradSampleHooks)):
            inner = inner._module
        if inner is outer:
            return inner


def bare_state_dict(state: Mapping[str, Value], model: nn.Module) -> dict[str, Value]:
    """A saved state_dict of a private model with the keys of the user's own.

    Args:
        state: its keys with what make_private, DistributedDataParallel or torch.compile put before
            them, or without.
        model: the user's, for `model.load_state_dict(bare_state_dict(state, model))`.

    Raises:
        ArgumentError: the keys are another model's.
    """
    own = unwrap(model).state_dict().keys()
    found = dict(state)
    while not own & found.keys():
        prefix = next((p for p in PREFIXES if found and all(k.startswith(p) for k in found)), None)
        if prefix is None:
            raise ArgumentError(
                f"bare_state_dict expects a state of {type(unwrap(model)).__name__}, with keys such as "
                f"{next(iter(own), None)!r}, got {next(iter(state), None)!r}"
            )
        found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found
