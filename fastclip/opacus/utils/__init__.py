"""opacus.utils."""

from fastclip.opacus.utils import batch_memory_manager, uniform_sampler

__all__ = ["batch_memory_manager", "uniform_sampler"]
