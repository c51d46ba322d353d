"""C++ loops for the CPU: launchers with the signatures of fastclip.ops, over fastclip._host."""

from collections.abc import Callable
from typing import Any

from fastclip.errors import how_to_build

try:
    from fastclip import _host  # noqa: F401  (is it there?)
except ImportError as error:
    told = how_to_build("a C++ compiler")
    raise ImportError(f"fastclip._host is not built ({error}): {told}") from error

from fastclip.host.noise import NORMALS
from fastclip.host.patch_products import patch_products
from fastclip.host.products import PRODUCTS

KERNELS: dict[str, Callable[..., Any]] = {"patch_products": patch_products, **PRODUCTS, **NORMALS}
"""Operation of fastclip.ops -> launcher."""
