"""timm's models, exact; in an environment with timm and a torchvision that fits torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastclip.errors import UnsupportedLayerError
from tests.products.step import check_step

try:
    import timm
except Exception as error:  # without it, or with a torchvision that does not fit torch
    pytest.skip(f"timm cannot be imported here: {error}", allow_module_level=True)

pytestmark = pytest.mark.extras

CLASSES, PIXELS = 4, 32
VIT = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SWIN: dict[str, Any] = {
    "img_size": PIXELS, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2),
    "drop_path_rate": 0.0,
}  # fmt: skip
NEXT: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", VIT),
    "ViT, averaged, scaled, norms of queries and keys": (
        "vit_tiny_patch16_224",
        {**VIT, "init_values": 1e-5, "qk_norm": True, "global_pool": "avg", "class_token": False},
    ),
    "DeiT III": ("deit3_small_patch16_224", VIT),
    "BEiT": ("beit_base_patch16_224", VIT),
    "EVA-02": ("eva02_tiny_patch14_224", VIT),
    "Swin": ("swin_tiny_patch4_window7_224", SWIN),
    "Swin V2": ("swinv2_tiny_window8_256", SWIN),
    "ConvNeXt": ("convnext_tiny", NEXT),
    "ConvNeXt V2": ("convnext_tiny", {**NEXT, "use_grn": True, "ls_init_value": None}),
}


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def columns() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 3, PIXELS, PIXELS, dtype=torch.float64)
    return x, torch.randint(CLASSES, (3,))


@pytest.mark.parametrize("name", MODELS)
def test_step(name: str) -> None:
    kind, options = MODELS[name]
    check_step(timm.create_model(kind, num_classes=CLASSES, **options), columns(), loss)


def test_mixer() -> None:
    from timm.models.mlp_mixer import MlpMixer

    size = {"img_size": PIXELS, "patch_size": 8, "num_blocks": 2, "embed_dim": 24}
    check_step(MlpMixer(num_classes=CLASSES, **size), columns(), loss)


def test_batch_norm_is_refused_and_replaced() -> None:
    """timm's BatchNorm has an activation in it, as its GroupNorm has."""
    from timm.layers import GroupNormAct

    with pytest.raises(UnsupportedLayerError, match="BatchNormAct2d"):
        check_step(timm.create_model("regnety_002", num_classes=CLASSES), columns(), loss)
    norm = partial(GroupNormAct, num_groups=8)
    model = timm.create_model("regnety_002", num_classes=CLASSES, norm_layer=norm)
    check_step(model, columns(), loss, steps=2)


def test_views_with_dropped_paths() -> None:
    """Random parts of the model differ from view to view: no exact reference, but a step."""
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=CLASSES, drop_path_rate=0.2, **VIT
    )
    engine, private, optimizer, loader = private_step(model)
    for x, y in loader:
        optimizer.zero_grad()
        loss(private, x.repeat_interleave(2, 0), y.repeat_interleave(2)).backward()
        assert optimizer.grad_state.per_sample_norms.shape == (len(x),)
        optimizer.step()
    assert engine.get_epsilon(1e-2) > 0


def private_step(model: nn.Module) -> tuple:
    from torch.utils.data import DataLoader, TensorDataset

    from fastclip import FastPrivacyEngine

    engine = FastPrivacyEngine()
    data = TensorDataset(torch.randn(12, 3, PIXELS, PIXELS), torch.randint(CLASSES, (12,)))
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0, views=2,
    )  # fmt: skip
