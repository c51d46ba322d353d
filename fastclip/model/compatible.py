"""A copy of a model in which layers that have no private form are replaced by ones that have.

Opacus clones by pickling, which needs classes that can be imported by name: a class of a notebook's
cell or of a function's body cannot. Here the model is deep-copied; what replaces what is Opacus'.
"""

from __future__ import annotations

import copy
from typing import Any

from opacus.validators import ModuleValidator
from torch import Tensor, nn

from fastclip._torch import tree_leaves
from fastclip.backward.batch_norm import is_batch_norm
from fastclip.errors import UnsupportedLayerError, where
from fastclip.model.own_forward import check_copied
from fastclip.parallel.shards import check_whole

_TRAIN_AS_THEY_ARE = (nn.RNNBase, nn.MultiheadAttention)
"""Opacus would replace them by layers of its own."""
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip


def compatible(model: nn.Module) -> nn.Module:
    """A copy whose BatchNorm is replaced, as is whatever else does not train as it is.

    The model is left as it was. Tied parameters stay tied, a module that serves at several places
    gets one replacement, and hooks of modules, devices, types and flags are those of the original.

    Raises:
        UnsupportedLayerError: for a BatchNorm of a class of its own, a tie that a replacement
            cannot keep, or a forward that was set on the object and would run the original.
        ArgumentError: for a model that fully_shard has spread.
    """
    check_whole(
        model, "call get_compatible_module before fully_shard, whose modules cannot be copied"
    )
    twin = clone(model)
    new: dict[nn.Module, nn.Module] = {}
    paths = {module: path for path, module in twin.named_modules()}
    for module, path in paths.items():
        fixer = ModuleValidator.FIXERS.get(type(module))
        if fixer is None or not _needs_replacement(module):
            if is_batch_norm(module) and _needs_replacement(module):
                raise UnsupportedLayerError(
                    f"{where(path, module)} normalises over the batch in a way of its own, so no "
                    "GroupNorm is known to stand for it; replace it yourself, or freeze it and its "
                    "statistics (requires_grad_(False), .eval())"
                )
            continue
        new[module] = _replacement(module, fixer)
    _keep_ties(new, paths)
    for parent in paths:
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(twin, twin)


def clone(model: nn.Module) -> nn.Module:
    """A deep copy without gradients; what a hook computes anew before every forward is copied too.

    Raises:
        UnsupportedLayerError: a forward that was set on the object would run the original.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for leaf in tree_leaves(module.__dict__):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                memo[id(leaf)] = leaf.detach().clone()
    twin = copy.deepcopy(model, memo)
    check_copied(twin)
    return twin


def _needs_replacement(module: nn.Module) -> bool:
    if isinstance(module, _TRAIN_AS_THEY_ARE):
        return False
    trained = any(p.requires_grad for p in module.parameters(recurse=False))
    return trained or (is_batch_norm(module) and module.training)


def _replacement(module: nn.Module, fixer: Any) -> nn.Module:
    made: nn.Module = fixer(module)
    tensors = [*module.parameters(), *module.buffers()]
    for like in tensors[:1]:
        made.to(like.device, like.dtype if like.is_floating_point() else None)
    for name, parameter in made.named_parameters():
        held = dict(module.named_parameters()).get(name)
        parameter.requires_grad_(held is None or held.requires_grad)
    for name in _HOOKS:
        made.__dict__[name].update(module.__dict__[name])
    made._is_full_backward_hook = module._is_full_backward_hook
    return made.train(module.training)


def _keep_ties(new: dict[nn.Module, nn.Module], paths: dict[nn.Module, str]) -> None:
    """A parameter of a replaced module that another module holds too is held by the new one."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in paths:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    for parameter, uses in holders.items():
        if len(uses) < 2:
            continue
        for module, name in uses:
            if module not in new:
                continue
            held = new[module]._parameters.get(name)
            inside = any(new[module].children())  # which hold it under names of their own
            if held is None or held.shape != parameter.shape or inside:
                raise UnsupportedLayerError(
                    f"{where(paths[module], module)}: its {name} serves other modules too, and "
                    f"{type(new[module]).__name__}, which replaces it, holds its own; untie "
                    "it, or replace the module yourself"
                )
            new[module]._parameters[name] = parameter
