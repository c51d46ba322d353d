"""The engine: the private model, its optimizer, and their connection to a sampled loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastclip.engine.privacy_engine import FastPrivacyEngine

__all__ = ["FastPrivacyEngine"]


if not TYPE_CHECKING:  # modules below must be importable without the whole engine

    def __getattr__(name: str) -> Any:
        """FastPrivacyEngine, imported when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastclip.engine import privacy_engine

        return globals().setdefault(name, getattr(privacy_engine, name))
