"""What make_private refuses, by name and with the way out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from fastclip._torch import InstanceNormBase
from fastclip.backward.batch_norm import check_batch_norm, trained
from fastclip.backward.guards import check_hooks
from fastclip.checks import between, positive
from fastclip.clipping import ConstantNoise, NoiseSchedule
from fastclip.errors import ArgumentError, ArgumentTypeError, UnsupportedLayerError
from fastclip.parallel.shards import let_go


def check_training(model: nn.Module) -> None:
    """Refuse a model in eval mode.

    Raises:
        UnsupportedLayerError: Opacus' UnsupportedModuleError.
    """
    if not model.training:
        raise UnsupportedLayerError(
            "the model is in eval mode, and make_private expects training mode: call model.train()"
        )


def check_model_loss(model_loss: str, loss_reduction: str, fast: bool) -> None:
    """Refuse a loss that cannot be replaced.

    Raises:
        ArgumentError: naming the other keyword.
    """
    choice("model_loss", model_loss, ("own", "per_sample"))
    if model_loss == "own":
        return
    if loss_reduction != "mean":
        raise ArgumentError(
            "model_loss='per_sample' replaces means, but loss_reduction='sum'. Omit either."
        )
    if not fast:
        raise ArgumentError(
            "model_loss='per_sample' needs the fast mode. Omit grad_sample_mode, or model_loss."
        )


def check_module(model: nn.Module) -> None:
    """Refuse modules whose samples depend on each other, or whose gradients have no exact rule.

    Raises:
        UnsupportedLayerError: naming the module's path and the way out.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    check_hooks(names, names)
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        _check_parameters(where, module)
        check_batch_norm(path, module)
        if isinstance(module, InstanceNormBase) and module.track_running_stats:
            raise UnsupportedLayerError(
                f"{where}: running statistics are updated from the batch without noise; use "
                "track_running_stats=False"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(where, module)
        merged = module.__dict__.get("merged_adapters")  # PEFT's
        if merged and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedLayerError(
                f"{where}: its adapters {merged} are merged into the frozen weight, so they would be "
                "trained on noise alone; call model.unmerge_adapter() first"
            )
        if trained(module) and isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedLayerError(
                f"{where}: scripted modules cannot be intercepted; pass the original nn.Module"
            )


def _check_parameters(where: str, module: nn.Module) -> None:
    held = dict(module.named_parameters(recurse=False))
    lazy = [name for name, p in held.items() if is_lazy(p)]
    if lazy:
        raise UnsupportedLayerError(
            f"{where}: its parameters {lazy} have no shape before its first forward pass; run the "
            "model once before make_private, on inputs of the right shape (zeros will do)"
        )
    odd = {n: p.dtype for n, p in held.items() if p.requires_grad and not p.is_floating_point()}
    if odd:
        raise UnsupportedLayerError(
            f"{where}: parameters {odd} are not real numbers, whose norms and noise are not those of "
            "the engine; hold real and imaginary parts as real parameters, or freeze them"
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
                f"{where}: {option} is not supported: {why}. Construct it without {option}"
            )


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer of another model."""
    let_go(model)
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ArgumentError(
            "Module parameters are different than optimizer Parameters: "
            f"{foreign} of the optimizer's parameters do not belong to the module; build the "
            "optimizer from this module's parameters (after any get_compatible_module)"
        )


def check_inner_step(optimizer: Any) -> None:
    """Refuse what is no optimizer, one that trains nothing, and one whose step takes other gradients
    than one that is noisy.

    Raises:
        ArgumentError, ArgumentTypeError: naming what it asks for, and the way out.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        several = isinstance(optimizer, (list, tuple))
        way_out = (
            "; a private step is one of all parameters: give it one optimizer of several groups"
        )
        raise ArgumentTypeError(
            f"optimizer expects a torch.optim.Optimizer, got {type(optimizer).__name__}"
            + several * f"{way_out}, SGD([{{'params': ..., 'lr': ...}}, ...])"
        )
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        raise ArgumentError(
            "make_private expects the optimizer before Accelerate has prepared it (a prepared one skips "
            "or scales steps that are accounted); call make_private first, then accelerator.prepare"
        )
    inner = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
    kind = type(inner)
    if not _takes_hooks(inner):
        raise ArgumentError(
            f"{kind.__name__} has no step hooks, which torch.optim.Optimizer.__init__ makes: let "
            "its __init__ call super().__init__(params, defaults); or, if it wraps another optimizer "
            "(as Lookahead does), give make_private that one, and wrap what it returns"
        )
    if issubclass(kind, torch.optim.SparseAdam):
        raise ArgumentError(
            "SparseAdam expects sparse gradients, but noise makes every gradient dense; use Adam"
        )
    step = list(inspect.signature(kind.step).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    asked = [p.name for p in step if p.default is p.empty and p.kind in plain]
    if asked:
        raise ArgumentError(
            f"{kind.__name__}.step expects {asked}: it computes the loss again within a step, as often "
            "as it likes, but a private step releases one noisy gradient; use an optimizer whose "
            "step() takes one gradient, such as SGD or Adam"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in held):
        raise ArgumentError(
            f"nothing is trained: all {len(held)} parameters of the optimizer are frozen "
            "(requires_grad=False), and what is frozen at make_private stays frozen. Call "
            "requires_grad_(True) on the parameters to train before make_private."
        )


def _takes_hooks(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def check_arguments(given: Mapping[str, Any]) -> None:
    """Types of make_private's keywords (max_grad_norm is the strategy's to check)."""
    module, noise_generator = given["module"], given["noise_generator"]
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"module expects a torch.nn.Module, got {type(module).__name__}")
    check_loader(given["data_loader"])
    for name in ("batch_first", "poisson_sampling", "wrap_model", "rand_on_empty"):
        if not isinstance(given[name], bool):
            raise ArgumentTypeError(f"{name} expects True or False, got {given[name]!r}")
    if noise_generator is not None and not isinstance(noise_generator, torch.Generator):
        raise ArgumentTypeError(
            "noise_generator expects a torch.Generator or None, got "
            f"{type(noise_generator).__name__}"
        )


def check_loader(data_loader: Any) -> None:
    """Raises: ArgumentTypeError: it is none."""
    if not isinstance(data_loader, DataLoader):
        raise ArgumentTypeError(
            f"data_loader expects a torch.utils.data.DataLoader, got {type(data_loader).__name__}"
        )


def check_budget(target_epsilon: Any, target_delta: Any, epochs: Any) -> None:
    """Ranges of make_private_with_epsilon's own keywords."""
    positive("target_epsilon", target_epsilon)
    between("target_delta", target_delta, 0, 1)
    positive("epochs", epochs)


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a string that is not one of `allowed`."""
    if value not in tuple(allowed):
        raise ArgumentError(f"{name} expects one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_schedule(schedule: NoiseSchedule, mechanism: str) -> None:
    """Refuse a noise schedule that the accountant cannot compose."""
    if mechanism == "gdp" and not isinstance(schedule, ConstantNoise):
        raise ArgumentError(
            f"accountant='gdp' composes constant noise only, got {type(schedule).__name__}; use "
            "FastPrivacyEngine(accountant='prv') or 'rdp'"
        )
