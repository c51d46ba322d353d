"""CUDA C++ kernels: launchers with the signatures of fastclip.ops, over the module fastclip._C."""

from collections.abc import Callable
from typing import Any

from fastclip.errors import how_to_build

try:
    from fastclip import _C  # noqa: F401  (is it there?)
except ImportError as error:
    raise ImportError(f"fastclip._C is not built ({error}): {how_to_build('nvcc')}") from error

from fastclip.cuda import clip, noise

KERNELS: dict[str, Callable[..., Any]] = {**clip.KERNELS, **noise.KERNELS}
"""Operation of fastclip.ops -> launcher."""
