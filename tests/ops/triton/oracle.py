"""What kernel tests share: the device, odd shapes, and the error against float64."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3}
SUM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values in `dtype`, on the device of the tests."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """||found - reference|| / ||reference||, in float64; ||found|| where the reference is zero."""
    found, reference = found.double().flatten().cpu(), reference.double().flatten().cpu()
    size = reference.norm().item()
    return (found - reference).norm().item() / (size or 1.0)


def strided(x: Tensor) -> Tensor:
    """The same values with strides that are neither contiguous nor ordered like the shape."""
    padded = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
    view = padded[..., 1 : 1 + 2 * x.shape[-1] : 2]
    view.copy_(x)
    return view
