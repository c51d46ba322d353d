"""What the backward pass needs to know of an intercepted layer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from fastclip.backward.bookkeeping import BookKeeper
from fastclip.layers import LayerRule


class Handle(Protocol):
    """An intercepted layer as its private function sees it; fastclip.model.interception makes them.

    Attributes:
        path: of the layer in the model. keeper: its book-keeper. rule: its rule, if it has one.
    """

    path: str
    keeper: BookKeeper
    rule: LayerRule | None

    def bypassed(self) -> AbstractContextManager[None]:
        """The module runs as it was inside."""

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters that the rule answers for, by their name in the module."""
