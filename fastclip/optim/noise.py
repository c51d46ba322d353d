"""The noise of an optimizer: its source, and Opacus' two names for it."""

from __future__ import annotations

import torch

from fastclip.errors import ArgumentError
from fastclip.noise import NoiseSource, SecureNoise, SeededNoise
from fastclip.optim.copies import NotCopied


class OwnsNoise(NotCopied):
    """An optimizer whose noise comes from a source; `generator` and `secure_mode` are Opacus' names."""

    _source: NoiseSource = SeededNoise()

    @property
    def noise_source(self) -> NoiseSource:
        """Source of all noise, that of the gradients and that of the counts.

        Setting it takes effect from the next draw.

        Raises:
            ArgumentError: where a lesser source would follow a secure one.
        """
        return self._source

    @noise_source.setter
    def noise_source(self, value: NoiseSource) -> None:
        if self._source.secure and not (value.secure and value.guarded):
            raise ArgumentError(
                "the noise of an optimizer in secure mode stays cryptographic and guarded, and "
                "passing a seed is prohibited in secure mode; for reproducible noise call "
                "make_private of an engine without secure_mode"
            )
        value.account = getattr(self, "account", None)
        self._source = value

    @property
    def generator(self) -> torch.Generator | None:
        """What noise is drawn from as it is; None for a stream of its own, and in secure mode."""
        return self._source.generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        if value is not None or not self._source.secure:
            self.noise_source = SeededNoise(value)

    @property
    def secure_mode(self) -> bool:
        """Noise is cryptographic and guarded against floating-point attacks; it cannot be turned off."""
        return self._source.secure

    @secure_mode.setter
    def secure_mode(self, value: bool) -> None:
        if value == self._source.secure:
            return
        if value and self.generator is not None:
            raise ArgumentError("Passing seed is prohibited in secure mode: omit the generator")
        self.noise_source = SecureNoise() if value else SeededNoise()
