"""The errors of fastclip, and its warnings.

A message has two sentences: the cause (what, where, the shapes), then the usual fix. It ends with
`See errors.html#ANCHOR`, a heading of docs/errors.md with more information.

Each error is also the type that a caller of Opacus or PyTorch would catch.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import TYPE_CHECKING, Any

__all__ = [
    "ANCHORS",
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


ANCHORS = frozenset({
    "unsupported-options", "no-trainable-parameters", "missing-libraries",
    "coupled-samples", "coupled-loss", "batch-axis", "unsupported-layer", "layer-rule",
    "untracked-use", "changed-tensors", "second-backward", "random-numbers", "carried-state",
    "changed-model", "wrapped-model",
    "step-order", "optimizers", "per-sample-gradients", "mixed-precision", "compile-and-graphs",
    "several-processes", "sharded-models",
    "sampling", "data-order", "privacy-units", "groups", "non-finite-samples",
    "noise", "repeated-noise", "secure-mode", "privacy-budget", "checkpoints", "noisy-counts",
    "integrations", "audits", "failed-checks", "internal-limits",
})  # fmt: skip
"""The headings of docs/errors.md that a message may name."""
_SEE = re.compile(r"\.? See errors\.html#([\w-]+)")
_OPENS = re.compile(r"(?:an?|the|this|these|that|each|every|no|its|your) (?!expects )")
"""How a sentence begins. A message that begins otherwise names an argument or a path."""


class FastclipError(Exception):
    """Base of all errors raised by fastclip.

    Args:
        message: the cause and the fix. It may contain another error's text, with its anchor.
        doc: the anchor, one of `ANCHORS`. None: the anchor of the contained error, or the class's.
    """

    doc: str | None = None

    def __init__(self, *message: object, doc: str | None = None) -> None:
        super().__init__(*message)
        if doc is not None:
            self.doc = doc

    def __str__(self) -> str:
        """Returns the message, with its anchor once, at the end."""
        return see(super().__str__(), vars(self).get("doc"), self.doc)


def see(text: str, doc: str | None, default: str | None = None) -> str:
    """Returns `text` with one anchor at its end: `doc`, or the one it contains, or the default."""
    held = _SEE.search(text)
    anchor = doc or (held[1] if held else default)
    bare = capitalized(_SEE.sub("", text))
    if anchor is None or not bare:
        return bare
    return f"{bare}{'' if bare[-1] in '.!?' else '.'} See errors.html#{anchor}"


def capitalized(text: str) -> str:
    """Returns a message with a capital letter if it begins with an article or a pronoun."""
    return text[0].upper() + text[1:] if _OPENS.match(text) else text


class ArgumentError(FastclipError, ValueError):
    """A keyword has a value outside its range."""


class ArgumentTypeError(FastclipError, TypeError):
    """A keyword has a value of the wrong type, or is unknown."""


class BatchSizeError(FastclipError, ValueError):
    """The entries that a layer sees are not the samples of the batch."""

    doc = "batch-axis"


class GraphError(FastclipError, RuntimeError, ValueError):
    """A forward or backward pass that would break the one-sample-one-contribution rule."""

    doc = "coupled-samples"


class ParameterLeakError(FastclipError, RuntimeError, ValueError):
    """A private parameter was used where it cannot be followed: its gradient would be unclipped."""

    doc = "untracked-use"


class StepError(FastclipError, ValueError, RuntimeError):
    """A call of step() or zero_grad() that would release or drop gradients wrongly."""

    doc = "step-order"


class GradSampleError(FastclipError, AttributeError, RuntimeError):
    """Per-sample gradients were requested, but none are kept."""

    doc = "per-sample-gradients"


class SecureModeError(FastclipError, RuntimeError, ImportError):
    """Cryptographic noise cannot be drawn here, and no other noise may replace it."""

    doc = "secure-mode"


class CheckError(FastclipError, AssertionError):
    """A check of fastclip.testing has failed; the message is its report."""

    doc = "failed-checks"


def where(path: str | None, module: object = None) -> str:
    """Returns the name of a part of the model for messages."""
    name = path or "the model"
    return name if module is None else f"{name} ({type(module).__name__})"


if TYPE_CHECKING:
    from opacus.validators.errors import UnsupportedModuleError

    class UnsupportedLayerError(FastclipError, UnsupportedModuleError, NotImplementedError):
        """A module for which no exact per-sample rule exists, or whose samples are coupled."""

        doc = "unsupported-layer"

else:

    def __getattr__(name: str) -> type[FastclipError]:
        """Makes the class above at its first use. It needs Opacus, whose import takes longer than
        torch's, and which fastclip.ops and fastclip.clipping do not need."""
        if name != "UnsupportedLayerError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from opacus.validators.errors import UnsupportedModuleError

        bases = (FastclipError, UnsupportedModuleError, NotImplementedError)
        doc = "A module for which no exact per-sample rule exists, or whose samples are coupled."
        made = type(
            name, bases, {"__module__": __name__, "__doc__": doc, "doc": "unsupported-layer"}
        )
        return globals().setdefault(name, made)


PER_SAMPLE = 'Pass model_loss="per_sample" to make_private'
"""The fix if the model itself computes a mean cross entropy over the labels of the batch."""
_LIBRARIES = ("fastclip", "torch", "opacus", "lightning", "accelerate", "transformers", "importlib")
_UNCOUNTED = "importlib._bootstrap"
"""`stacklevel` does not count its frames."""


def say(message: str, category: type[Warning] = UserWarning, doc: str | None = None) -> None:
    """Warns, pointing at the nearest line outside fastclip and the libraries that it works with.

    Args:
        message: the cause, and the fix. doc: one of `ANCHORS`, or None.
    """
    message = see(message, doc)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _of_a_library(name := frame.f_globals.get("__name__", "")):
        level, frame = level + (not name.startswith(_UNCOUNTED)), frame.f_back
    warnings.warn(message, category, stacklevel=level)


class OldName:
    """A deprecated attribute of a class, with the value of the attribute that replaces it.

    Args:
        new: the name of the attribute.
    """

    def __init__(self, new: str) -> None:
        self._new, self._old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        kind, old, new = owner.__name__, self._old, self._new
        say(f"{kind}.{old} is deprecated. Use {kind}.{new}.", DeprecationWarning)
        return getattr(instance, new)


def _of_a_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
