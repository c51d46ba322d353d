"""Private layers as nodes of autograd's graph, as Python sees them; csrc/step documents them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

def versions() -> dict[str, str]: ...
def ask(
    refuse: Callable[[int, int], None],
    take: Callable[[int, Any], None],
    tie: Callable[[Tensor, Tensor], Tensor],
    normalise: Callable[[int, list[Tensor | None], bool], tuple[Tensor | None, ...]],
) -> None: ...
def slots_of(node: Any) -> int: ...
def single_norms(
    a: list[Tensor], g: list[Tensor], lost_a: list[float], lost_g: list[float]
) -> Tensor: ...
def scaled_sums(
    a: Sequence[Tensor], g: Sequence[Tensor], scale: Tensor, any: bool
) -> list[Tensor]: ...

class Slots:
    opened: bool
    paused: bool
    address: int
    def begin(self, forward: Any, rows: int) -> None: ...
    def end(self) -> None: ...
    def take(
        self,
    ) -> tuple[
        list[int], list[Any], list[Any], list[Tensor], list[Any], list[Any], list[Any], bool
    ]: ...

class Linear:
    def __init__(
        self, slots: Slots, number: int, parameters: dict[str, Any], settings: dict[str, Any],
        at_once: bool, transposed: bool,
    ) -> None: ...  # fmt: skip
    def __call__(self, x: Tensor, module: Any) -> Tensor | None: ...

class Conv:
    def __init__(
        self, slots: Slots, number: int, parameters: dict[str, Any], settings: dict[str, Any],
        extra: Any, at_once: bool, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int,
    ) -> None: ...  # fmt: skip
    def __call__(self, x: Tensor, module: Any) -> Tensor | None: ...

class Norm:
    def __init__(
        self, slots: Slots, number: int, parameters: dict[str, Any], settings: dict[str, Any],
        kind: int, shape: list[int], eps: float | None,
    ) -> None: ...  # fmt: skip
    def __call__(self, x: Tensor, module: Any) -> Tensor | None: ...

class Lookup:
    def __init__(
        self, slots: Slots, number: int, parameters: dict[str, Any], settings: dict[str, Any],
        extra: Any, padding: int,
    ) -> None: ...  # fmt: skip
    def __call__(self, x: Tensor, module: Any) -> Tensor | None: ...
