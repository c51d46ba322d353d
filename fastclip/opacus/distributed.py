"""opacus.distributed."""

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel, average_gradients

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "average_gradients"]
