"""MONAI's networks and losses for segmentation, exact; in an environment with monai."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import GraphError
from tests.products.step import check_step

pytest.importorskip("monai")
pytestmark = pytest.mark.extras

SMALL: dict[str, Any] = {"in_channels": 1, "out_channels": 2}
UNET: dict[str, Any] = {**SMALL, "channels": (4, 8), "strides": (2,)}
DYNAMIC: dict[str, Any] = {
    **SMALL, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
    "filters": [4, 8, 8],
}  # fmt: skip
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "UNet, instances": ("UNet", {**UNET, "num_res_units": 1}),
    "UNet, groups": ("UNet", {**UNET, "norm": ("group", {"num_groups": 2})}),
    "SegResNet": (
        "SegResNet",
        {**SMALL, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
    ),
    "DynUNet": ("DynUNet", DYNAMIC),
}


def network(kind: str, dims: int, **options: Any) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, kind)(spatial_dims=dims, **options)


def criterion(kind: str = "DiceCELoss", **options: Any) -> nn.Module:
    from monai import losses

    return getattr(losses, kind)(to_onehot_y=True, softmax=True, **options)


def columns(dims: int) -> tuple[Tensor, Tensor]:
    shape = (3, 1, *[16 if dims == 2 else 8] * dims)
    return torch.randn(shape, dtype=torch.float64), torch.randint(2, shape)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_step(name: str, dims: int) -> None:
    kind, options = NETWORKS[name]
    dice = criterion()
    model = network(kind, dims, **options)
    check_step(model, columns(dims), lambda model, x, y: dice(model(x), y), criterion=dice)


@pytest.mark.parametrize("dims", [2, 3])
def test_deep_supervision(dims: int) -> None:
    """The network's parts write what they give into a list that it reads."""
    dice = criterion()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        heads = model(x).unbind(1)
        return sum((dice(out, y) / 2**k for k, out in enumerate(heads)), torch.zeros(()))

    deep = {"deep_supervision": True, "deep_supr_num": 1, "res_block": True}
    check_step(network("DynUNet", dims, **DYNAMIC, **deep), columns(dims), loss)


@pytest.mark.parametrize("kind", ["DiceLoss", "GeneralizedDiceLoss", "TverskyLoss"])
def test_losses_of_each_sample(kind: str) -> None:
    dice = criterion(kind)
    check_step(network("UNet", 2, **UNET), columns(2), lambda model, x, y: dice(model(x), y))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["DiceLoss", "DiceCELoss", "GeneralizedDiceLoss", "TverskyLoss"])
def test_losses_of_the_whole_batch_are_refused(kind: str, given: bool) -> None:
    dice = criterion(kind, batch=True)
    with pytest.raises(GraphError, match=r"batch=True.*Pass batch=False"):
        check_step(
            network("UNet", 2, **UNET), columns(2), lambda model, x, y: dice(model(x), y),
            criterion=dice if given else None,
        )  # fmt: skip
