"""BatchNorm couples the samples of a batch: refused at first, and whenever it would train again."""

from __future__ import annotations

from torch import nn

from fastclip._torch import BatchNormBase
from fastclip.errors import UnsupportedLayerError

WAY_OUT = "FastPrivacyEngine.get_compatible_module(model) replaces it"


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module normalises over the batch when it trains."""
    return isinstance(module, BatchNormBase)


def check_batch_norm(path: str, module: nn.Module) -> None:
    """Refuse a BatchNorm that is trained, or that uses the statistics of the batch."""
    if is_batch_norm(module) and (module.training or trained(module)):
        raise UnsupportedLayerError(
            f"{path or 'the model'} ({type(module).__name__}): BatchNorm makes each sample's output "
            f"depend on the rest of its batch, so no per-sample gradient exists; {WAY_OUT} by "
            "GroupNorm" + ("" if trained(module) else ", or .eval() freezes its statistics")
        )


def trained(module: nn.Module) -> bool:
    """Whether the module holds trainable parameters itself."""
    return any(p.requires_grad for p in module.parameters(recurse=False))
