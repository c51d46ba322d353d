"""Every mistake that fastclip can name, and how it warns.

A message is one sentence: what was expected, what came, where, and the way out.

Each error is also the type that a caller of Opacus or PyTorch would catch.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

__all__ = [
    "VALUES_IN_LOSSES",
    "ArgumentError",
    "ArgumentTypeError",
    "BatchSizeError",
    "CheckError",
    "FastclipError",
    "GradSampleError",
    "GraphError",
    "ParameterLeakError",
    "SecureModeError",
    "StepError",
    "UnsupportedLayerError",
    "say",
    "where",
]


class FastclipError(Exception):
    """Base of all errors raised by fastclip."""


class ArgumentError(FastclipError, ValueError):
    """A keyword has a value outside its range."""


class ArgumentTypeError(FastclipError, TypeError):
    """A keyword has a value of the wrong type, or is not known."""


class BatchSizeError(FastclipError, ValueError):
    """A layer's rows are not the samples of the batch."""


class GraphError(FastclipError, RuntimeError, ValueError):
    """A forward or backward pass that would break the one-sample-one-contribution rule."""


class ParameterLeakError(FastclipError, RuntimeError, ValueError):
    """A private parameter was used where it is not followed: its gradient would be unclipped."""


class StepError(FastclipError, ValueError, RuntimeError):
    """A call of step() or zero_grad() that would release or drop gradients wrongly."""


class GradSampleError(FastclipError, AttributeError, RuntimeError):
    """Per-sample gradients were asked for, and none are kept."""


class SecureModeError(FastclipError, RuntimeError, ImportError):
    """Cryptographic noise cannot be drawn here, and no other may take its place."""


class CheckError(FastclipError, AssertionError):
    """A check of fastclip.testing has found something wrong; the message is its report."""


def where(path: str | None, module: object = None) -> str:
    """A part of the model as messages name it."""
    name = path or "the model"
    return name if module is None else f"{name} ({type(module).__name__})"


if TYPE_CHECKING:
    from opacus.validators.errors import UnsupportedModuleError

    class UnsupportedLayerError(FastclipError, UnsupportedModuleError, NotImplementedError):
        """A module for which no exact per-sample rule exists, or whose samples are coupled."""

else:

    def __getattr__(name: str) -> type[FastclipError]:
        """The class above, made when it is first asked for: it needs Opacus, whose import takes longer
        than torch's, and fastclip.ops and fastclip.clipping need none of it."""
        if name != "UnsupportedLayerError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from opacus.validators.errors import UnsupportedModuleError

        bases = (FastclipError, UnsupportedModuleError, NotImplementedError)
        doc = "A module for which no exact per-sample rule exists, or whose samples are coupled."
        made = type(name, bases, {"__module__": __name__, "__doc__": doc})
        return globals().setdefault(name, made)


VALUES_IN_LOSSES = (
    "where a loss takes a value of parameters, compute that loss in the model's forward and return one "
    "loss a row, [b] (a value that is returned once a row, with .expand(len(x), *value.shape), is exact "
    "only where entry i goes into row i's own loss, before any mean)"
)
"""A value of all rows' gradients, one of their mean foremost, cannot be told from a row's own."""
PER_SAMPLE = 'Pass model_loss="per_sample" to make_private'
"""The way out of a mean cross entropy over the batch's labels that the model computes itself."""
_LIBRARIES = ("fastclip", "torch", "opacus", "lightning", "accelerate", "transformers", "importlib")
_UNCOUNTED = "importlib._bootstrap"
"""Its frames are none for `stacklevel`."""


def say(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, pointing at the nearest line outside fastclip and the libraries that it serves."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _of_a_library(name := frame.f_globals.get("__name__", "")):
        level, frame = level + (not name.startswith(_UNCOUNTED)), frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _of_a_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
