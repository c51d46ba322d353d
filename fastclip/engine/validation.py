"""Checks of make_private's arguments, and replacement of layers that cannot be private."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from fastclip.backward.guards import check_batch_norm, check_hooks, is_batch_norm, trained
from fastclip.clipping import ConstantNoise, NoiseSchedule
from fastclip.core.checks import between, positive
from fastclip.core.torch_names import InstanceNormBase, tree_leaves
from fastclip.distributed.shards import check_whole, let_go
from fastclip.engine.own_forward import check_copied
from fastclip.errors import ArgumentError, ArgumentTypeError, UnsupportedLayerError, where


def check_training(model: nn.Module) -> None:
    """Raise an error for a model in eval mode.

    Raises:
        UnsupportedLayerError: Opacus' UnsupportedModuleError.
    """
    if not model.training:
        raise UnsupportedLayerError(
            "The model is in eval mode, and make_private expects training mode. Call model.train().",
            doc="changed-model",
        )


def check_model_loss(model_loss: str, loss_reduction: str, fast: bool) -> None:
    """Raise an error for a loss that cannot be replaced.

    Raises:
        ArgumentError: naming the other keyword.
    """
    choice("model_loss", model_loss, ("own", "per_sample"))
    if model_loss == "own":
        return
    if loss_reduction != "mean":
        raise ArgumentError(
            "model_loss='per_sample' replaces means, but loss_reduction='sum'. Omit either.",
            doc="unsupported-options",
        )
    if not fast:
        raise ArgumentError(
            "model_loss='per_sample' needs the fast mode. Omit grad_sample_mode, or model_loss.",
            doc="unsupported-options",
        )


def check_module(model: nn.Module) -> None:
    """Raise an error for modules that couple samples, or whose gradients have no exact rule.

    Raises:
        UnsupportedLayerError: naming the module's path, with a suggested fix.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    check_hooks(names, names)
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        _check_parameters(where, module)
        check_batch_norm(path, module)
        if isinstance(module, InstanceNormBase) and module.track_running_stats:
            raise UnsupportedLayerError(
                f"{where}: running statistics are updated from the batch without noise. Pass "
                "track_running_stats=False.",
                doc="carried-state",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(where, module)
        merged = module.__dict__.get("merged_adapters")  # PEFT's
        if merged and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedLayerError(
                f"{where}: the adapters {merged} are merged into the frozen weight and would be trained "
                "on noise alone. Call model.unmerge_adapter() first.",
                doc="no-trainable-parameters",
            )
        if trained(module) and isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedLayerError(
                f"{where}: scripted modules are not supported. Pass the original nn.Module."
            )


def _check_parameters(where: str, module: nn.Module) -> None:
    held = dict(module.named_parameters(recurse=False))
    lazy = [name for name, p in held.items() if is_lazy(p)]
    if lazy:
        raise UnsupportedLayerError(
            f"{where}: parameters {lazy} have no shape before the first forward pass. Run the model "
            "once before make_private, on zeros of the right shape."
        )
    odd = {n: p.dtype for n, p in held.items() if p.requires_grad and not p.is_floating_point()}
    if odd:
        raise UnsupportedLayerError(
            f"{where}: parameters {odd} are not real floating-point numbers, which is not supported. "
            "Hold real and imaginary parts as real parameters, or freeze them."
        )


def _check_embedding(where: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    trains = trained(module)
    traps = {
        "max_norm": (
            module.max_norm is not None,
            "it rescales rows of the table that the batch looks up, without noise",
        ),
        "scale_grad_by_freq": (
            trains and module.scale_grad_by_freq,
            "it divides a sample's gradient by counts over the batch",
        ),
        "sparse": (trains and module.sparse, "noise makes every gradient dense"),
    }
    for option, (used, why) in traps.items():
        if used:
            raise UnsupportedLayerError(
                f"{where}: {option} is not supported, because {why}. Construct it without {option}."
            )


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise an error for an optimizer of another model."""
    let_go(model)
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ArgumentError(
            "Module parameters are different than optimizer Parameters, of which "
            f"{foreign} do not belong to the module. Build the optimizer from this module's parameters, "
            "after any get_compatible_module.",
            doc="optimizers",
        )


def check_inner_step(optimizer: Any) -> None:
    """Raise an error if it is no optimizer, trains nothing, or needs more than one noisy gradient.

    Raises:
        ArgumentError, ArgumentTypeError: naming the problem, with a suggested fix.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        several = isinstance(optimizer, (list, tuple))
        fix = " Pass one optimizer with several groups, SGD([{'params': ..., 'lr': ...}, ...])."
        raise ArgumentTypeError(
            f"optimizer expects a torch.optim.Optimizer, got {type(optimizer).__name__}."
            + several * fix,
            doc="optimizers",
        )
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        raise ArgumentError(
            "optimizer was prepared by Accelerate, which skips or scales steps that are accounted for. "
            "Call make_private first, then accelerator.prepare.",
            doc="integrations",
        )
    inner = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
    kind = type(inner)
    if not _takes_hooks(inner):
        raise ArgumentError(
            f"{kind.__name__} has no step hooks, because it does not call "
            "torch.optim.Optimizer.__init__. Call super().__init__(params, defaults), or pass the "
            "optimizer that it wraps and wrap what make_private returns.",
            doc="optimizers",
        )
    if issubclass(kind, torch.optim.SparseAdam):
        raise ArgumentError(
            "SparseAdam expects sparse gradients, but noise makes every gradient dense. Use Adam.",
            doc="optimizers",
        )
    step = list(inspect.signature(kind.step).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    asked = [p.name for p in step if p.default is p.empty and p.kind in plain]
    if asked:
        raise ArgumentError(
            f"{kind.__name__}.step expects {asked} and computes the loss several times, but a private "
            "step releases one noisy gradient. Use an optimizer such as SGD or Adam.",
            doc="optimizers",
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in held):
        raise ArgumentError(
            f"All {len(held)} parameters of the optimizer are frozen (requires_grad=False), so there is "
            "nothing to train. Call requires_grad_(True) on the parameters to train before "
            "make_private.",
            doc="no-trainable-parameters",
        )


def _takes_hooks(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check the types of make_private's keywords (the strategy checks max_grad_norm)."""
    module, noise_generator = given["module"], given["noise_generator"]
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"module expects a torch.nn.Module, got {type(module).__name__}.")
    check_loader(given["data_loader"])
    for name in ("batch_first", "wrap_model", "rand_on_empty"):
        if not isinstance(given[name], bool):
            raise ArgumentTypeError(f"{name} expects True or False, got {given[name]!r}.")
    if noise_generator is not None and not isinstance(noise_generator, torch.Generator):
        raise ArgumentTypeError(
            "noise_generator expects a torch.Generator or None, got "
            f"{type(noise_generator).__name__}."
        )


def check_loader(data_loader: Any) -> None:
    """Raise an ArgumentTypeError if it is not a DataLoader."""
    if not isinstance(data_loader, DataLoader):
        raise ArgumentTypeError(
            f"data_loader expects a torch.utils.data.DataLoader, got {type(data_loader).__name__}."
        )


def check_budget(target_epsilon: Any, target_delta: Any, epochs: Any) -> None:
    """Check the ranges of make_private_with_epsilon's own keywords."""
    positive("target_epsilon", target_epsilon)
    between("target_delta", target_delta, 0, 1)
    positive("epochs", epochs)


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise an error for a string that is not one of `allowed`."""
    if value not in tuple(allowed):
        raise ArgumentError(
            f"{name} expects one of {', '.join(map(repr, allowed))}, got {value!r}."
        )


def check_schedule(schedule: NoiseSchedule, mechanism: str) -> None:
    """Raise an error for a noise schedule that the accountant cannot compose."""
    if mechanism == "gdp" and not isinstance(schedule, ConstantNoise):
        raise ArgumentError(
            f"accountant='gdp' composes constant noise only, got {type(schedule).__name__}. Use "
            "FastPrivacyEngine(accountant='prv').",
            doc="privacy-budget",
        )


# -------------------------------------------------------------------------------------------------
# A copy of a model in which layers without a private form are replaced by layers with one.
#
# Opacus clones by pickling, which needs importable classes. Classes defined in a notebook or a
# function are not importable. Here the model is deep-copied. The replacements are those of Opacus.


_TRAIN_AS_THEY_ARE = (nn.RNNBase, nn.MultiheadAttention)
"""Opacus would replace these by its own layers."""
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip


def compatible(model: nn.Module) -> nn.Module:
    """A copy in which BatchNorm and other unsupported layers are replaced.

    The model is unchanged. Tied parameters stay tied, and a module that is used in several places gets
    one replacement. Hooks of modules, devices, dtypes and flags are those of the original.

    Raises:
        UnsupportedLayerError: a custom BatchNorm class, a tie that a replacement cannot keep, or a
            forward that was set on the object and would run the original.
        ArgumentError: fully_shard has sharded the model.
    """
    check_whole(model, "Call get_compatible_module before fully_shard.")
    twin = clone(model)
    new: dict[nn.Module, nn.Module] = {}
    paths = {module: path for path, module in twin.named_modules()}
    for module, path in paths.items():
        fixer = ModuleValidator.FIXERS.get(type(module))
        if fixer is None or not _needs_replacement(module):
            if is_batch_norm(module) and _needs_replacement(module):
                raise UnsupportedLayerError(
                    f"{where(path, module)} normalizes over the batch in its own way, and no GroupNorm "
                    "is known to replace it. Replace it yourself, or freeze its parameters and call "
                    ".eval().",
                    doc="coupled-samples",
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
    """A deep copy without gradients. Tensors that hooks compute before every forward are copied too.

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
    """Give a replacement the parameters that its original shares with other modules."""
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
            inside = any(new[module].children())  # they hold it under other names
            if held is None or held.shape != parameter.shape or inside:
                raise UnsupportedLayerError(
                    f"{where(paths[module], module)}: its {name} is tied to other modules, but "
                    f"{type(new[module]).__name__}, which replaces it, holds its own. Untie it, or "
                    "replace the module yourself."
                )
            new[module]._parameters[name] = parameter


# -------------------------------------------------------------------------------------------------
# PEFT's LoHa in torch's own functions.
#
# LoHa computes a weight from its factors in an autograd function, which hides the per-sample
# gradients of the factors. PEFT's method runs unchanged, except that the product is written out.


_METHOD = "get_delta_weight"


def _product(w1a: Tensor, w1b: Tensor, w2a: Tensor, w2b: Tensor, scale: Tensor) -> Tensor:
    return (w1a @ w1b) * (w2a @ w2b) * scale


def _convolution(
    t1: Tensor, w1a: Tensor, w1b: Tensor, t2: Tensor, w2a: Tensor, w2b: Tensor, scale: Tensor
) -> Tensor:
    """Index letters: i, j rank, k, l kernel, r input channels, p output channels."""
    equation = "ijkl,jr,ip->prkl"
    first, second = torch.einsum(equation, t1, w1b, w1a), torch.einsum(equation, t2, w2b, w2a)
    return first * second * scale


_WRITTEN_OUT = {"make_weight": _product, "make_weight_cp": _convolution}


def write_out(module: nn.Module) -> None:
    """Let a LoHa layer compute its weight in torch's own functions."""
    own = getattr(type(module), _METHOD, None)
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "LoHaLayer" in kinds and _METHOD not in vars(module) and isinstance(own, FunctionType):
        module.__dict__[_METHOD] = MethodType(_with(own), module)


def give_back(module: nn.Module) -> None:
    """Undo `write_out`."""
    found = getattr(vars(module).get(_METHOD), "__func__", None)
    if getattr(found, "__globals__", {}).get("make_weight") is _product:
        del module.__dict__[_METHOD]


def _with(own: FunctionType) -> Callable[..., Tensor]:
    """The function with these names replaced by the products above."""
    known = {**own.__globals__, **_WRITTEN_OUT}
    made = FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made
