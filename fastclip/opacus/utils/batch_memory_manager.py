"""opacus.utils.batch_memory_manager."""

from opacus.utils.batch_memory_manager import BatchMemoryManager, wrap_data_loader

__all__ = ["BatchMemoryManager", "wrap_data_loader"]
