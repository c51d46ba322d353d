"""A forward may be given something else than its module: samples are told by what that was called with.

A class may override `__call__`, and a forward pre-hook may return other inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastclip._torch import called_with
from fastclip.errors import UnsupportedLayerError, where
from fastclip.samples.inputs import tensors_of


def has_more(module: nn.Module) -> bool:
    """Code of the user's runs before its forward."""
    return _overrides(module) or _has_hooks(module)


def check_given(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """The forward of a module that was called by itself is given what the module was called with.

    Raises:
        UnsupportedLayerError: it is not, or that is not known.
    """
    if not has_more(module) or not torch.is_grad_enabled():
        return
    if not _overrides(module) and _are_same(called_with(module), (args, kwargs)):
        return
    what = (
        "overrides __call__" if _overrides(module) else "changes its inputs in a forward pre-hook"
    )
    raise UnsupportedLayerError(
        f"{where(path, module)} {what}, and what that does to samples is not seen here. Do it in "
        "forward, or call the model that make_private returned (wrap_model=True)"
    )


def _overrides(module: nn.Module) -> bool:
    return not _is_torchs(type(module).__call__)


def _has_hooks(module: nn.Module) -> bool:
    return not all(map(_is_torchs, module._forward_pre_hooks.values()))


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _are_same(one: Any, other: Any) -> bool:
    return [*map(id, tensors_of(one))] == [*map(id, tensors_of(other))]
