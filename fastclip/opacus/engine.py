"""opacus.PrivacyEngine, with Opacus' defaults and those that `install` was given."""

from __future__ import annotations

import inspect
from typing import Any

from fastclip.engine.privacy_engine import FastPrivacyEngine

DEFAULTS: dict[str, Any] = {}
"""Of make_private, where a program does not say otherwise."""
_SERVED = ("hooks", "functorch", "ew")
"""Opacus' modes that differ only in how per-sample gradients are computed, of which none are kept."""
KEYWORDS = inspect.signature(FastPrivacyEngine.make_private).parameters


class PrivacyEngine(FastPrivacyEngine):
    """As `fastclip.FastPrivacyEngine`. Opacus' modes "hooks" (its default), "functorch" and "ew" are
    served by the fast one, which leaves no `p.grad_sample`.

    Args:
        accountant: as there. secure_mode: as there. planner: as there.

    Formal guarantee: that of `FastPrivacyEngine`.
    """

    def make_private(self, **options: Any) -> tuple:
        """`FastPrivacyEngine.make_private`, with the defaults that `install` was given.

        Raises:
            fastclip.errors.*: as there.
        """
        options = _with_defaults(options)
        if options.get("grad_sample_mode") in _SERVED:
            options["grad_sample_mode"] = "fast"
        return super().make_private(**options)

    def make_private_with_epsilon(self, **options: Any) -> tuple:
        """`FastPrivacyEngine.make_private_with_epsilon`, likewise.

        Raises:
            fastclip.errors.*: as there.
        """
        return super().make_private_with_epsilon(**_with_defaults(options))


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """A program that names a clipping strategy says its arguments, too."""
    defaults = DEFAULTS
    if "clipping" in options:
        defaults = {n: v for n, v in defaults.items() if n in KEYWORDS and n != "clipping"}
    return {**defaults, **options}
