"""Where the noise of one run comes from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastclip import ops


class NoiseSource:
    """The noise multiplier of a run and the generator that its noise is drawn from.

    It is never copied or pickled with its generator: whoever holds the stream can subtract the noise.

    Args:
        multiplier: sigma, or sigma_1 of a schedule. generator: torch's global one if None.
        secure: guard every draw against floating-point attacks.
    """

    def __init__(
        self, multiplier: float, generator: torch.Generator | None = None, secure: bool = False
    ) -> None:
        self.multiplier = multiplier
        self.generator = generator
        self.secure = secure

    def __deepcopy__(self, memo: dict[int, Any]) -> NoiseSource:
        return NoiseSource(self.multiplier, None, self.secure)

    def __reduce__(self) -> Any:
        return NoiseSource, (self.multiplier, None, self.secure)

    def draw(self, like: Tensor, std: float) -> Tensor | None:
        """N(0, std^2), independent for each entry of `like`; None where std is 0."""
        if not std > 0:
            return None
        noise = torch.empty_like(like)
        ops.fill_normal(noise, std, self.generator, self.secure)
        return noise
