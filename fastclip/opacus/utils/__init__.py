"""opacus.utils."""

from fastclip.opacus.rest import rest_of
from fastclip.opacus.utils import batch_memory_manager, uniform_sampler

__all__ = ["batch_memory_manager", "uniform_sampler"]

__getattr__ = rest_of("opacus.utils")
