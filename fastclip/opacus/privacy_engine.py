"""opacus.privacy_engine."""

from fastclip.opacus.engine import PrivacyEngine

__all__ = ["PrivacyEngine"]
