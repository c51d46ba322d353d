"""opacus.utils.uniform_sampler."""

from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

from fastclip.opacus.rest import rest_of

__all__ = ["DistributedUniformWithReplacementSampler", "UniformWithReplacementSampler"]

__getattr__ = rest_of("opacus.utils.uniform_sampler")
