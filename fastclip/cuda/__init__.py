"""CUDA C++ kernels: launchers with the signatures of fastclip.ops, over the module fastclip._C."""

from collections.abc import Callable
from typing import Any

from fastclip.compiled import check_built

check_built("_C", "cuda", "nvcc")

from fastclip.cuda import clip, noise  # noqa: E402

KERNELS: dict[str, Callable[..., Any]] = {**clip.KERNELS, **noise.KERNELS}
"""Operation of fastclip.ops -> launcher."""
