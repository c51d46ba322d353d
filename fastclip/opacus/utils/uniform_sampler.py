"""opacus.utils.uniform_sampler."""

from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

__all__ = ["DistributedUniformWithReplacementSampler", "UniformWithReplacementSampler"]
