"""Settings of how float32 products may round, by either kind of flags, and what can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastclip.core import numerics

fine = pytest.mark.skipif(not numerics._FINE, reason="torch 2.9 and newer")
NODES = [
    ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("cuda", "conv"),
    ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
]  # fmt: skip


def read(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:  # both kinds of flags were set
        return "mixed"


def flags() -> dict[Any, Any]:
    """Everything that can be read."""
    found: dict[Any, Any] = {
        "products": read(torch.get_float32_matmul_precision),
        "cuBLAS": read(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cuDNN": read(lambda: torch.backends.cudnn.allow_tf32),
    }
    if numerics._FINE:
        found |= {node: numerics._get(*node) for node in NODES}
    return found


def inherited() -> list[dict[Any, Any]]:
    """What is read under other settings higher up: who inherits tells, who has a value of its own."""
    if not numerics._FINE:
        return [flags()]
    found = [flags()]
    for node in NODES[:3]:
        before = raw_of(node)
        for value in ("ieee", "tf32", "none"):
            numerics._set(*node, value)
            found.append(flags())
        numerics._set(*node, before)
    return found


def raw_of(node: tuple[str, str]) -> str:
    """A node's own value, under a root that says nothing."""
    root = numerics._get("generic", "all")
    numerics._set("generic", "all", "none")
    own = root if node == ("generic", "all") else numerics._get(*node)
    numerics._set("generic", "all", root)
    return own


def fine_setting(*settings: tuple[str, str, str]) -> Callable[[], None]:
    def apply() -> None:
        for backend, operator, value in settings:
            numerics._set(backend, operator, value)

    return apply


def legacy(products: str, cudnn: bool) -> Callable[[], None]:
    def apply() -> None:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = cudnn

    return apply


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def mixed() -> None:
    torch.set_float32_matmul_precision("medium")
    numerics._set("cuda", "matmul", "ieee")
    numerics._set("generic", "all", "tf32")


SETTINGS: dict[str, Any] = {
    "defaults": lambda: None,
    "high": legacy("high", True),
    "medium": legacy("medium", True),
    "nothing allowed": legacy("highest", False),
    "cuBLAS": allow_tf32,
    "root tf32": pytest.param(fine_setting(("generic", "all", "tf32")), marks=fine),
    "root bf16": pytest.param(fine_setting(("generic", "all", "bf16")), marks=fine),
    "root ieee, one tf32": pytest.param(
        fine_setting(("generic", "all", "ieee"), ("cuda", "matmul", "tf32")), marks=fine
    ),
    "root and leaf": pytest.param(
        fine_setting(("generic", "all", "tf32"), ("cuda", "matmul", "tf32")), marks=fine
    ),
    "cuda": pytest.param(fine_setting(("cuda", "all", "tf32")), marks=fine),
    "oneDNN": pytest.param(
        fine_setting(("mkldnn", "all", "bf16"), ("mkldnn", "matmul", "tf32")), marks=fine
    ),
    "cuDNN, each of its own": legacy("highest", True),
    "oneDNN's convolutions": pytest.param(fine_setting(("mkldnn", "conv", "bf16")), marks=fine),
    "mixed": pytest.param(mixed, marks=fine),
}
each_setting = pytest.mark.parametrize("allow", SETTINGS.values(), ids=SETTINGS)


def keeps_float32(found: dict[Any, Any]) -> bool:
    if not numerics._FINE:
        return found["products"] == "highest" and not found["cuDNN"]
    return all(found[node] in ("ieee", "none") for node in NODES if node[1] != "all")
