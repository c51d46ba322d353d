"""Where the noise of a run comes from, and how its normal variables are made."""

from fastclip.noise.source import (
    NoiseSource,
    SecureNoise,
    SeededNoise,
    refuse_capture,
)

__all__ = ["NoiseSource", "SecureNoise", "SeededNoise", "refuse_capture"]
