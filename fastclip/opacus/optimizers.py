"""opacus.optimizers."""

from opacus.optimizers import DistributedDPOptimizer

from fastclip.optim.by_hand import DPOptimizer

__all__ = ["DPOptimizer", "DistributedDPOptimizer"]
