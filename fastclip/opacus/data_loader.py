"""opacus.data_loader."""

from opacus.data_loader import DPDataLoader

from fastclip.opacus.rest import rest_of

__all__ = ["DPDataLoader"]

__getattr__ = rest_of("opacus.data_loader")
