"""opacus.utils.batch_memory_manager."""

from fastclip.engine.batch_memory import BatchMemoryManager, wrap_data_loader
from fastclip.opacus.rest import rest_of

__all__ = ["BatchMemoryManager", "wrap_data_loader"]

__getattr__ = rest_of("opacus.utils.batch_memory_manager")
