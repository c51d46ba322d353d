"""opacus.distributed."""

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel, average_gradients

from fastclip.opacus.rest import rest_of

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "average_gradients"]

__getattr__ = rest_of("opacus.distributed")
