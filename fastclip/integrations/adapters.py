"""PEFT's adapters, looked at without importing peft."""

from __future__ import annotations

from torch import nn

from fastclip.errors import UnsupportedLayerError


def check_adapters(model: nn.Module) -> None:
    """Refuse PEFT adapters that are merged into their layer: their own matrices would get no gradient.

    Raises:
        UnsupportedLayerError: naming the layer.
    """
    for path, module in model.named_modules():
        merged = module.__dict__.get("merged_adapters")
        if merged and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedLayerError(
                f"{path} ({type(module).__name__}): its adapters {merged} are merged "
                "into the frozen weight, so they would be trained on noise alone; call "
                "model.unmerge_adapter() first"
            )
