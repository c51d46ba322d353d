"""What the backward pass needs to know of an intercepted layer."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from fastclip.backward.bookkeeping import BookKeeper
from fastclip.layers import LayerRule


class Handle(Protocol):
    """An intercepted layer as its private function sees it; fastclip.model.interception makes them.

    Attributes:
        path: of the layer in the model. keeper: its book-keeper. rule: its rule, if it has one.
        bypass: run the module as it was (while a rule calls it from inside).
    """

    path: str
    keeper: BookKeeper
    rule: LayerRule | None
    bypass: bool

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters that the rule answers for, by their name in the module."""
