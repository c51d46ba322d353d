"""Runs of which only the values count: autograd notes what was computed, and saves none of it.

Grad mode stays what it is, for a model may ask for it. One that asks for gradients itself is told that
nothing was saved, and runs once more as it is; so does one that fails, for transforms of torch.func
refuse to run where nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Unsaved(Exception):
    """What is asked for was not saved."""


class _Nothing:
    """Keeps nothing of what autograd would save.

    `asked` tells whether any of it was wanted: a model may catch the error.
    """

    def __init__(self) -> None:
        self.asked = False

    def pack(self, x: Tensor) -> None:
        pass

    def unpack(self, nothing: None) -> Tensor:
        self.asked = True
        raise _Unsaved("no gradients here: nothing was saved for them")


def unsaved(run: Callable[[], Any]) -> Any:
    """What `run` gives; it starts anew, and as it is, where it fails or has asked for gradients."""
    nothing = _Nothing()
    with suppress(Exception), saved_tensors_hooks(nothing.pack, nothing.unpack):
        out = run()
        if not nothing.asked:
            return out
        del out
    return run()
