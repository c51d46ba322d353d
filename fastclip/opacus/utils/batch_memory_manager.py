"""opacus.utils.batch_memory_manager."""

from fastclip.opacus.rest import rest_of
from fastclip.optim.batch_memory import BatchMemoryManager, wrap_data_loader

__all__ = ["BatchMemoryManager", "wrap_data_loader"]

__getattr__ = rest_of("opacus.utils.batch_memory_manager")
