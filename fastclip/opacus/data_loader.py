"""opacus.data_loader."""

from opacus.data_loader import DPDataLoader

__all__ = ["DPDataLoader"]
