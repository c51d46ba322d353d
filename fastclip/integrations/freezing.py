"""Which parameters of a pretrained model are trained: its biases (DP-BiTFiT), or its head.

A frozen layer costs nothing: it is not intercepted, has no norm to compute, and below the lowest
trained layer autograd keeps no activation. Where only a bias is trained, a layer's own input is
not kept either: the gradient of the output is all that a bias needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fastclip.errors import ArgumentError


def bias_only(model: nn.Module, head: str | Sequence[str] = ()) -> nn.Module:
    """Freeze everything but the biases: DP-BiTFiT (Bu et al. 2022, arXiv:2210.00036).

    Args:
        model: changed in place; call it before the optimizer is made.
        head: paths of modules that are trained whole, such as "classifier".

    Returns:
        The same model.

    Raises:
        ArgumentError: if the model has no bias, or no module of that path.
    """
    biases = [name for name, _ in model.named_parameters() if _is_bias(name)]
    if not biases:
        raise ArgumentError(
            f"{type(model).__name__} has no bias to train; use LoRA or head_only(model, head)"
        )
    return _train_only(model, set(biases) | _parameters_of(model, head))


def head_only(model: nn.Module, head: str | Sequence[str]) -> nn.Module:
    """Freeze everything but the head: linear probing of a frozen backbone.

    Args:
        model: changed in place; call it before the optimizer is made.
        head: paths of the modules that are trained, such as "classifier" or ["pooler", "head"].

    Returns:
        The same model.

    Raises:
        ArgumentError: if there is no module of that path, or it has no parameters.
    """
    return _train_only(model, _parameters_of(model, head))


def _is_bias(name: str) -> bool:
    """Also the biases of recurrent and attention layers: bias_ih_l0, in_proj_bias."""
    own = name.rpartition(".")[2]
    return own.startswith("bias") or own.endswith("bias")


def _parameters_of(model: nn.Module, paths: str | Sequence[str]) -> set[str]:
    """Names of the parameters under these paths."""
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for path in [paths] if isinstance(paths, str) else paths:
        own = {name for name in names if name.startswith(f"{path}.")}
        if not own:
            tops = dict.fromkeys(name.partition(".")[0] for name in names)
            raise ArgumentError(
                f"head={path!r} is no module of {type(model).__name__} with parameters; its modules "
                f"are {', '.join(tops)}"
            )
        found |= own
    return found


def _train_only(model: nn.Module, names: set[str]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model
