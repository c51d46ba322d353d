"""Triton kernels, one operation a file; launchers have the signatures of fastclip.ops."""

from collections.abc import Callable
from typing import Any

from fastclip.kernels.clip_scale import clip_scale, threshold_step

KERNELS: dict[str, Callable[..., Any]] = {
    "clip_scale": clip_scale,
    "threshold_step": threshold_step,
}
"""Operation of fastclip.ops -> launcher."""
