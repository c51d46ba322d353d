"""opacus.privacy_engine."""

from fastclip.opacus.engine import PrivacyEngine
from fastclip.opacus.rest import rest_of

__all__ = ["PrivacyEngine"]

__getattr__ = rest_of("opacus.privacy_engine")
