"""C++ loops for the CPU: launchers with the signatures of fastclip.ops, over fastclip._host."""

from collections.abc import Callable
from typing import Any

from fastclip.compiled import check_built

check_built("_host", "host", "a C++ compiler")

from fastclip.host.noise import NORMALS  # noqa: E402
from fastclip.host.patch_products import patch_products  # noqa: E402
from fastclip.host.products import PRODUCTS  # noqa: E402

KERNELS: dict[str, Callable[..., Any]] = {"patch_products": patch_products, **PRODUCTS, **NORMALS}
"""Operation of fastclip.ops -> launcher."""
