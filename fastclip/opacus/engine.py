"""opacus.PrivacyEngine, with Opacus' defaults and those that `install` was given."""

from __future__ import annotations

import inspect
from typing import Any

from fastclip.engine.privacy_engine import FastPrivacyEngine

DEFAULTS: dict[str, Any] = {}
"""Defaults of make_private."""
_FAST = ("hooks", "functorch", "ew")
"""Opacus' modes that differ only in how they compute per-sample gradients. The fast mode runs them."""
KEYWORDS = inspect.signature(FastPrivacyEngine.make_private).parameters


class PrivacyEngine(FastPrivacyEngine):
    """`fastclip.FastPrivacyEngine` under Opacus' name.

    The fast mode replaces Opacus' modes "hooks" (its default), "functorch" and "ew", and leaves no
    `p.grad_sample`.

    Args:
        accountant: as for `FastPrivacyEngine`.
        secure_mode: as for `FastPrivacyEngine`.
        planner: as for `FastPrivacyEngine`.

    Formal guarantee: that of `FastPrivacyEngine`.
    """

    def make_private(self, **options: Any) -> tuple:
        """`FastPrivacyEngine.make_private` with the defaults of `install`.

        Raises:
            fastclip.errors.*: as `FastPrivacyEngine.make_private`.
        """
        options = _with_defaults(options)
        if options.get("grad_sample_mode") in _FAST:
            options["grad_sample_mode"] = "fast"
        return super().make_private(**options)

    def make_private_with_epsilon(self, **options: Any) -> tuple:
        """`FastPrivacyEngine.make_private_with_epsilon` with the defaults of `install`.

        Raises:
            fastclip.errors.*: as `FastPrivacyEngine.make_private_with_epsilon`.
        """
        return super().make_private_with_epsilon(**_with_defaults(options))


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the defaults; a named clipping strategy excludes the defaults' own arguments."""
    defaults = DEFAULTS
    if "clipping" in options:
        defaults = {n: v for n, v in defaults.items() if n in KEYWORDS and n != "clipping"}
    return {**defaults, **options}
