"""opacus.optimizers."""

from fastclip.optim.by_hand import DistributedDPOptimizer, DPOptimizer

__all__ = ["DPOptimizer", "DistributedDPOptimizer"]
